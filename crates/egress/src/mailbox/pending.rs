//! The unread deltas, and their bounds.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_api::ApiError;
use forebay_http::Charge;

use crate::delta::{Delta, End};

/// The bounds of unread output.
pub struct MailboxBounds {
    /// The largest number of bytes.
    pub limit: usize,
    /// The bytes among them that repeat prompts, which are known in advance.
    pub repeated: usize,
    /// The charge that includes the unread bytes.
    pub charge: Arc<Charge>,
}

impl MailboxBounds {
    /// Admits `unread` bytes of deltas.
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
    /// Choices that have a delta.
    dirty: Vec<u32>,
    /// Replaces both if each delta is read by itself.
    queue: VecDeque<(u32, Delta)>,
    /// True if a delta is merged into the pending one.
    merges: bool,
    /// Weight of the pending deltas.
    pub(super) unread: usize,
    bounds: MailboxBounds,
    /// The error for all choices, if more was unread than the bounds allow.
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

    /// True once the unread deltas have exceeded the bounds.
    pub(super) fn is_overflown(&self) -> bool {
        self.overflown.is_some()
    }

    /// Counts a delta. Beyond the bounds, everything unread is dropped, and the delta becomes an
    /// end with the error.
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

    /// Keeps a delta that was counted, and leaves it empty.
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

    /// Moves the deltas that are read at once into `out`: the next one, or the merged one of each
    /// choice.
    pub(super) fn take(&mut self, out: &mut Vec<(u32, Delta)>) {
        let from = out.len();
        out.extend(self.queue.pop_front());
        for choice in self.dirty.drain(..) {
            let delta = self.deltas[choice as usize].take();
            out.extend(delta.map(|delta| (choice, delta)));
        }
        self.unread -= out[from..].iter().map(|(_, delta)| delta.weight()).sum::<usize>();
    }

    /// Drops everything.
    pub(super) fn forget(&mut self) {
        self.deltas.fill(None);
        self.dirty.clear();
        self.queue = VecDeque::new();
        self.unread = 0;
    }
}
