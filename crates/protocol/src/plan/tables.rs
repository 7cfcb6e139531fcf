//! Writes of a plan into the tables of slots, and copies of pages.

use super::{PAGE_WRITE_WORDS, StepPlan};
use crate::copy::{COPY_WORDS, MAX_WAIT_US, PageCopy, SPAN_WORDS, Span};

const NO_PAGE: i32 = -1;

/// A table's writes: slot, index, page.
fn writes(column: &[i32]) -> impl ExactSizeIterator<Item = (u32, u32, i32)> + '_ {
    let (writes, _) = column.as_chunks::<PAGE_WRITE_WORDS>();
    writes.iter().map(|&[slot, index, page]| (slot.cast_unsigned(), index.cast_unsigned(), page))
}

impl StepPlan {
    /// Sets `page_table[slot, index] = page`.
    pub fn write_page(&mut self, slot: u32, index: u32, page: u32) {
        self.page_writes.extend_from_slice(&[slot, index, page].map(u32::cast_signed));
    }

    /// Removes the page at `page_table[slot, index]`. Its positions are then read from the host's
    /// tier.
    pub fn drop_page(&mut self, slot: u32, index: u32) {
        self.page_writes.extend_from_slice(&[slot.cast_signed(), index.cast_signed(), NO_PAGE]);
    }

    /// The page-table writes: slot, index, page; `None`: the page is removed.
    pub fn page_writes(&self) -> impl ExactSizeIterator<Item = (u32, u32, Option<u32>)> + '_ {
        writes(&self.page_writes).map(|(slot, index, page)| (slot, index, u32::try_from(page).ok()))
    }

    /// Sets `host_table[slot, index] = page`. That page is the place of these positions' index
    /// keys, and of their rows after a save.
    pub fn write_host(&mut self, slot: u32, index: u32, page: u32) {
        self.host_writes.extend_from_slice(&[slot, index, page].map(u32::cast_signed));
    }

    /// The writes of host tables: slot, index, page.
    pub fn host_writes(&self) -> impl ExactSizeIterator<Item = (u32, u32, u32)> + '_ {
        writes(&self.host_writes).map(|(slot, index, page)| (slot, index, page.cast_unsigned()))
    }

    /// Sets `hot_rows[slot, index] = page`. A slot that has any is sparse until it is written anew.
    pub fn write_hot_rows(&mut self, slot: u32, index: u32, page: u32) {
        self.hot_rows.extend_from_slice(&[slot, index, page].map(u32::cast_signed));
    }

    /// The writes of tables of hot rows: slot, index, page.
    pub fn hot_rows(&self) -> impl ExactSizeIterator<Item = (u32, u32, u32)> + '_ {
        writes(&self.hot_rows).map(|(slot, index, page)| (slot, index, page.cast_unsigned()))
    }

    /// True if the plan writes into a table of pages.
    #[must_use]
    pub fn writes_tables(&self) -> bool {
        [&self.page_writes, &self.host_writes, &self.hot_rows]
            .iter()
            .any(|writes| !writes.is_empty())
    }

    /// Removes the writes into a slot's tables of pages. Its request has no row in the plan.
    pub fn forget_slot(&mut self, slot: u32) {
        for column in [&mut self.page_writes, &mut self.host_writes, &mut self.hot_rows] {
            let (writes, _) = column.as_chunks::<PAGE_WRITE_WORDS>();
            if writes.iter().any(|write| write[0] == slot.cast_signed()) {
                let others = writes.iter().filter(|write| write[0] != slot.cast_signed());
                *column = others.copied().collect::<Vec<_>>().into_flattened();
            }
        }
    }

    /// Adds a copy of a page.
    pub fn push_copy(&mut self, copy: PageCopy) {
        let before = self.copies.len() / COPY_WORDS;
        self.copies.extend_from_slice(&copy.words());
        if copy.span.is_some() || !self.copy_spans.is_empty() {
            // Those before it are of whole pages.
            self.copy_spans.resize(SPAN_WORDS * before, 0);
            let Span { first, count } = copy.span.unwrap_or(Span { first: 0, count: 0 });
            self.copy_spans.extend_from_slice(&[first, count].map(u32::cast_signed));
        }
    }

    /// The copies, in order.
    pub fn copies(&self) -> impl ExactSizeIterator<Item = PageCopy> + '_ {
        let (records, _) = self.copies.as_chunks::<COPY_WORDS>();
        let (spans, _) = self.copy_spans.as_chunks::<SPAN_WORDS>();
        records.iter().enumerate().map(|(at, record)| {
            let span = spans.get(at).and_then(Span::of);
            PageCopy::of(record, span).expect("it was made or read by these rules")
        })
    }

    /// Has a plan without rows wait for the end of a copy, for another plan, or for so many
    /// microseconds ([`MAX_WAIT_US`] at most).
    pub fn wait(&mut self, us: u32) {
        debug_assert!(self.rows.is_empty() && us <= MAX_WAIT_US);
        self.wait_us.clear();
        self.wait_us.push(us.cast_signed());
    }

    /// The longest wait of the plan's result for copies, in microseconds; 0: it does not wait.
    #[must_use]
    pub fn wait_us(&self) -> u32 {
        self.wait_us.first().map_or(0, |us| us.cast_unsigned())
    }
}
