//! The outcomes of drafts, and the drafts of a step.

use forebay_draft::{DecodeStep, DraftBudget, DraftOffer};
use forebay_protocol::StepTiming;

use crate::steps::Flight;

/// The largest number of sampling rows plus drafts in a step with drafts. It bounds the memory for
/// logits.
pub const MAX_DRAFTED: u32 = 64;

/// The state of drafting, for all requests together.
#[derive(Debug, Default)]
pub(crate) struct Drafting {
    pub(crate) budget: DraftBudget,
    /// The drafts on offer for a step. Empty between steps; kept to reuse the memory.
    pub(crate) offers: Vec<DraftOffer>,
    pub(crate) rows: Vec<usize>,
    pub(crate) counts: Vec<u32>,
    /// The number of sampling rows in the last step.
    pub(crate) sampled: u32,
    /// True if the next plan could be made already, but waits for the tokens of the last step.
    pub(crate) waits: bool,
}

impl Drafting {
    /// Learns the cost of a step whose rows returned `tokens` tokens.
    pub(crate) fn learn(&mut self, flight: &Flight, tokens: usize, timing: StepTiming) {
        let decodes = flight
            .rows
            .iter()
            .all(|row| row.want.samples() && row.end == row.start + 1 && row.prompt.is_none());
        if decodes && flight.towers.is_empty() && !flight.rows.is_empty() {
            self.budget.step_ended(DecodeStep {
                rows: flight.rows.len() as u32,
                drafts: flight.drafts,
                tokens: tokens as u32,
                us: timing.device_us,
                waited_us: flight.waited.then_some(timing.gap_us),
            });
        } else {
            // If the step also computed tower layers, its time does not show how long the positions
            // took.
            let rows = flight.towers.is_empty().then_some(&flight.rows);
            let positions = rows.map_or(0, |rows| rows.iter().map(|row| row.end - row.start).sum());
            self.budget.prompts_ended(positions, flight.drafts, timing.device_us);
        }
    }
}
