//! The size of plans. The hand refuses a frame of more than [`MAX_WORDS`]. A plan stays below that
//! with all data of its requests: prompts, biases, stop ids, pages.
//!
//! A plan that already admits a request admits the next one only up to [`STEP_WORDS`]. A request
//! that alone needs more than [`MAX_REQUEST_WORDS`] is refused before it is queued. A running
//! request needs at most a row and a page. So every plan fits.

use forebay_protocol::{
    MAX_WORDS, NewSlot, PAGE_WRITE_WORDS, ROW_WORDS, STATE_COPY_WORDS, SlotSpec, StepPlan,
};

use crate::config::SchedulerConfig;
use crate::entry::Entry;
use crate::images::prompt::image_words;
use crate::memory::Memory;
use crate::steps::NewStep;

/// The size in words up to which a plan may admit one more request: 16 MiB, which the hand reads in
/// a few milliseconds.
pub const STEP_WORDS: usize = 1 << 22;
/// Words for the rows and pages of running requests.
const RUNNING_WORDS: u64 = 1 << 20;
/// The largest number of words that one request may need in a plan, as [`request_words`] counts
/// them.
pub const MAX_REQUEST_WORDS: u64 = MAX_WORDS as u64 - RUNNING_WORDS;

/// The number of words of a plan that writes a whole request: `positions` tokens on pages of
/// `page_size`, and its parameters. Pages are written into `tables` page tables: one, or two with
/// host pages.
#[must_use]
pub fn request_words(positions: u64, spec: &SlotSpec, page_size: u32, tables: u32) -> u64 {
    let slot = NewSlot { slot: 0, tokens: &[], prompt_len: 0, spec, place: None };
    let pages = (positions + 1).div_ceil(u64::from(page_size.max(1)));
    let pages = u64::from(tables) * pages;
    (slot.words() + ROW_WORDS) as u64 + positions + PAGE_WRITE_WORDS as u64 * pages
}

/// Checks that `slots` running requests fit into a plan that also admits the largest request.
///
/// # Panics
/// If the words of the slots do not fit into a plan.
pub(crate) fn check_slots(config: &SchedulerConfig) {
    let slots = config.slots;
    let save = if config.states.is_some() { STATE_COPY_WORDS } else { 0 };
    // With a window part, a row may also get a page of it and drop another one.
    let tables = if config.windows.is_some() { 3 } else { 1 };
    let each = (ROW_WORDS + PAGE_WRITE_WORDS * tables + save) as u64;
    let words = StepPlan::default().words() as u64 + each * u64::from(slots);
    assert!(words <= RUNNING_WORDS, "a plan has no room for {slots} slots");
}

/// True if a plan that has admitted a request, and its result, have room for this request too.
pub(crate) fn has_words(
    config: &SchedulerConfig,
    memory: &Memory,
    step: &NewStep<'_>,
    entry: &Entry,
) -> bool {
    // The plan also contains the tokens that the request still shares with others: its slot gets a
    // copy.
    let shared = entry.known() as usize - entry.tokens.len();
    let words = entry.slot(0).words()
        + shared
        + ROW_WORDS
        + memory.words(entry.total, config.token_budget)
        + image_words(&entry.request.images) as usize;
    let vectors = step.flight.pooled + usize::from(entry.pools());
    step.plan.words() + words <= config.step_words
        && vectors * config.vector_size as usize <= STEP_WORDS
}
