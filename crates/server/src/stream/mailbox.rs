//! The box in which the egress thread leaves a request's output for its HTTP response, unless it
//! writes to the socket.
//!
//! A mailbox has one pending delta for each choice. A write merges into it, and a read takes it. So
//! a slow reader finds more at once, and nothing is dropped. Unread deltas have a limit. Beyond it
//! the response ends with an error, its content is freed, and the writer is told to stop.
//!
//! A streamed response lends the mailbox its encoder and its connection. As long as the
//! connection's line is open and nothing is pending, a delta does not stop here. The thread that
//! brings the delta writes it to the socket, and the response is not woken. The response gets the
//! rest: deltas that come while the line is shut (a slow reader, an answer whose head has not been
//! written), and every end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use forebay_api::ApiError;
use forebay_http::{Charge, Line, Written};
use parking_lot::Mutex;

use crate::stream::delta::{Delta, End};
use crate::stream::outlet::{Chunk, Encoder, Outlet};
use crate::stream::tally::Tally;

/// The time at which a reader is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The reader of a stream is woken when something is pending. Deltas that come before it looks
    /// are merged.
    Pending,
    /// The reader of a stream is woken at every delta, and reads each by itself, as in servers
    /// without batching.
    EveryDelta,
    /// The reader is woken when all choices have ended, or one in an error.
    AtEnd,
}

/// The bounds of what waits for a client.
pub(crate) struct Bounds {
    /// The largest number of bytes.
    pub(crate) limit: usize,
    /// Bytes among them that repeat the prompts. They are known before anything has come.
    pub(crate) repeated: usize,
    /// The charge that what waits is part of.
    pub(crate) charge: Arc<Charge>,
}

impl Bounds {
    /// Takes so many bytes of deltas in.
    fn admit(&self, unread: usize) -> Result<(), ApiError> {
        let bytes = unread.saturating_add(self.repeated);
        if bytes > self.limit {
            return Err(ApiError::AnswerTooLarge { limit: self.limit });
        }
        Ok(self.charge.answer(bytes)?)
    }
}

struct Inner {
    /// The pending deltas, by choice.
    deltas: Vec<Option<Delta>>,
    /// Choices that have a delta.
    dirty: Vec<u32>,
    /// Instead of both, with [`Wake::EveryDelta`].
    queue: VecDeque<(u32, Delta)>,
    tally: Tally,
    running: usize,
    failed: bool,
    /// Weight of the pending deltas.
    unread: usize,
    bounds: Bounds,
    /// The error for all choices once more than the bounds was unread.
    overflown: Option<ApiError>,
    /// True if the reader is gone.
    gone: bool,
    wake: Wake,
    waker: Option<Waker>,
    outlet: Option<Outlet>,
}

impl Inner {
    fn is_empty(&self) -> bool {
        self.dirty.is_empty() && self.queue.is_empty()
    }

    fn ready(&self) -> bool {
        match self.wake {
            Wake::Pending | Wake::EveryDelta => !self.is_empty() || self.running == 0,
            Wake::AtEnd => self.failed || self.running == 0,
        }
    }

    fn line(&self) -> Option<&Line> {
        self.outlet.as_ref()?.line.as_deref()
    }

