//! Room for pages that prefill servers send.
//!
//! Pages are reserved before their bytes arrive. So a response with more pages than reserved is
//! rejected. The pages are freed after the last copy that reads them, or if the response was
//! unusable.

use std::sync::Arc;

use forebay_engine::{BlockHash, Loan};
use parking_lot::Mutex;

use super::tier::{PageKind, TierPages};

/// The pages for received blocks, and which of them are free.
#[derive(Debug)]
pub(crate) struct ReceivedRoom {
    pages: TierPages,
    /// The number by which hands identify the lender of these pages.
    lender: u32,
    /// The free pages for blocks, and those for states.
    free: Mutex<[Vec<u32>; 2]>,
}

impl ReceivedRoom {
    /// Creates the room: `counts` has the number of pages for blocks and for states.
    pub(crate) fn new(pages: TierPages, counts: [u32; 2], lender: u32) -> Arc<Self> {
        let free = Mutex::new(counts.map(|count| (0..count).rev().collect()));
        Arc::new(Self { pages, lender, free })
    }

    /// Reserves pages: `counts` has the number for blocks and the number for states. Returns `None`
    /// if too few pages are free.
    pub(crate) fn reserve(self: &Arc<Self>, counts: [usize; 2]) -> Option<Reservation> {
        let mut free = self.free.lock();
        if free.iter().zip(counts).any(|(free, count)| free.len() < count) {
            return None;
        }
        let mut take = |kind: usize| {
            let rest = free[kind].len() - counts[kind];
            free[kind].split_off(rest)
        };
        let taken = [take(0), take(1)];
        Some(Reservation { room: Arc::clone(self), taken })
    }

    /// Returns the number of free pages for blocks and for states.
    #[cfg(test)]
    pub(crate) fn free(&self) -> [usize; 2] {
        self.free.lock().each_ref().map(Vec::len)
    }
}

/// Reserved pages. Dropping the reservation frees them.
#[derive(Debug)]
pub(crate) struct Reservation {
    room: Arc<ReceivedRoom>,
    taken: [Vec<u32>; 2],
}

impl Reservation {
    /// Returns the memory that contains the pages.
    pub(crate) fn pages(&self) -> &TierPages {
        &self.room.pages
    }

    /// Returns the `nth` reserved page of a kind.
    pub(crate) fn page(&self, kind: PageKind, nth: usize) -> Option<(PageKind, u32)> {
        self.taken[kind as usize].get(nth).map(|&page| (kind, page))
    }

    /// Lends the received `blocks` and `states`, which are in the first reserved pages of their
    /// kind. Frees the other pages at once.
    pub(crate) fn lend(mut self, blocks: &[BlockHash], states: &[BlockHash]) -> Loan {
        let rest = Self {
            room: Arc::clone(&self.room),
            taken: [self.taken[0].split_off(blocks.len()), self.taken[1].split_off(states.len())],
        };
        drop(rest);
        let on = |names: &[BlockHash], pages: &[u32]| -> Vec<(BlockHash, u32)> {
            names.iter().copied().zip(pages.iter().copied()).collect()
        };
        let (pages, states) = (on(blocks, &self.taken[0]), on(states, &self.taken[1]));
        let lender = self.room.lender;
        Loan::new(lender, pages, Box::new(move || drop(self))).with_states(states)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut free = self.room.free.lock();
        for (free, taken) in free.iter_mut().zip(&mut self.taken) {
            free.append(taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tier::PageSizes;
    use super::super::tier::tests::Heap;
    use super::*;

    #[test]
    fn pages_come_back_when_nobody_reads_them() {
        let sizes = PageSizes { page: 4, state: 8 };
        let pages = TierPages::create(Arc::new(Heap::default()), sizes, [4, 1]).expect("memory");
        let room = ReceivedRoom::new(pages, [4, 1], 3);
        assert!(room.reserve([5, 0]).is_none() && room.reserve([1, 2]).is_none());
        let reserved = room.reserve([3, 1]).expect("room");
        assert_eq!(room.free(), [1, 0]);
        assert_eq!(reserved.page(PageKind::State, 0), Some((PageKind::State, 0)));
        assert_eq!(reserved.page(PageKind::Block, 3), None);
        let names = [1_u128, 2].map(BlockHash::from);
        let loan = Arc::new(reserved.lend(&names, &names[1..]));
        assert_eq!((loan.lender(), loan.blocks(), room.free()), (3, 2, [2, 0]));
        assert!(loan.state(names[1]).is_some() && loan.state(names[0]).is_none());
        let copy = Arc::clone(&loan);
        drop(loan);
        assert_eq!(room.free(), [2, 0], "a copy reads the pages");
        drop(copy);
        assert_eq!(room.free(), [4, 1]);
        drop(room.reserve([4, 1]).expect("room"));
        assert_eq!(room.free(), [4, 1]);
    }
}
