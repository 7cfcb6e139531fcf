//! A team of threads that compute a step together, and the work that its members share.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pool::{Meeting, Threads};

/// Up to this number of rows, every member prepares all rows for itself, which is faster than a
/// barrier.
pub(crate) const FEW: usize = 16;

/// One thread of a running team.
pub(crate) struct Member<'a> {
    /// The member's index, below `members`.
    pub(crate) index: usize,
    pub(crate) members: usize,
    meeting: &'a Meeting,
}

impl Member<'_> {
    /// This member's share of `0 .. count`.
    #[inline]
    pub(crate) fn share(&self, count: usize) -> Range<usize> {
        self.index * count / self.members..(self.index + 1) * count / self.members
    }

    /// Waits until every member has called this function.
    #[inline]
    pub(crate) fn meet(&self) {
        if self.members > 1 {
            self.meeting.wait();
        }
    }
}

/// A work queue from which members take units. A delayed member takes fewer units.
#[derive(Default)]
pub(crate) struct Queue(AtomicUsize);

impl Queue {
    /// Takes the next of `total` units; the range is empty if all are taken. At first a call takes
    /// many units, because each call transfers the counter's cache line between processors. Near
    /// the end it takes a single unit, so that all members finish together.
    #[inline]
    pub(crate) fn take(&self, total: usize, members: usize) -> Range<usize> {
        let mut from = self.0.load(Ordering::Relaxed);
        loop {
            let until = from + total.saturating_sub(from).div_ceil(2 * members);
            match self.0.compare_exchange_weak(from, until, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return from..until,
                Err(now) => from = now,
            }
        }
    }

    pub(crate) fn reset(&mut self) {
        *self.0.get_mut() = 0;
    }
}

impl Threads {
    /// Runs `work` on every member and returns when all members are done.
    pub(crate) fn compute(&self, work: impl Fn(Member<'_>) + Sync) {
        let (members, meeting) = (self.count(), self.meeting());
        self.run(|index| work(Member { index, members, meeting }));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A team of this many threads.
    pub(crate) fn team(threads: usize) -> Threads {
        Threads::new(threads).expect("threads")
    }

    proptest! {
        #[test]
        fn every_piece_is_taken_once(total in 0usize..500, members in 1usize..6, threads in 1usize..4) {
            let queue = Queue::default();
            let taken: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
            team(threads).compute(|_| loop {
                let mine = queue.take(total, members);
                if mine.is_empty() {
                    break;
                }
                for piece in mine {
                    taken[piece].fetch_add(1, Ordering::Relaxed);
                }
            });
            prop_assert!(taken.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}
