//! The pages of sliding-window layers, which read only the last positions of a request.

use crate::hash::BlockHash;
use crate::pool::{Counts, Lease, PagePool};

/// The tier of the window part of pages, on the device.
#[derive(Debug, PartialEq, Eq)]
pub enum WindowTier {}

/// The pages of the window part, and the blocks in them.
///
/// A request *passes* a page when its window has moved beyond the page, and then gives it back. A
/// request can continue a cached prefix only if the window part has the blocks within the window.
/// So the pages at the end of a request are worth more than passed ones, and are kept longer.
#[derive(Debug)]
pub struct WindowPool {
    /// In this pool *saved* means that a block was passed: it is evicted first.
    pool: PagePool<WindowTier>,
    /// The number of earlier blocks that a row reads if its first position begins a page.
    tail: usize,
}

impl WindowPool {
    /// Creates a pool of `pages` free pages of `page_size` positions, for layers whose queries
    /// attend to `window` positions, including their own.
    #[must_use]
    pub fn new(pages: u32, page_size: u32, window: u32) -> Self {
        let tail = window.saturating_sub(1).div_ceil(page_size.max(1)) as usize;
        Self { pool: PagePool::new(pages), tail }
    }

    /// The number of a prefix's last blocks that are needed to continue it. A shorter prefix needs
    /// all its blocks.
    #[must_use]
    pub fn tail(&self) -> usize {
        self.tail
    }

    /// The largest number of these leading blocks after which a request can continue.
    #[must_use]
    pub fn longest(&self, names: &[BlockHash]) -> usize {
        let mut end = names.len();
        for (at, &name) in names.iter().enumerate().rev() {
            if end - at > self.tail {
                break;
            }
            if !self.pool.contains(name) {
                end = at;
            }
        }
        end
    }

    /// Leases the last blocks of the prefix that a request continues, in order.
    ///
    /// # Panics
    /// If the pool lacks one of these blocks: see [`Self::longest`].
    pub fn share_tail(&mut self, names: &[BlockHash]) -> Vec<Lease<WindowTier>> {
        let tail = &names[names.len().saturating_sub(self.tail)..];
        let share = |&name| self.pool.share(name).expect("the prefix was found here");
        tail.iter().map(share).collect()
    }

    /// Leases a page without content; `None`: every page is leased.
    #[must_use]
    pub fn allocate(&mut self) -> Option<Lease<WindowTier>> {
        self.pool.allocate().map(|(lease, _)| lease)
    }

    /// Names the block that a full page holds, as [`PagePool::name`] does.
    pub fn name(&mut self, lease: &Lease<WindowTier>, name: BlockHash) -> bool {
        self.pool.name(lease, name)
    }

    /// Gives back the lease of a page that a request has passed. Once no lease is left, the page is
    /// evicted before pages at which a request ended.
    pub fn release_passed(&mut self, lease: Lease<WindowTier>) {
        self.release(lease, true);
    }

    /// Gives back the lease of a page at which a request ended, or was preempted.
    pub fn release_kept(&mut self, lease: Lease<WindowTier>) {
        self.release(lease, false);
    }

    fn release(&mut self, lease: Lease<WindowTier>, passed: bool) {
        if let Some(name) = self.pool.name_of(&lease) {
            self.pool.set_saved(name, passed);
        }
        self.pool.release(lease);
    }

    /// Makes the pool forget the page of a block, as [`PagePool::forget`] does.
    pub fn forget(&mut self, name: BlockHash) -> bool {
        self.pool.forget(name)
    }

    /// Forgets every block without a lease. Returns true if no block is left.
    pub fn flush(&mut self) -> bool {
        self.pool.flush();
        self.pool.blocks() == 0
    }

    /// The number of pages that [`Self::allocate`] can lease.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.pool.available()
    }

    /// The number of available pages without content, or with a block that was passed.
    #[must_use]
    pub fn spare(&self) -> u32 {
        self.pool.spare()
    }

    /// The number of all pages.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.pool.size()
    }

    /// The number of pages in each state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.pool.counts()
    }

    /// The number of current leases of a page.
    #[must_use]
    pub fn leases(&self, page: u32) -> u32 {
        self.pool.leases(page)
    }

    /// Checks the pool, as [`PagePool::check_integrity`] does.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.pool.check_integrity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Namer;

    fn names(count: usize) -> Vec<BlockHash> {
        Namer::open().chain(0, &vec![1; 4 * count], 4)
    }

    /// Creates a pool that caches these blocks, after the window of a request has moved past them.
    fn passed(pages: u32, window: u32, names: &[BlockHash]) -> WindowPool {
        let mut pool = WindowPool::new(pages, 4, window);
        for &name in names {
            let lease = pool.allocate().expect("a page");
            assert!(pool.name(&lease, name));
            pool.release_passed(lease);
        }
        pool
    }

    #[test]
    fn a_prefix_needs_the_blocks_within_the_window() {
        let names = names(6);
        // A window of one position reads no earlier position.
        for (window, tail) in [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)] {
            assert_eq!(WindowPool::new(1, 4, window).tail(), tail, "{window}");
        }
        let mut pool = passed(8, 9, &names);
        assert_eq!(pool.longest(&names), 6);
        // The search tries the longest match first, and then shorter ones.
        assert!(pool.forget(names[4]));
        assert_eq!((pool.longest(&names), pool.longest(&names[..4])), (4, 4));
        assert!(pool.forget(names[2]));
        assert_eq!(pool.longest(&names), 2, "the first two blocks are a whole prefix");
        assert!(pool.forget(names[0]));
        assert_eq!(pool.longest(&names), 0);
        assert_eq!(pool.longest(&[]), 0);
        let alone = passed(8, 9, &names[..1]);
        assert_eq!(alone.longest(&names[..1]), 1, "a prefix that is shorter than the window");
        assert_eq!(WindowPool::new(1, 4, 1).longest(&names), 6, "nothing is read");
    }

    #[test]
    fn the_end_of_a_prefix_is_leased() {
        let names = names(3);
        let mut pool = passed(3, 9, &names);
        let tail = pool.share_tail(&names);
        assert_eq!(pool.counts(), Counts { free: 0, cached: 1, held: 2 });
        assert_eq!(pool.longest(&names), 3);
        assert!(pool.allocate().map(|lease| pool.release_kept(lease)).is_some());
        assert_eq!(pool.longest(&names), 3, "the first block was evicted, and is not read");
        assert_eq!(pool.longest(&names[..1]), 0);
        tail.into_iter().for_each(|lease| pool.release_kept(lease));
        assert!(pool.flush());
        pool.check_integrity().expect("whole");
    }

    #[test]
    fn pages_that_were_passed_go_before_those_at_which_a_request_ended() {
        let names = names(3);
        let mut pool = WindowPool::new(3, 4, 5);
        let mut leases: Vec<_> = (0..3).map(|_| pool.allocate().expect("a page")).collect();
        for (lease, &name) in leases.iter().zip(&names) {
            pool.name(lease, name);
        }
        let last = leases.pop().expect("three");
        // The block at the request's end is released first, so it is the least recently used one.
        pool.release_kept(last);
        leases.into_iter().for_each(|lease| pool.release_passed(lease));
        assert_eq!((pool.spare(), pool.available()), (2, 3));
        let taken: Vec<_> = (0..2).map(|_| pool.allocate().expect("a page")).collect();
        assert_eq!(pool.longest(&names), 3, "the last block is still cached");
        assert_eq!(pool.longest(&names[..2]), 0);
        taken.into_iter().for_each(|lease| pool.release_kept(lease));
    }
}