    /// Writes the delta to the socket if that can be done now, and leaves it empty. `None`: it has
    /// to be left here.
    fn pass(&mut self, choice: u32, delta: &mut Delta, chunk: &mut Chunk) -> Option<Written> {
        if delta.end.is_some() || !self.is_empty() {
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
        Some(if chunk.is_empty() { Written::Whole } else { line.write(chunk) })
    }

    /// Keeps the delta until it is read; gives who is to be woken.
    fn leave(&mut self, choice: u32, delta: &mut Delta) -> Option<Waker> {
        let unread = self.unread + delta.weight();
        if delta.end.is_none() && self.overflown.is_none() {
            self.overflown = self.bounds.admit(unread).err();
            if self.overflown.is_some() {
                self.forget();
            }
        }
        match &self.overflown {
            Some(error) if delta.end.is_none() => {
                delta.clear();
                delta.end = Some(End::Error(error.clone()));
            }
            _ => self.unread = unread,
        }
        if let Some(end) = &delta.end {
            self.running -= 1;
            self.failed |= matches!(end, End::Error(_));
        }
        if self.gone {
            self.unread = 0;
            delta.clear();
        } else if self.wake == Wake::EveryDelta {
            self.queue.push_back((choice, std::mem::take(delta)));
        } else {
            match &mut self.deltas[choice as usize] {
                Some(pending) => pending.merge(delta),
                empty => {
                    *empty = Some(std::mem::take(delta));
                    self.dirty.push(choice);
                }
            }
        }
        if self.ready() { self.waker.take() } else { None }
    }

    /// Drops the pending delta.
    fn forget(&mut self) {
        self.deltas.fill(None);
        self.dirty.clear();
        self.queue = VecDeque::new();
        self.unread = 0;
    }
}

/// The fate of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// More may follow.
    Taken,
    /// The delta was the last: it had an end, or too much was unread.
    Ended,
}

/// A writer of one choice of a mailbox. To drop it before the end ends the choice with an error, so
/// a reader always sees an end.
pub(crate) struct Sender {
    inner: Arc<Mutex<Inner>>,
    choice: u32,
    ended: bool,
}

/// Reads a mailbox.
pub(crate) struct Receiver {
    inner: Arc<Mutex<Inner>>,
}

