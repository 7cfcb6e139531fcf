//! Writes into the page tables of slots, and copies of pages.

use super::StepPlan;
use crate::columns::record;
use crate::copy::{MAX_WAIT_US, PageCopy, Span};

/// The number of words of a write into a page table.
pub const PAGE_WRITE_WORDS: usize = PageWrite::WORDS;
/// The page table entry for positions that have no page on the device.
pub const NO_PAGE: i32 = -1;

record! {
    /// A write into a page table of a slot.
    pub(crate) struct PageWrite {
        slot: u32,
        index: u32,
        page: i32,
    }
}

impl PageWrite {
    fn new(slot: u32, index: u32, page: u32) -> Self {
        Self { slot, index, page: page.cast_signed() }
    }

    /// True if no number is negative.
    pub(super) fn is_whole(self) -> bool {
        [self.slot, self.index].iter().all(|number| number.cast_signed() >= 0) && self.page >= 0
    }

    fn parts(self) -> (u32, u32, u32) {
        (self.slot, self.index, self.page.cast_unsigned())
    }
}

impl StepPlan {
    /// Sets `page_table[slot, index] = page`.
    pub fn write_page(&mut self, slot: u32, index: u32, page: u32) {
        self.page_writes.push(PageWrite::new(slot, index, page));
    }

    /// Removes the page from `page_table[slot, index]`. Its positions are then read from the host
    /// tier.
    pub fn drop_page(&mut self, slot: u32, index: u32) {
        self.page_writes.push(PageWrite { slot, index, page: NO_PAGE });
    }

    /// Iterates over the page-table writes: slot, index, page; `None` removes the page.
    pub fn page_writes(&self) -> impl ExactSizeIterator<Item = (u32, u32, Option<u32>)> + '_ {
        let writes = self.page_writes.iter();
        writes.map(|write| (write.slot, write.index, u32::try_from(write.page).ok()))
    }

    /// Sets `host_table[slot, index] = page`. The page has the index keys of these positions, and
    /// also their keys and values after a save.
    pub fn write_host(&mut self, slot: u32, index: u32, page: u32) {
        self.host_writes.push(PageWrite::new(slot, index, page));
    }

    /// Iterates over the writes to host tables: slot, index, page.
    pub fn host_writes(&self) -> impl ExactSizeIterator<Item = (u32, u32, u32)> + '_ {
        self.host_writes.iter().map(|write| write.parts())
    }

    /// Sets `hot_rows[slot, index] = page`. A slot with such pages is sparse until it is written
    /// again.
    pub fn write_hot_rows(&mut self, slot: u32, index: u32, page: u32) {
        self.hot_rows.push(PageWrite::new(slot, index, page));
    }

    /// Iterates over the writes to the tables of hot rows: slot, index, page.
    pub fn hot_rows(&self) -> impl ExactSizeIterator<Item = (u32, u32, u32)> + '_ {
        self.hot_rows.iter().map(|write| write.parts())
    }

    /// Sets `window_table[slot, index] = page`, the page that layers with a sliding window use for
    /// these positions.
    pub fn write_window(&mut self, slot: u32, index: u32, page: u32) {
        self.window_writes.push(PageWrite::new(slot, index, page));
    }

    /// Removes the page from `window_table[slot, index]`, because the window has passed its
    /// positions.
    pub fn drop_window(&mut self, slot: u32, index: u32) {
        self.window_writes.push(PageWrite { slot, index, page: NO_PAGE });
    }

    /// Iterates over the writes to window tables: slot, index, page; `None` removes the page.
    pub fn window_writes(&self) -> impl ExactSizeIterator<Item = (u32, u32, Option<u32>)> + '_ {
        let writes = self.window_writes.iter();
        writes.map(|write| (write.slot, write.index, u32::try_from(write.page).ok()))
    }

    /// True if the plan writes into a page table.
    #[must_use]
    pub fn writes_tables(&self) -> bool {
        [&self.page_writes, &self.host_writes, &self.hot_rows, &self.window_writes]
            .iter()
            .any(|writes| !writes.is_empty())
    }

    /// Removes the writes to a slot's page tables, and the load of its states. The plan must not
    /// have a row of the slot.
    pub fn forget_slot(&mut self, slot: u32) {
        let tables = [
            &mut self.page_writes,
            &mut self.host_writes,
            &mut self.hot_rows,
            &mut self.window_writes,
        ];
        for column in tables {
            column.retain(|write| write.slot != slot);
        }
        self.state_loads.retain(|load| load.slot != slot);
    }

    /// Adds a copy of a page.
    pub fn push_copy(&mut self, copy: PageCopy) {
        if copy.span.is_some() || !self.copy_spans.is_empty() {
            // The copies before this one are of whole pages.
            self.copy_spans.resize(self.copies.len(), Span::WHOLE);
            self.copy_spans.push(copy.span.unwrap_or(Span::WHOLE));
        }
        if copy.lender.is_some() || !self.copy_sources.is_empty() {
            // The copies before this one are from the hand's own tier.
            self.copy_sources.resize(self.copies.len(), 0);
            self.copy_sources.push(copy.source());
        }
        self.copies.push(copy.record());
    }

    /// Iterates over the copies, in order.
    pub fn copies(&self) -> impl ExactSizeIterator<Item = PageCopy> + '_ {
        self.copies.iter().enumerate().map(|(at, record)| {
            let span = self.copy_spans.get(at).filter(|span| span.count > 0);
            let source = self.copy_sources.get(at).copied().unwrap_or(0);
            PageCopy::new(*record, span.copied(), source)
                .expect("it was made or read by these rules")
        })
    }

    /// Makes a plan without rows wait until a copy ends, another plan arrives, or `us` microseconds
    /// have passed (at most [`MAX_WAIT_US`]).
    pub fn wait(&mut self, us: u32) {
        debug_assert!(self.rows.is_empty() && us <= MAX_WAIT_US);
        self.wait_us = Some(us);
    }

    /// Makes the plan not wait.
    pub fn wait_for_nothing(&mut self) {
        self.wait_us = None;
    }

    /// Returns the longest time that the plan's result waits for copies, in microseconds; 0 if it
    /// does not wait.
    #[must_use]
    pub fn wait_us(&self) -> u32 {
        self.wait_us.unwrap_or(0)
    }
}
