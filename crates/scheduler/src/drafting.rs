//! What is learned of drafts, and what is known of those of a step.

use forebay_draft::{DraftBudget, DraftOffer};

use crate::steps::Flight;

/// The largest number of rows that give tokens and their drafts, in a step with drafts. It bounds
/// the memory for logits.
pub const MAX_DRAFTED: u32 = 64;
/// The state of all drafts.
#[derive(Debug, Default)]
pub(crate) struct Drafting {
    pub(crate) budget: DraftBudget,
    /// Kept for their memory.
    pub(crate) offers: Vec<DraftOffer>,
    pub(crate) rows: Vec<usize>,
    pub(crate) counts: Vec<u32>,
    /// Rows that gave tokens in the last step.
    pub(crate) sampled: u32,
}

impl Drafting {
    /// Takes the end of a step. `tokens`: those that its rows gave.
    pub(crate) fn learn(&mut self, flight: &Flight, tokens: usize, device_us: u32) {
        let decodes = flight
            .rows
            .iter()
            .all(|row| row.want.samples() && row.end == row.start + 1 && row.prompt.is_none());
        if decodes && flight.towers.is_empty() && !flight.rows.is_empty() {
            let rows = flight.rows.len() as u32;
            self.budget.step_ended(rows, flight.drafts, tokens as u32, device_us);
        }
    }
}
