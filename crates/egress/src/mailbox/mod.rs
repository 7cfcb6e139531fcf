//! The mailbox of a request: the egress thread stores output here for the HTTP response, unless it
//! writes directly to the socket.
//!
//! A mailbox has one pending delta per choice. Sending merges into the pending delta, and reading
//! takes it. So a slow client causes no backpressure: it gets larger deltas, and nothing is lost.
//! Unread deltas have a limit. Beyond the limit the response ends with an error, its pending output
//! is freed, and the sender stops.
//!
//! A streamed response lends the mailbox its encoder and its connection. While the connection's
//! line is open and nothing is pending, the egress thread writes deltas directly to the socket,
//! without waking the response. The response reads everything else: deltas that arrive while the
//! line is shut, and the end of every choice. The line is shut if the reader is slow, or if the
//! response head is not written yet.

mod pending;

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use forebay_api::ApiError;
use forebay_http::{Line, WriteOutcome};
use parking_lot::Mutex;

use crate::delta::{Delta, End};
use crate::outlet::{Chunk, EventEncoder, Outlet};
use crate::tally::Tally;
use pending::Pending;

pub use pending::MailboxBounds;

/// When a reader is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeRule {
    /// The reader of a stream is woken when a delta is pending. Deltas that arrive before it reads
    /// are merged.
    Pending,
    /// The reader of a stream is woken at every delta, and reads each one separately, as in servers
    /// that do not merge deltas.
    EveryDelta,
    /// The reader is woken when all choices have ended, or when one has failed.
    AtEnd,
}

struct Inner {
    pending: Pending,
    tally: Tally,
    running: usize,
    failed: bool,
    /// True if the reader was dropped.
    gone: bool,
    wake: WakeRule,
    waker: Option<Waker>,
    outlet: Option<Outlet>,
}

impl Inner {
    fn ready(&self) -> bool {
        match self.wake {
            WakeRule::Pending | WakeRule::EveryDelta => {
                !self.pending.is_empty() || self.running == 0
            }
            WakeRule::AtEnd => self.failed || self.running == 0,
        }
    }

    fn line(&self) -> Option<&Line> {
        self.outlet.as_ref()?.line.as_deref()
    }

    /// Writes the delta to the socket as a chunk (an SSE event) if that is possible now, and clears
    /// it. Returns `None` if the delta must be stored for the reader.
    fn pass(&mut self, choice: u32, delta: &mut Delta, chunk: &mut Chunk) -> Option<WriteOutcome> {
        if delta.end.is_some() || !self.pending.is_empty() {
            return None;
        }
        let Outlet { encoder, line: Some(line) } = self.outlet.as_mut()? else { return None };
        if !line.is_open() {
            return None;
        }
        self.tally.add(choice, delta);
        let events = chunk.start();
        let encoded = encoder.delta(choice, delta, &self.tally, events);
        delta.clear();
        if let Err(error) = encoded {
            let reason = format!("a chunk could not be written as JSON: {error}");
            delta.end = Some(End::Error(ApiError::Internal { reason, code: None }));
            return None;
        }
        let chunk = chunk.finish();
        Some(if chunk.is_empty() { WriteOutcome::Whole } else { line.write(chunk) })
    }

    /// Stores the delta until it is read. Returns the waker to call.
    fn leave(&mut self, choice: u32, delta: &mut Delta) -> Option<Waker> {
        self.pending.count(delta);
        if let Some(end) = &delta.end {
            self.running -= 1;
            self.failed |= matches!(end, End::Error(_));
        }
        if self.gone {
            self.pending.forget();
            delta.clear();
        } else {
            self.pending.keep(choice, delta);
        }
        if self.ready() { self.waker.take() } else { None }
    }
}

/// The outcome of sending a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The delta was accepted; more may follow.
    Taken,
    /// This was the last delta: it had an end, or too much output is unread.
    Ended,
}

/// The sender of one choice. Dropping it before the end ends the choice with an error, so a reader
/// always gets an end.
pub struct Sender {
    inner: Arc<Mutex<Inner>>,
    choice: u32,
    ended: bool,
}

