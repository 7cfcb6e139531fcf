//! Limits on the memory that request bodies and unfinished parts of answers take.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A memory budget, and the number of bytes taken from it.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    taken: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, taken: AtomicUsize::new(0) })
    }

    /// The number of bytes that may be taken.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// The number of bytes that are taken.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}

/// The share of a budget that one request has taken. Dropping it gives the whole share back.
#[derive(Debug)]
pub(crate) struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Held {
    /// Creates an empty share.
    pub(crate) fn new(budget: &Arc<Budget>) -> Self {
        Self { budget: Arc::clone(budget), bytes: 0 }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Takes more bytes. Returns false if the budget does not have enough.
    #[must_use]
    pub(crate) fn take(&mut self, more: usize) -> bool {
        let Budget { limit, taken } = &*self.budget;
        let fits = |taken: usize| taken.checked_add(more).filter(|sum| sum <= limit);
        let taken = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        self.bytes += if taken { more } else { 0 };
        taken
    }

    pub(crate) fn give(&mut self, bytes: usize) {
        self.bytes -= bytes;
        self.budget.taken.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Changes the size of the share to `bytes`. Returns false if the budget does not have enough.
    #[must_use]
    pub(crate) fn hold(&mut self, bytes: usize) -> bool {
        if bytes > self.bytes {
            return self.take(bytes - self.bytes);
        }
        self.give(self.bytes - bytes);
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_grows_and_shrinks_within_its_budget() {
        let budget = Budget::new(10);
        let (mut one, mut two) = (Held::new(&budget), Held::new(&budget));
        assert!(one.hold(7) && two.hold(3) && !two.hold(4));
        assert_eq!((one.bytes(), two.bytes(), budget.taken()), (7, 3, 10));
        assert!(one.hold(2) && two.hold(8));
        drop(one);
        assert_eq!(budget.taken(), 8);
    }
}
