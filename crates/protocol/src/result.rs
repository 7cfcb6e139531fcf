//! The result of a step.

use crate::adapter::PlaceEnd;
use crate::columns::{columns, record};
use crate::copy::{CopyEnd, CopyTiming};
use crate::frame::FrameError;

/// The row was computed.
pub const ROW_OK: i32 = 0;
/// The row's logits were not finite.
pub const ROW_NOT_FINITE: i32 = 1;

/// The log-probabilities of one sampled position: the sampled token first, then the most likely
/// tokens in descending order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledLogprobs<'a> {
    /// The token ids.
    pub ids: &'a [i32],
    /// Natural logarithms of the unmodified distribution, one for each id.
    pub values: &'a [f32],
}

record! {
    /// The times of a step, in microseconds.
    #[derive(Default, Eq)]
    pub struct StepTiming {
        /// The step's compute time, without the wait for masks.
        pub device_us: u32,
        /// The time from the end of the previous step's compute to the start of this step's, plus
        /// the wait for masks within this step. Waits of kernels for each other within the step
        /// count as compute time.
        pub gap_us: u32,
    }
}

record! {
    /// How many positions the sparse slots of a step selected, by where they were found, summed
    /// over rows and layers.
    #[derive(Default, Eq)]
    pub struct SparseRows {
        /// All selected positions.
        pub selected: u32,
        /// Positions found on pages of the device.
        pub on_pages: u32,
        /// Positions found in the hot rows of their slot.
        pub in_rows: u32,
        /// Positions copied from the host tier.
        pub missed: u32,
    }
}

columns! {
    /// The result of one step.
    pub struct StepResult: Result, "result" {
        /// The number of the step.
        pub step,
        /// The tokens of each row that samples and does not sit out, in row order.
        1 pub tokens: Vec<i32>,
        /// One per row, in row order. 0: the row was computed. 1: the logits, those of prompt
        /// tokens, or the vector were not finite.
        2 pub row_errors: Vec<i32>,
        /// One per token: its number of entries in the next two columns. Absent if no request needs
        /// log-probabilities.
        3 pub logprob_counts: Vec<i32>,
        /// The entries of each token: the sampled token, then the most likely ones, descending.
        4 pub logprob_ids: Vec<i32>,
        /// The natural logarithm of each entry's probability.
        5 pub logprob_values: Vec<f32>,
        /// The step's compute time in microseconds. Then the time from the end of the previous
        /// step's compute to the start of this step's, plus the wait for masks within it.
        6 pub timing: StepTiming,
        /// The vectors of the pooling rows, in row order, concatenated. All have the same length.
        7 pub pooled: Vec<f32>,
        /// The number of tokens of each row that samples and does not sit out, at least 1; absent:
        /// one each.
        8 pub token_counts: Vec<i32>,
        /// The copies that ended since the last result. `error` 0: done; 1: failed.
        9 pub copied: Vec<CopyEnd>,
        /// Microseconds that saves and restores took since the last result; absent: there were
        /// none.
        10 pub copy_timing: Option<CopyTiming>,
        /// The positions that the step's sparse slots selected, summed over all rows and layers:
        /// all; found on pages; found in hot rows; missed. Absent: there were none.
        11 pub sparse_rows: Option<SparseRows>,
        /// Microseconds that rows waited for copies since the last result; absent: they did not
        /// wait.
        12 pub copy_wait_us: Option<u32>,
        /// The rank of each token that the plan's `prompt_logprobs` request, in their order: 1 plus
        /// the number of likelier tokens.
        13 pub prompt_ranks: Vec<i32>,
        /// The entries of each of these tokens, `1 + most` of them: the token, then the most likely
        /// ones, descending.
        14 pub prompt_ids: Vec<i32>,
        /// The natural logarithm of each entry's probability.
        15 pub prompt_values: Vec<f32>,
        /// The writes into places that ended since the last result. `error` 0: done; 1: the files
        /// cannot be read; 2: their content has changed since the brain read them; 3: no memory.
        16 pub placed: Vec<PlaceEnd>,
    }
}

/// The log-probabilities of prompt tokens. The entries of a token are the token itself, then the
/// most likely ones, descending.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptLogprobs {
    /// The rank of each token: 1, plus the number of likelier tokens.
    pub ranks: Vec<i32>,
    /// The token ids of the entries.
    pub ids: Vec<i32>,
    /// The natural logarithm of each entry's probability.
    pub values: Vec<f32>,
}

impl StepResult {
    /// Iterates over the log-probabilities of each token, in order; `None` for a token without
    /// them. The iterator is endless, so zip it with the tokens.
    pub fn logprobs(&self) -> impl Iterator<Item = Option<SampledLogprobs<'_>>> {
        let (mut at, mut row) = (0, 0);
        std::iter::from_fn(move || {
            let count = self.logprob_counts.get(row).map_or(0, |&n| n as usize);
            row += 1;
            let range = at..at + count;
            at += count;
            Some((count > 0).then(|| SampledLogprobs {
                ids: &self.logprob_ids[range.clone()],
                values: &self.logprob_values[range],
            }))
        })
    }

    /// Iterates over the number of tokens of each sampling row.
    pub fn counts(&self) -> impl Iterator<Item = usize> {
        let one_each = if self.token_counts.is_empty() { self.tokens.len() } else { 0 };
        let counts = self.token_counts.iter().map(|&count| count as usize);
        counts.chain(std::iter::repeat_n(1, one_each))
    }

    /// Checks that the columns form a valid result.
    ///
    /// # Errors
    /// The columns are inconsistent, or a number is invalid.
    fn check(&self) -> Result<(), FrameError> {
        let (counts, tokens) = (&self.logprob_counts, self.tokens.len());
        if counts.iter().any(|&n| n < 0) {
            return Err(FrameError::Malformed("negative count"));
        }
        let entries = counts.iter().map(|&n| n as usize).sum::<usize>();
        let sampling = if self.token_counts.is_empty() { tokens } else { self.token_counts.len() };
        let SparseRows { selected, on_pages, in_rows, missed } =
            self.sparse_rows.unwrap_or_default();
        let agree = sampling <= self.row_errors.len()
            && (self.token_counts.is_empty() || sum(&self.token_counts) == Some(tokens))
            && (counts.is_empty() || counts.len() == tokens)
            && self.logprob_ids.len() == entries
            && self.logprob_values.len() == entries
            && (selected | on_pages | in_rows | missed).cast_signed() >= 0
            && self.prompt_ranks.iter().all(|&rank| rank >= 1)
            && self.prompt_ids.len() == self.prompt_values.len()
            && self.prompt_ranks.len() <= self.prompt_ids.len()
            && self.prompt_ranks.is_empty() == self.prompt_ids.is_empty();
        if agree { Ok(()) } else { Err(FrameError::Malformed("result columns disagree")) }
    }
}

/// Sums all counts; `None` if one is below 1.
fn sum(counts: &[i32]) -> Option<usize> {
    counts.iter().try_fold(0, |sum, &count| (count >= 1).then_some(sum + count as usize))
}
