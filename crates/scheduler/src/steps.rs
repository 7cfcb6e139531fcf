//! The steps in flight, and the one under construction.

use std::collections::VecDeque;

use forebay_protocol::{PromptLogprobsWant, StepPlan, Want};

use crate::event::Event;
use crate::expected::RowDrafts;
use crate::slab::Handle;
use crate::turns::background::Mixture;

/// A row of a step in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlightRow {
    pub(crate) handle: Handle,
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) want: Want,
    /// The prompt log-probabilities that the row returns, if any.
    pub(crate) prompt: Option<PromptLogprobsWant>,
    /// True if sampling was cancelled for this row: its last position is computed again.
    pub(crate) sits_out: bool,
    /// The row's drafts, whose positions come after `end`.
    pub(crate) drafts: Option<RowDrafts>,
    /// True if the row is background work.
    pub(crate) background: bool,
}

impl FlightRow {
    /// The number of positions that the row computes.
    pub(crate) fn positions(&self) -> u32 {
        self.end - self.start + self.drafts.map_or(0, |drafts| drafts.count)
    }
}

/// Layers of an image that a step in flight computes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlightImage {
    /// The request that waits for the image.
    pub(crate) handle: Handle,
    /// The end of the image's positions in that request's prompt.
    pub(crate) end: u32,
}

/// A planned step.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    pub(crate) step: u64,
    pub(crate) rows: Vec<FlightRow>,
    pub(crate) sampled: usize,
    pub(crate) pooled: usize,
    /// The number of drafts in all rows.
    pub(crate) drafts: u32,
    /// The number of words that log-probabilities of prompts take in the step's result.
    pub(crate) answer_words: usize,
    pub(crate) towers: Vec<FlightImage>,
    /// Arena offsets of the image patches that the step reads.
    pub(crate) read: Vec<u32>,
    /// True if, because of drafts, the plan could not be made before the result of the previous
    /// step had come.
    pub(crate) waited: bool,
}

impl Flight {
    /// The requests with work in this step, each with the position at which that work ends.
    pub(crate) fn work(&self) -> impl Iterator<Item = (Handle, u32)> {
        let rows = self.rows.iter().map(|row| (row.handle, row.end));
        rows.chain(self.towers.iter().map(|image| (image.handle, image.end)))
    }

    /// The number of positions in all rows.
    pub(crate) fn positions(&self) -> u32 {
        self.rows.iter().map(FlightRow::positions).sum()
    }

    /// The number of foreground rows, and the numbers of positions in foreground rows and in
    /// background rows.
    pub(crate) fn mixture(&self) -> Mixture {
        let mut mixture = Mixture { rows: 0, positions: 0, background: 0 };
        for row in &self.rows {
            if row.background {
                mixture.background += row.positions();
            } else {
                mixture.rows += 1;
                mixture.positions += row.positions();
            }
        }
        mixture
    }

    /// The number of prompt tokens for whose log-probabilities the result still has room, at `most`
    /// most likely tokens each. At most `step_words` words are for log-probabilities, but a result
    /// without any always has room for one token.
    pub(crate) fn answers_left(&self, step_words: usize, most: u32) -> u32 {
        let left = step_words.saturating_sub(self.answer_words)
            / PromptLogprobsWant::answer_words(1, most);
        u32::try_from(left.max(usize::from(self.answer_words == 0))).unwrap_or(u32::MAX)
    }

    pub(crate) fn push(&mut self, row: FlightRow) {
        self.sampled += usize::from(row.want.samples());
        self.pooled += usize::from(row.want == Want::Vector);
        let words =
            |want: PromptLogprobsWant| PromptLogprobsWant::answer_words(want.count, want.most);
        self.answer_words += row.prompt.map_or(0, words);
        self.rows.push(row);
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.towers.clear();
        self.read.clear();
        (self.sampled, self.pooled, self.drafts, self.answer_words) = (0, 0, 0, 0);
        self.waited = false;
    }
}

/// The work of a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlannedStep {
    /// The number of rows that decode.
    pub decode_rows: u32,
    /// The number of rows in prefill.
    pub prefill_rows: u32,
    /// The number of positions of all rows, drafts included.
    pub tokens: u32,
    /// The number of images for which the tower computes layers.
    pub images: u32,
}

impl PlannedStep {
    pub(crate) fn of(flight: &Flight, decodes: usize) -> Self {
        Self {
            decode_rows: decodes as u32,
            prefill_rows: (flight.rows.len() - decodes) as u32,
            tokens: flight.positions(),
            images: flight.towers.len() as u32,
        }
    }

    /// True if the device computes anything.
    #[must_use]
    pub fn computes(&self) -> bool {
        self.tokens > 0 || self.images > 0
    }
}

/// A step under construction.
pub(crate) struct NewStep<'a> {
    pub(crate) plan: &'a mut StepPlan,
    pub(crate) events: &'a mut Vec<Event>,
    pub(crate) flight: Flight,
}

/// All steps whose results are outstanding.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    /// The number of steps so far.
    count: u64,
    pub(crate) in_flight: VecDeque<Flight>,
    /// Cleared records, kept to reuse their memory.
    spare: Vec<Flight>,
    pub(crate) planned: PlannedStep,
}

impl Steps {
    /// The number of the next step; the first is 1.
    pub(crate) fn next(&self) -> u64 {
        self.count + 1
    }

    /// The last step whose result has come. All steps in flight are later.
    pub(crate) fn answered(&self) -> u64 {
        self.in_flight.front().map_or(self.count, |oldest| oldest.step - 1)
    }

    /// The next step, empty.
    pub(crate) fn begin(&mut self) -> Flight {
        Flight { step: self.next(), ..self.spare.pop().unwrap_or_default() }
    }

    /// Moves the new plan into flight; `decodes` of its rows decode.
    pub(crate) fn launch(&mut self, flight: Flight, decodes: usize) {
        self.planned = PlannedStep::of(&flight, decodes);
        self.count += 1;
        self.in_flight.push_back(flight);
    }

    /// Keeps the memory of a step that has finished, or was not sent, for reuse.
    pub(crate) fn reuse(&mut self, mut flight: Flight) {
        flight.clear();
        self.spare.push(flight);
    }

    /// The rows of a request in flight.
    pub(crate) fn rows_of(&self, handle: Handle) -> impl Iterator<Item = &FlightRow> + Clone {
        let rows = self.in_flight.iter().flat_map(|flight| &flight.rows);
        rows.filter(move |row| row.handle == handle)
    }

    /// The work of all steps in flight, as [`Flight::work`] gives it.
    pub(crate) fn work(&self) -> impl Iterator<Item = (Handle, u32)> {
        self.in_flight.iter().flat_map(Flight::work)
    }
}
