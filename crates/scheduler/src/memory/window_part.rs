//! The pool of the window part, and the pages of one request in it.

use std::collections::VecDeque;

use forebay_kvcache::{BlockHash, Lease, WindowPool, WindowTier};
use forebay_protocol::{StepPlan, least_window_pages};

use super::pages::Pages;
use crate::config::WindowPart;
use crate::event::WindowStats;
use crate::retirement::check_leases;

/// Consecutive pages of a request in the window part: those that it has, or, with `passed`, those
/// that it has passed and gives up.
#[derive(Debug, Default)]
pub(crate) struct WindowRun {
    /// The index of the first page.
    pub(super) first: u32,
    pub(super) leases: VecDeque<Lease<WindowTier>>,
    pub(super) passed: bool,
}

impl WindowRun {
    /// The index after the last page.
    pub(super) fn end(&self) -> u32 {
        self.first + self.leases.len() as u32
    }

    /// The page with this index.
    fn get(&self, index: u32) -> Option<&Lease<WindowTier>> {
        self.leases.get(index.checked_sub(self.first)? as usize)
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = &Lease<WindowTier>> {
        self.leases.iter()
    }

    /// Writes the pages into the slot's table of window pages.
    pub(super) fn write_table(&self, slot: u32, plan: &mut StepPlan) {
        for (index, lease) in (self.first..).zip(&self.leases) {
            plan.write_window(slot, index, lease.page());
        }
    }
}

/// The window part of the pages of one replica.
#[derive(Debug)]
pub(super) struct WindowPages {
    pub(super) pool: WindowPool,
    page_size: u32,
    window: u32,
    pub(super) counters: WindowStats,
}

impl WindowPages {
    /// # Panics
    /// Panics if the pages do not suffice for a request that runs alone.
    pub(super) fn new(part: WindowPart, pages: u32, page_size: u32) -> Self {
        let WindowPart { pages: own, window } = part;
        let least = least_window_pages(window, page_size).min(pages);
        assert!(own >= least && window > 0, "{part:?}, but {least} are needed");
        let pool = WindowPool::new(own, page_size, window);
        Self { pool, page_size, window, counters: WindowStats::default() }
    }

    /// Changes the number of pages. No page may be leased.
    pub(super) fn resize(&mut self, pages: u32) {
        self.pool = WindowPool::new(pages, self.page_size, self.window);
    }

    /// Forgets all blocks. No page may be leased.
    pub(super) fn forget_all(&mut self) {
        self.resize(self.pool.size());
    }

    /// The largest number of these cached leading blocks after which a request can continue.
    pub(super) fn longest(&self, names: &[BlockHash]) -> usize {
        self.pool.longest(names)
    }

    pub(super) fn forget(&mut self, name: BlockHash) {
        self.pool.forget(name);
    }

    /// Forgets every block without a lease. Returns true if no block is left.
    pub(super) fn flush(&mut self) -> bool {
        self.pool.flush()
    }

    /// Free pages without cached content, which drafts may take.
    pub(super) fn spare(&self) -> u32 {
        self.pool.spare()
    }

    /// Leases the window part of a request that continues after the cached blocks `found`. Of its
    /// `count` pages it gets only as many new ones as it can hold at a time. If there are too few,
    /// returns `None` and leases nothing.
    pub(super) fn lease(&mut self, found: &[BlockHash], count: usize) -> Option<WindowRun> {
        let mut leases: VecDeque<_> = self.pool.share_tail(found).into();
        let first = (found.len() - leases.len()) as u32;
        // The pages of the window, and the one that is being written.
        let held = self.pool.tail() + 1;
        let new = (held - leases.len()).min(count - found.len());
        if (self.pool.available() as usize) < new {
            leases.drain(..).rev().for_each(|lease| self.pool.release_kept(lease));
            return None;
        }
        leases.extend((0..new).map_while(|_| self.pool.allocate()));
        Some(WindowRun { first, leases, passed: false })
    }

    /// Names the block of a page, if the request still has the page.
    pub(super) fn name(&mut self, run: &WindowRun, index: u32, name: BlockHash) {
        if let Some(lease) = run.get(index) {
            self.pool.name(lease, name);
        }
    }

    /// Frees pages. Cached blocks of later positions are evicted before those of earlier ones.
    pub(super) fn free(&mut self, run: WindowRun) {
        let WindowRun { leases, passed, .. } = run;
        if passed {
            leases.into_iter().for_each(|lease| self.pool.release_passed(lease));
        } else {
            leases.into_iter().rev().for_each(|lease| self.pool.release_kept(lease));
        }
    }

    pub(super) fn count_use(&mut self, missed: u32) {
        self.counters.missed_tokens += u64::from(missed);
    }

    pub(super) fn stats(&self) -> WindowStats {
        let pages = self.pool.counts();
        WindowStats {
            pages: self.pool.size() as usize,
            pages_held: pages.held as usize,
            pages_cached: pages.cached as usize,
            ..self.counters
        }
    }

    /// Checks that the leased pages are exactly those in `pages`.
    pub(super) fn check<'a>(&self, pages: impl Iterator<Item = &'a Pages>) -> Result<(), String> {
        self.pool.check_integrity()?;
        let leases = pages.filter_map(|pages| pages.window.as_ref()).flat_map(WindowRun::leases);
        let leases = leases.map(Lease::page);
        check_leases("window page", leases, self.pool.size(), |page| self.pool.leases(page))
    }

    /// The number of leading pages that no row will read, if the request computes no position
    /// before `next`.
    pub(super) fn passed(&self, next: u32) -> u32 {
        (next + 1).saturating_sub(self.window) / self.page_size
    }

    /// Adds a page to those of a resident. Returns false if every page is leased.
    pub(super) fn add(&mut self, slot: u32, run: &mut WindowRun, plan: &mut StepPlan) -> bool {
        let Some(lease) = self.pool.allocate() else { return false };
        plan.write_window(slot, run.end(), lease.page());
        run.leases.push_back(lease);
        true
    }
}