/// A mailbox for the choices of `tally`. It holds unread deltas within `bounds`
/// ([`Delta::weight`]).
pub(crate) fn mailbox(tally: Tally, wake: Wake, bounds: Bounds) -> (Vec<Sender>, Receiver) {
    let choices = tally.choices();
    let inner = Arc::new(Mutex::new(Inner {
        deltas: vec![None; choices],
        dirty: Vec::with_capacity(choices),
        queue: VecDeque::new(),
        tally,
        running: choices,
        failed: false,
        unread: 0,
        bounds,
        overflown: None,
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
    /// Passes `delta` on, or merges it into the pending one, and leaves it empty. Nothing may
    /// follow a delta with an end, nor [`Sent::Ended`].
    pub(crate) fn send(&mut self, delta: &mut Delta, chunk: &mut Chunk) -> Sent {
        debug_assert!(!self.ended, "a choice ends once");
        let mut inner = self.inner.lock();
        let waker = match inner.pass(self.choice, delta, chunk) {
            Some(Written::Whole) => None,
            Some(Written::Waiting) => inner.waker.take(),
            None => {
                self.ended = delta.end.is_some();
                let waker = inner.leave(self.choice, delta);
                self.ended |= inner.overflown.is_some();
                waker
            }
        };
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
        if self.ended { Sent::Ended } else { Sent::Taken }
    }

    /// Ends the choice with an error.
    pub(crate) fn fail(mut self, error: ApiError) {
        self.end(error);
    }

    fn end(&mut self, error: ApiError) {
        let mut delta = Delta { end: Some(End::Error(error)), ..Delta::default() };
        self.send(&mut delta, &mut Chunk::default());
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.ended {
            self.end(ApiError::Aborted);
        }
    }
}

impl Receiver {
    /// Lets deltas be written through `outlet` from now on, pending ones too: see
    /// [`Receiver::encode`].
    pub(crate) fn lend(&self, outlet: Outlet) {
        self.inner.lock().outlet = Some(outlet);
    }

    /// Calls `write` with the encoder, if one was lent.
    pub(crate) fn encode<R>(&self, write: impl FnOnce(&mut dyn Encoder, &Tally) -> R) -> Option<R> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let outlet = inner.outlet.as_mut()?;
        Some(write(outlet.encoder.as_mut(), &inner.tally))
    }

    /// Tokens that were read or passed by.
    pub(crate) fn tally(&self) -> Tally {
        self.inner.lock().tally.clone()
    }

    /// Takes pending deltas into `out` (choice, delta). It is ready without any once all choices
    /// have ended and were taken.
    pub(crate) fn poll(
        &mut self,
        context: &mut Context<'_>,
        out: &mut Vec<(u32, Delta)>,
    ) -> Poll<()> {
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
        // What is read here goes through hyper: nothing may overtake it.
        if let Some(line) = inner.line() {
            line.shut();
        }
        let from = out.len();
        out.extend(inner.queue.pop_front());
        for choice in inner.dirty.drain(..) {
            let delta = inner.deltas[choice as usize].take();
            out.extend(delta.map(|delta| (choice, delta)));
        }
        for (choice, delta) in &out[from..] {
            inner.unread -= delta.weight();
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
        inner.forget();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake as _;

    use forebay_http::{ByteBudget, ClientId, LineIo, Socket};
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A line and its client.
    async fn line() -> (Arc<Line>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let socket = listener.accept().await.unwrap().0;
        // The runtime has to see once that the socket takes data.
        socket.writable().await.unwrap();
        (Line::new(Socket::Tcp(socket)), client)
    }

    /// Bytes that these tests never reach.
    const LIMIT: usize = 1 << 20;

    fn bounds(limit: usize) -> Bounds {
        let budget = ByteBudget::new(1 << 30);
        Bounds { limit, repeated: 0, charge: Arc::new(budget.open(ClientId(1))) }
    }

    #[derive(Default)]
    struct Count(AtomicUsize);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn tally(choices: u32) -> Tally {
        Tally::new([(1, choices)].into_iter())
    }

    impl Sender {
        fn send_delta(&mut self, mut delta: Delta) {
            self.send(&mut delta, &mut Chunk::default());
            assert_eq!(delta, Delta::default());
        }
    }

    fn token(id: i32) -> Delta {
        let mut delta = Delta { tokens: vec![id], ..Delta::default() };
        delta.parts.content(&format!("{id} "));
        delta
    }
    fn end(end: End) -> Delta {
        Delta { end: Some(end), ..Delta::default() }
    }

    fn take(receiver: &mut Receiver, count: &Arc<Count>) -> Option<Vec<(u32, Delta)>> {
        let waker = Waker::from(Arc::clone(count));
        let mut out = Vec::new();
        match receiver.poll(&mut Context::from_waker(&waker), &mut out) {
            Poll::Ready(()) => Some(out),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_slow_reader_gets_merged_deltas_and_one_wake() {
        let (mut senders, mut receiver) = mailbox(tally(1), Wake::Pending, bounds(LIMIT));
        let count = Arc::new(Count::default());
        assert_eq!(take(&mut receiver, &count), None);
        for id in 0..3 {
            senders[0].send_delta(token(id));
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        senders[0].send_delta(end(End::Length));
        let mut merged =
            Delta { tokens: vec![0, 1, 2], end: Some(End::Length), ..Delta::default() };
        merged.parts.content("0 1 2 ");
        assert_eq!(take(&mut receiver, &count), Some(vec![(0, merged)]));
        assert_eq!(take(&mut receiver, &count), Some(vec![]));
    }

    #[test]
    fn a_reader_of_the_whole_is_woken_once() {
        let (mut senders, mut receiver) = mailbox(tally(2), Wake::AtEnd, bounds(LIMIT));
        let count = Arc::new(Count::default());
        senders[0].send_delta(token(1));
        assert_eq!(take(&mut receiver, &count), None);
        senders[0].send_delta(end(End::Length));
        senders[1].send_delta(token(2));
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        senders[1].send_delta(end(End::Eos(2)));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(take(&mut receiver, &count).unwrap().len(), 2);
    }

    #[test]
    fn a_lost_sender_ends_its_choice() {
        for wake in [Wake::Pending, Wake::AtEnd] {
            let (senders, mut receiver) = mailbox(tally(2), wake, bounds(LIMIT));
            let count = Arc::new(Count::default());
            assert_eq!(take(&mut receiver, &count), None);
            drop(senders);
            assert_eq!(count.0.load(Ordering::Relaxed), 1);
            let error = || end(End::Error(ApiError::Aborted));
            assert_eq!(take(&mut receiver, &count), Some(vec![(0, error()), (1, error())]));
        }
        Arc::new(Count::default()).wake();
    }

    #[test]
    fn what_nobody_reads_is_bounded_and_ends_in_an_error() {
        for wake in [Wake::Pending, Wake::EveryDelta, Wake::AtEnd] {
            let (mut senders, mut receiver) = mailbox(tally(2), wake, bounds(1000));
            let count = Arc::new(Count::default());
            assert_eq!(take(&mut receiver, &count), None);
            senders[0].send_delta(token(7));
            let mut sent = 0;
            let mut most = 0;
            while senders[1].send(&mut token(8), &mut Chunk::default()) == Sent::Taken {
                sent += token(8).weight();
                most = most.max(receiver.inner.lock().unread);
                assert!(sent < 2000, "{wake:?} is not bounded");
            }
            assert!((900..=1000).contains(&most), "{wake:?}: {most}");
            assert_eq!(receiver.inner.lock().unread, 0, "what it held is freed");
            // The first to write after that ends as well, and an end of its own is an end.
            assert_eq!(senders[0].send(&mut token(9), &mut Chunk::default()), Sent::Ended);
            drop(senders);
            let mut got = take(&mut receiver, &count).unwrap();
            got.extend(take(&mut receiver, &count).unwrap());
            let error = end(End::Error(ApiError::AnswerTooLarge { limit: 1000 }));
            assert_eq!(got, [(1, error.clone()), (0, error)]);
        }
    }

    #[test]
    fn what_repeats_the_prompt_takes_room_and_the_charge_grows_with_the_rest() {
        let budget = ByteBudget::new(1 << 20);
        let charge = Arc::new(budget.open(ClientId(1)));
        let bounds = Bounds { limit: 1 << 20, repeated: 600_000, charge };
        let (mut senders, mut receiver) = mailbox(tally(1), Wake::AtEnd, bounds);
        let mut sent = 0;
        while senders[0].send(&mut token(8), &mut Chunk::default()) == Sent::Taken {
            sent += token(8).weight();
            assert!(budget.used() >= 600_000 + sent, "{} for {sent}", budget.used());
        }
        assert!(600_000 + sent <= 1 << 20, "{sent}");
        let got = take(&mut receiver, &Arc::default()).unwrap();
        assert!(matches!(got[0].1.end, Some(End::Error(ApiError::RequestTooLarge { .. }))));
    }

    #[test]
    fn what_is_read_makes_room() {
        let (mut senders, mut receiver) = mailbox(tally(1), Wake::Pending, bounds(100));
        for id in 0..1000 {
            assert_eq!(senders[0].send(&mut token(id), &mut Chunk::default()), Sent::Taken);
            assert_eq!(take(&mut receiver, &Arc::default()), Some(vec![(0, token(id))]));
        }
        drop(receiver);
        for id in 0..1000 {
            assert_eq!(senders[0].send(&mut token(id), &mut Chunk::default()), Sent::Taken);
        }
        let inner = Arc::clone(&senders[0].inner);
        assert!(inner.lock().is_empty(), "nothing is kept for nobody");
    }

    /// Writes the text, in brackets.
    struct Brackets;
    impl Encoder for Brackets {
        fn resumable(&self) -> bool {
            false
        }
        fn resume(&mut self, _: &Delta) {}
        fn delta(
            &mut self,
            _: u32,
            delta: &mut Delta,
            tally: &Tally,
            out: &mut Vec<u8>,
        ) -> serde_json::Result<()> {
            let text = delta.parts.as_content().unwrap_or_default();
            if !text.is_empty() {
                let text = format!("[{text}{}]", tally.generated_tokens());
                out.extend_from_slice(text.as_bytes());
            }
            Ok(())
        }
        fn end(&mut self, _: &Tally, _: &mut Vec<u8>) -> serde_json::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn an_open_line_takes_deltas_past_the_reader() {
        let (line, mut client) = line().await;
        let mut io = LineIo(Arc::clone(&line));
        let (mut senders, mut receiver) = mailbox(tally(1), Wake::Pending, bounds(LIMIT));
        receiver.lend(Outlet { encoder: Box::new(Brackets), line: Some(Arc::clone(&line)) });
        let count = Arc::new(Count::default());
        let wakes = || count.0.load(Ordering::Relaxed);
        // Nobody has asked for the line yet.
        io.flush().await.unwrap();
        senders[0].send_delta(token(1));
        assert_eq!(take(&mut receiver, &count), Some(vec![(0, token(1))]));
        assert_eq!(take(&mut receiver, &count), None);
        // Asked, but hyper still holds something.
        senders[0].send_delta(token(2));
        assert_eq!(wakes(), 1);
        assert_eq!(take(&mut receiver, &count), Some(vec![(0, token(2))]));
        assert_eq!(take(&mut receiver, &count), None);
        io.flush().await.unwrap();
        senders[0].send_delta(token(3));
        senders[0].send_delta(Delta { tokens: vec![4], ..Delta::default() });
        senders[0].send_delta(token(5));
        let mut got = [0; 20];
        client.read_exact(&mut got).await.unwrap();
        assert_eq!(std::str::from_utf8(&got), Ok("5\r\n[3 3]\r\n5\r\n[5 5]\r\n"));
        assert_eq!(wakes(), 1);
        // The end is the reader's, and whatever it reads shuts the line.
        senders[0].send_delta(end(End::Length));
        assert_eq!(wakes(), 2);
        assert_eq!(take(&mut receiver, &count), Some(vec![(0, end(End::Length))]));
        assert!(!line.is_open());
        assert_eq!(receiver.tally().generated_tokens(), 5);
    }

    #[tokio::test]
    async fn a_reader_that_has_gone_shuts_the_line() {
        let (line, _client) = line().await;
        let mut io = LineIo(Arc::clone(&line));
        let (mut senders, mut receiver) = mailbox(tally(1), Wake::Pending, bounds(LIMIT));
        receiver.lend(Outlet { encoder: Box::new(Brackets), line: Some(Arc::clone(&line)) });
        assert_eq!(take(&mut receiver, &Arc::default()), None);
        io.flush().await.unwrap();
        assert!(line.is_open());
        drop(receiver);
        assert!(!line.is_open());
        senders[0].send_delta(token(1));
        senders[0].send_delta(end(End::Length));
    }

    proptest! {
        /// Each choice's deltas add up to the output that was sent, in order, with the one end
        /// last. The interleaving makes no difference.
        #[test]
        fn nothing_is_lost_or_reordered(
            moves in proptest::collection::vec((0u32..3, any::<bool>()), 0..60),
            wake in prop_oneof![Just(Wake::Pending), Just(Wake::EveryDelta)],
        ) {
            let (mut senders, mut receiver) = mailbox(tally(3), wake, bounds(LIMIT));
            let count = Arc::new(Count::default());
            let mut sent = vec![Vec::new(); 3];
            let mut got: Vec<Delta> = vec![Delta::default(); 3];
            let mut collect = |batch: Vec<(u32, Delta)>| {
                for (choice, mut delta) in batch {
                    assert_eq!(got[choice as usize].end, None);
                    got[choice as usize].merge(&mut delta);
                }
            };
            for (next, (choice, read)) in moves.into_iter().enumerate() {
                if read {
                    if let Some(batch) = take(&mut receiver, &count) {
                        collect(batch);
                    }
                } else {
                    sent[choice as usize].push(next as i32);
                    senders[choice as usize].send_delta(token(next as i32));
                }
            }
            for sender in &mut senders {
                sender.send_delta(end(End::Length));
            }
            while let Some(batch) = take(&mut receiver, &count).filter(|batch| !batch.is_empty()) {
                collect(batch);
            }
            for (sent, got) in sent.into_iter().zip(got) {
                prop_assert_eq!(got.tokens, sent);
                prop_assert_eq!(got.end, Some(End::Length));
            }
        }
    }
}
