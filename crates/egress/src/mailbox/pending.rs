//! The unread deltas, and their bounds.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_api::ApiError;
use forebay_http::Charge;

use crate::delta::{Delta, End};

/// The limits on unread output.
pub struct MailboxBounds {
    /// The largest size of the unread output in bytes.
    pub limit: usize,
    /// The number of output bytes that repeat the prompts. They count towards the limit from the
    /// start, because their number is known in advance.
    pub repeated: usize,
    /// The request's charge, which includes the unread bytes.
    pub charge: Arc<Charge>,
}

impl MailboxBounds {
    /// Checks the limit, and charges `unread` bytes of deltas.
    fn admit(&self, unread: usize) -> Result<(), ApiError> {
        let bytes = unread.saturating_add(self.repeated);
        if bytes > self.limit {
            return Err(ApiError::AnswerTooLarge { limit: self.limit });
        }
        Ok(self.charge.answer(bytes)?)
    }
}

/// The deltas that wait for the reader.
pub(super) struct Pending {
    /// The pending deltas, by choice.
    deltas: Vec<Option<Delta>>,
    /// The choices that have a pending delta.
    dirty: Vec<u32>,
    /// The pending deltas in order. Used in place of `deltas` and `dirty` if every delta is read
    /// separately.
    queue: VecDeque<(u32, Delta)>,
    /// True if deltas of a choice are merged.
    merges: bool,
    /// The total weight of the pending deltas.
    pub(super) unread: usize,
    bounds: MailboxBounds,
    /// The error for all choices, once the unread output has exceeded the limits.
    overflown: Option<ApiError>,
}

impl Pending {
    pub(super) fn new(choices: usize, merges: bool, bounds: MailboxBounds) -> Self {
        Self {
            deltas: vec![None; choices],
            dirty: Vec::with_capacity(choices),
            queue: VecDeque::new(),
            merges,
            unread: 0,
            bounds,
            overflown: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dirty.is_empty() && self.queue.is_empty()
    }

    /// True once the unread output has exceeded the limits.
    pub(super) fn is_overflown(&self) -> bool {
        self.overflown.is_some()
    }

    /// Adds a delta to the unread output. Beyond the limits, all unread output is dropped, and the
    /// delta is replaced by an end with the error.
    pub(super) fn count(&mut self, delta: &mut Delta) {
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
    }

    /// Moves a delta that was counted to the unread output, which leaves `delta` empty.
    pub(super) fn keep(&mut self, choice: u32, delta: &mut Delta) {
        if !self.merges {
            self.queue.push_back((choice, std::mem::take(delta)));
            return;
        }
        match &mut self.deltas[choice as usize] {
            Some(pending) => pending.merge(delta),
            empty => {
                *empty = Some(std::mem::take(delta));
                self.dirty.push(choice);
            }
        }
    }

    /// Moves the deltas of one read into `out`: the next delta in the queue, or the merged delta of
    /// each choice.
    pub(super) fn take(&mut self, out: &mut Vec<(u32, Delta)>) {
        let from = out.len();
        out.extend(self.queue.pop_front());
        for choice in self.dirty.drain(..) {
            let delta = self.deltas[choice as usize].take();
            out.extend(delta.map(|delta| (choice, delta)));
        }
        self.unread -= out[from..].iter().map(|(_, delta)| delta.weight()).sum::<usize>();
    }

    /// Drops all unread output.
    pub(super) fn forget(&mut self) {
        self.deltas.fill(None);
        self.dirty.clear();
        self.queue = VecDeque::new();
        self.unread = 0;
    }
}
