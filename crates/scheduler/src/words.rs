//! The size of plans. The hand refuses a frame of more than [`MAX_WORDS`]. A plan stays below that
//! with all data of its requests: prompts, biases, stop ids, pages.
//!
//! A plan that has admitted a request admits the next one only up to [`STEP_WORDS`]. A request
//! alone has at most [`MAX_REQUEST_WORDS`], or is refused before it is queued. Running requests
//! need a row and a page at most. So every plan fits.

use forebay_protocol::{
    COPY_WORDS, MAX_WORDS, NewSlot, PAGE_WRITE_WORDS, ROW_WORDS, SlotSpec, Span, StepPlan,
};

use crate::images::image_words;
use crate::{Handle, Scheduler};

/// The size in words up to which a plan may admit a further request: 16 MiB, which the hand reads
/// in some milliseconds.
pub const STEP_WORDS: usize = 1 << 22;
/// Words for the rows and pages of those who run already.
const RUNNING_WORDS: u64 = 1 << 20;
/// The largest number of words that one request may need in a plan. [`request_words`] counts them.
pub const MAX_REQUEST_WORDS: u64 = MAX_WORDS as u64 - RUNNING_WORDS;

/// The words of a plan that writes a whole request: `positions` tokens on pages of `page_size`, and
/// its parameters. Pages are written into one table, or into two if the host's pages have one too.
#[must_use]
pub fn request_words(positions: u64, spec: &SlotSpec, page_size: u32, tables: u32) -> u64 {
    let slot = NewSlot { slot: 0, tokens: &[], prompt_len: 0, spec };
    let pages = (positions + 1).div_ceil(u64::from(page_size.max(1)));
    let pages = u64::from(tables) * pages;
    (slot.words() + ROW_WORDS) as u64 + positions + PAGE_WRITE_WORDS as u64 * pages
}

/// Checks that `slots` running requests fit into a plan that also admits the largest request.
///
/// # Panics
/// They don't fit.
pub(crate) fn check_slots(slots: u32) {
    let each = (ROW_WORDS + PAGE_WRITE_WORDS) as u64;
    let words = StepPlan::default().words() as u64 + each * u64::from(slots);
    assert!(words <= RUNNING_WORDS, "a plan has no room for {slots} slots");
}

impl Scheduler {
    /// True if the plan and its result have room for this request too. The plan has admitted
    /// another one.
    pub(crate) fn has_words_for(&self, handle: Handle, plan: &StepPlan) -> bool {
        let entry = &self.requests[handle];
        let pages = if self.keeps_nothing() {
            0
        } else {
            (entry.total as usize + 1).div_ceil(self.config.page_size as usize)
        };
        // What it still shares becomes its own, and part of the slot.
        let shared = entry.known() as usize - entry.tokens.len();
        // The host's pages are another table.
        let (tables, rows) =
            self.config.sparse.map_or((1, 0), |sparse| (2, sparse.row_pages as usize));
        let pages = PAGE_WRITE_WORDS * (tables * pages + rows);
        let words = entry.slot(0).words()
            + shared
            + ROW_WORDS
            + pages
            + image_words(&entry.request.images) as usize;
        let mut copies =
            self.config.host.map_or(0, |host| COPY_WORDS * host.copies_a_step as usize);
        if self.config.sparse.is_some_and(|sparse| sparse.save_rows) {
            // Each page that its first row touches is a copy of its own, and all copies have spans.
            let longest = self.config.token_budget.max(self.config.page_size);
            let touched = (longest / self.config.page_size + 2) as usize;
            copies = (copies / COPY_WORDS + touched) * (COPY_WORDS + Span::WORDS);
        }
        let vectors = self.building.pooled + usize::from(entry.pools());
        plan.words() + words + copies <= self.config.step_words
            && vectors * self.config.vector_size as usize <= STEP_WORDS
    }
}
