//! Where the egress thread leaves a request's output for its HTTP response.
//!
//! A mailbox has one pending delta a choice. Writing merges into it, reading takes it away: a reader that is slow finds more at
//! once, nothing is dropped, and memory is bounded by the request's own output.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use forebay_api::ApiError;
use parking_lot::Mutex;

/// A token with its log-probabilities, as text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenLogprobs {
    /// The sampled token.
    pub(crate) sampled: Candidate,
    /// The most likely ones, descending.
    pub(crate) top: Vec<Candidate>,
}

/// A token that could have been sampled.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) id: i32,
    pub(crate) text: String,
    pub(crate) bytes: Vec<u8>,
    /// Natural logarithm, finite.
    pub(crate) logprob: f32,
}

/// What ended a choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum End {
    /// End-of-sequence was sampled.
    Eos(i32),
    /// A stop token of the client was sampled.
    Token(i32),
    /// A stop string was found.
    Text(String),
    /// As many tokens as asked for.
    Length,
    /// It was not served to its end.
    Error(ApiError),
}

/// What is new in a choice since the last delta.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Delta {
    /// New text. Some tokens' text may still be held back.
    pub(crate) text: String,
    /// New tokens, a stop token included.
    pub(crate) tokens: Vec<i32>,
    /// One a token of `tokens`, where asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// With the first token: prompt tokens found in the prefix cache.
    pub(crate) cached_tokens: Option<u32>,
    /// Set in the last delta.
    pub(crate) end: Option<End>,
}

impl Delta {
    /// Adds what came later and leaves it empty.
    pub(crate) fn merge(&mut self, newer: &mut Self) {
        self.text.push_str(&newer.text);
        newer.text.clear();
        self.tokens.append(&mut newer.tokens);
        self.logprobs.append(&mut newer.logprobs);
        self.cached_tokens = self.cached_tokens.or(newer.cached_tokens.take());
        self.end = self.end.take().or(newer.end.take());
    }
}

/// When a reader is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// At every delta, for a stream.
    EveryDelta,
    /// When all choices have ended, or one in an error.
    AtEnd,
}

#[derive(Debug)]
struct Inner {
    deltas: Vec<Option<Delta>>,
    /// Choices that have a delta.
    dirty: Vec<u32>,
    running: usize,
    failed: bool,
    wake: Wake,
    waker: Option<Waker>,
}

impl Inner {
    fn ready(&self) -> bool {
        match self.wake {
            Wake::EveryDelta => !self.dirty.is_empty() || self.running == 0,
            Wake::AtEnd => self.failed || self.running == 0,
        }
    }
}

/// Writes one choice of a mailbox. Dropped before the end, it ends the choice with an error: a reader always sees an end.
#[derive(Debug)]
pub(crate) struct Sender {
    inner: Arc<Mutex<Inner>>,
    choice: u32,
    ended: bool,
}

/// Reads a mailbox.
#[derive(Debug)]
pub(crate) struct Receiver {
    inner: Arc<Mutex<Inner>>,
}

/// A mailbox for `choices` choices.
pub(crate) fn mailbox(choices: u32, wake: Wake) -> (Vec<Sender>, Receiver) {
    let inner = Arc::new(Mutex::new(Inner {
        deltas: vec![None; choices as usize],
        dirty: Vec::with_capacity(choices as usize),
        running: choices as usize,
        failed: false,
        wake,
        waker: None,
    }));
    let sender = |choice| Sender { inner: Arc::clone(&inner), choice, ended: false };
    ((0..choices).map(sender).collect(), Receiver { inner })
}

impl Sender {
    /// Merges `delta` into what is pending and leaves it empty. Nothing may follow a delta with an end.
    pub(crate) fn send(&mut self, delta: &mut Delta) {
        debug_assert!(!self.ended, "a choice ends once");
        let waker = {
            let mut inner = self.inner.lock();
            if let Some(end) = &delta.end {
                self.ended = true;
                inner.running -= 1;
                inner.failed |= matches!(end, End::Error(_));
            }
            match &mut inner.deltas[self.choice as usize] {
                Some(pending) => pending.merge(delta),
                empty => {
                    *empty = Some(std::mem::take(delta));
                    inner.dirty.push(self.choice);
                }
            }
            if inner.ready() { inner.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the choice with an error.
    pub(crate) fn fail(mut self, error: ApiError) {
        self.send(&mut Delta { end: Some(End::Error(error)), ..Delta::default() });
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.ended {
            self.send(&mut Delta { end: Some(End::Error(ApiError::Aborted)), ..Delta::default() });
        }
    }
}

impl Receiver {
    /// Takes everything that is pending into `out` (choice, delta); ready with nothing once all choices have ended and been taken.
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
            return Poll::Pending;
        }
        for choice in inner.dirty.drain(..) {
            let delta = inner.deltas[choice as usize].take();
            out.extend(delta.map(|delta| (choice, delta)));
        }
        Poll::Ready(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake as _;

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn token(id: i32) -> Delta {
        Delta { text: format!("{id} "), tokens: vec![id], ..Delta::default() }
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
        let (mut senders, mut receiver) = mailbox(1, Wake::EveryDelta);
        let count = Arc::new(Count::default());
        assert_eq!(take(&mut receiver, &count), None);
        for id in 0..3 {
            senders[0].send(&mut token(id));
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        senders[0].send(&mut end(End::Length));
        let merged = Delta {
            text: "0 1 2 ".into(),
            tokens: vec![0, 1, 2],
            end: Some(End::Length),
            ..Delta::default()
        };
        assert_eq!(take(&mut receiver, &count), Some(vec![(0, merged)]));
        assert_eq!(take(&mut receiver, &count), Some(vec![]));
    }

    #[test]
    fn a_reader_of_the_whole_is_woken_once() {
        let (mut senders, mut receiver) = mailbox(2, Wake::AtEnd);
        let count = Arc::new(Count::default());
        senders[0].send(&mut token(1));
        assert_eq!(take(&mut receiver, &count), None);
        senders[0].send(&mut end(End::Length));
        senders[1].send(&mut token(2));
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        senders[1].send(&mut end(End::Eos(2)));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(take(&mut receiver, &count).unwrap().len(), 2);
    }

    #[test]
    fn a_lost_sender_ends_its_choice() {
        for wake in [Wake::EveryDelta, Wake::AtEnd] {
            let (senders, mut receiver) = mailbox(2, wake);
            let count = Arc::new(Count::default());
            assert_eq!(take(&mut receiver, &count), None);
            drop(senders);
            assert_eq!(count.0.load(Ordering::Relaxed), 1);
            let error = || end(End::Error(ApiError::Aborted));
            assert_eq!(take(&mut receiver, &count), Some(vec![(0, error()), (1, error())]));
        }
        Arc::new(Count::default()).wake();
    }

    proptest! {
        /// Whatever the interleaving, each choice's deltas add up to what was sent, in order, with the one end last.
        #[test]
        fn nothing_is_lost_or_reordered(
            moves in proptest::collection::vec((0u32..3, any::<bool>()), 0..60),
        ) {
            let (mut senders, mut receiver) = mailbox(3, Wake::EveryDelta);
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
                    senders[choice as usize].send(&mut token(next as i32));
                }
            }
            for sender in &mut senders {
                sender.send(&mut end(End::Length));
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