/// The reader of a mailbox.
pub struct Receiver {
    inner: Arc<Mutex<Inner>>,
}

/// Creates a mailbox for the choices of `tally`. The total weight of unread deltas
/// ([`Delta::weight`]) must stay within `bounds`.
pub fn mailbox(tally: Tally, wake: WakeRule, bounds: MailboxBounds) -> (Vec<Sender>, Receiver) {
    let choices = tally.choices();
    let inner = Arc::new(Mutex::new(Inner {
        pending: Pending::new(choices, wake != WakeRule::EveryDelta, bounds),
        tally,
        running: choices,
        failed: false,
        gone: false,
        wake,
        waker: None,
        outlet: None,
    }));
    let sender = |choice| Sender { inner: Arc::clone(&inner), choice, ended: false };
    let senders = (0..u32::try_from(choices).unwrap_or(u32::MAX)).map(sender).collect();
    (senders, Receiver { inner })
}

impl Sender {
    /// Writes `delta` to the socket or merges it into the pending delta, and clears `delta`. The
    /// caller must send nothing after a delta with an end, or after [`Sent::Ended`].
    pub(crate) fn send(&mut self, delta: &mut Delta, chunk: &mut Chunk) -> Sent {
        debug_assert!(!self.ended, "a choice ends once");
        let mut inner = self.inner.lock();
        let waker = match inner.pass(self.choice, delta, chunk) {
            Some(WriteOutcome::Whole) => None,
            Some(WriteOutcome::Waiting) => inner.waker.take(),
            None => {
                self.ended = delta.end.is_some();
                let waker = inner.leave(self.choice, delta);
                self.ended |= inner.pending.is_overflown();
                waker
            }
        };
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
        if self.ended { Sent::Ended } else { Sent::Taken }
    }

    /// Ends the choice with `end`.
    pub fn finish(mut self, end: End) {
        self.end(end);
    }

    fn end(&mut self, end: End) {
        let mut delta = Delta { end: Some(end), ..Delta::default() };
        self.send(&mut delta, &mut Chunk::default());
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.ended {
            self.end(End::Error(ApiError::Aborted));
        }
    }
}

impl Receiver {
    /// Lends the mailbox an `outlet` for all further deltas. Pending ones are encoded with it too:
    /// see [`Receiver::encode`].
    pub fn lend(&self, outlet: Outlet) {
        self.inner.lock().outlet = Some(outlet);
    }

    /// Calls `write` with the encoder, and returns its result; `None` if no encoder was lent.
    pub fn encode<R>(&self, write: impl FnOnce(&mut dyn EventEncoder, &Tally) -> R) -> Option<R> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let outlet = inner.outlet.as_mut()?;
        Some(write(outlet.encoder.as_mut(), &inner.tally))
    }

    /// Returns the tally of all output that was read, or written directly to the socket.
    pub fn tally(&self) -> Tally {
        self.inner.lock().tally.clone()
    }

    /// Moves pending deltas into `out`, each with its choice. Ready without a delta once all
    /// choices have ended and all their output was read.
    pub fn poll(&mut self, context: &mut Context<'_>, out: &mut Vec<(u32, Delta)>) -> Poll<()> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if !inner.ready() {
            match &mut inner.waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => inner.waker = Some(context.waker().clone()),
            }
            if let Some(line) = inner.line() {
                line.ask();
            }
            return Poll::Pending;
        }
        // Hyper writes this output, so the egress thread must not write before hyper has written
        // it.
        if let Some(line) = inner.line() {
            line.shut();
        }
        let from = out.len();
        inner.pending.take(out);
        for (choice, delta) in &out[from..] {
            inner.tally.add(*choice, delta);
        }
        Poll::Ready(())
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        if let Some(line) = inner.line() {
            line.shut();
        }
        inner.outlet = None;
        inner.gone = true;
        inner.pending.forget();
    }
}

#[cfg(test)]
mod tests;
