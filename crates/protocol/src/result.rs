//! The step result: the outputs of one step.

use crate::copy::{COPIED_WORDS, CopyTiming};
use crate::frame::{Frame, FrameError, Kind, as_words, encode, floats};

/// The row was computed.
pub const ROW_OK: i32 = 0;
/// The row's logits were not finite.
pub const ROW_NOT_FINITE: i32 = 1;

/// Columns of a result: the ids 1 to this, in the order of [`StepResult::encode`].
const COLUMNS: usize = 15;

/// Log-probabilities of one sampled position: the sampled token first, then the most likely in
/// descending order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledLogprobs<'a> {
    /// Token ids.
    pub ids: &'a [i32],
    /// Natural logarithms of the unmodified distribution, one for each id.
    pub values: &'a [f32],
}

/// The answer to one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepResult {
    /// The plan's step number.
    pub step: u64,
    /// The tokens of the rows that sample, in row order. Each row has one, or as many as in
    /// `token_counts`.
    pub tokens: Vec<i32>,
    /// The errors, one for each row, in row order: [`ROW_OK`] or [`ROW_NOT_FINITE`].
    pub row_errors: Vec<i32>,
    /// The number of entries of each token; empty if no row wants log-probabilities.
    pub logprob_counts: Vec<i32>,
    /// Token ids of the entries of all rows.
    pub logprob_ids: Vec<i32>,
    /// Log-probabilities of the entries of all rows.
    pub logprob_values: Vec<f32>,
    /// Microseconds of compute.
    pub device_us: u32,
    /// Microseconds between the end of the previous step's compute and the start of this one's.
    pub gap_us: u32,
    /// The vectors of the pooled rows, in row order. They follow one another, and are equally long.
    pub pooled: Vec<f32>,
    /// The number of tokens of each sampling row, at least one; empty: one each.
    pub token_counts: Vec<i32>,
    /// Copies that ended since the last result: the ticket, and [`crate::COPY_OK`] or
    /// [`crate::COPY_FAILED`].
    pub copied: Vec<[i32; COPIED_WORDS]>,
    /// The time of copies since the last result.
    pub copy_timing: CopyTiming,
    /// The places of the rows that sparse slots read.
    pub sparse_rows: SparseRows,
    /// The log-probabilities of prompts that the plan demands, in its order; `None`: it demands
    /// none.
    pub prompt_logprobs: Option<Box<PromptLogprobs>>,
}

/// Log-probabilities of tokens of prompts. A token's entries are the token itself, then the most
/// likely ones, descending.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptLogprobs {
    /// The rank of each token: 1, plus the number of likelier tokens.
    pub ranks: Vec<i32>,
    /// Token ids of the entries.
    pub ids: Vec<i32>,
    /// Natural logarithms, one for each entry.
    pub values: Vec<f32>,
}

/// The number of rows that a step's sparse slots chose, by their places, summed over rows and
/// layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SparseRows {
    /// All chosen rows.
    pub selected: u32,
    /// Rows found on pages of the device.
    pub on_pages: u32,
    /// Rows found in the hot rows of their slot.
    pub in_rows: u32,
    /// Rows copied from the host's tier.
    pub missed: u32,
}

impl SparseRows {
    fn words(self) -> [i32; 4] {
        [self.selected, self.on_pages, self.in_rows, self.missed].map(u32::cast_signed)
    }

    fn of(words: &[i32]) -> Self {
        match *words {
            [selected, on_pages, in_rows, missed] => {
                let [selected, on_pages, in_rows, missed] =
                    [selected, on_pages, in_rows, missed].map(i32::cast_unsigned);
                Self { selected, on_pages, in_rows, missed }
            }
            _ => Self::default(),
        }
    }
}

impl StepResult {
    /// Log-probabilities of each token in order; `None` if its request wants none. The iterator is
    /// endless, so zip it with the tokens.
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

    /// The number of tokens of each sampling row.
    pub fn counts(&self) -> impl Iterator<Item = usize> {
        let one_each = if self.token_counts.is_empty() { self.tokens.len() } else { 0 };
        let counts = self.token_counts.iter().map(|&count| count as usize);
        counts.chain(std::iter::repeat_n(1, one_each))
    }

    /// Writes the result's frame to `out`, whose old content is lost.
    ///
    /// # Errors
    /// The frame would be too large for a reader.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let CopyTiming { save_us, restore_us, waited_us } = self.copy_timing;
        let copy_timing = [save_us.cast_signed(), restore_us.cast_signed()];
        let timed = save_us > 0 || restore_us > 0;
        let waited = [waited_us.cast_signed()];
        let sparse_rows = self.sparse_rows.words();
        let prompts = self.prompt_logprobs.as_deref();
        encode(
            Kind::Result,
            self.step,
            &[
                &self.tokens,
                &self.row_errors,
                &self.logprob_counts,
                &self.logprob_ids,
                as_words(&self.logprob_values),
                &[self.device_us.cast_signed(), self.gap_us.cast_signed()],
                as_words(&self.pooled),
                &self.token_counts,
                self.copied.as_flattened(),
                if timed { &copy_timing } else { &[] },
                if sparse_rows == [0; 4] { &[] } else { &sparse_rows },
                if waited_us > 0 { &waited } else { &[] },
                prompts.map_or(&[], |prompts| &prompts.ranks),
                prompts.map_or(&[], |prompts| &prompts.ids),
                prompts.map_or(&[], |prompts| as_words(&prompts.values)),
            ],
            out,
        )
    }

    /// Reads a result's frame.
    ///
    /// # Errors
    /// The frame is of another kind, a column is not known, or lengths of columns contradict each
    /// other.
    pub fn decode(frame: &Frame) -> Result<Self, FrameError> {
        if frame.header().kind != Kind::Result {
            return Err(FrameError::Malformed("not a result"));
        }
        let columns = frame.known::<COLUMNS>()?;
        let [tokens, row_errors, counts, ids, values, ..] = columns;
        let [.., timing, pooled, token_counts, copied, _, _, _, _, _, _] = columns;
        let [.., copy_timing, sparse, waited, ranks, prompt_ids, prompt_values] = columns;
        let (copied, odd) = copied.as_chunks::<COPIED_WORDS>();
        if counts.iter().any(|&n| n < 0) {
            return Err(FrameError::Malformed("negative count"));
        }
        let entries = counts.iter().map(|&n| n as usize).sum::<usize>();
        let sampling = if token_counts.is_empty() { tokens.len() } else { token_counts.len() };
        let agree = sampling <= row_errors.len()
            && (token_counts.is_empty() || sum(token_counts) == Some(tokens.len()))
            && (counts.is_empty() || counts.len() == tokens.len())
            && ids.len() == entries
            && values.len() == entries
            && timing.len() == 2
            && odd.is_empty()
            && matches!(copy_timing.len(), 0 | 2)
            && matches!(sparse.len(), 0 | 4)
            && sparse.iter().all(|&count| count >= 0)
            && waited.len() <= 1
            && ranks.iter().all(|&rank| rank >= 1)
            && prompt_ids.len() == prompt_values.len()
            && ranks.len() <= prompt_ids.len()
            && ranks.is_empty() == prompt_ids.is_empty();
        if !agree {
            return Err(FrameError::Malformed("result columns disagree"));
        }
        Ok(Self {
            step: frame.header().step,
            tokens: tokens.to_vec(),
            row_errors: row_errors.to_vec(),
            logprob_counts: counts.to_vec(),
            logprob_ids: ids.to_vec(),
            logprob_values: floats(values).to_vec(),
            device_us: timing[0].cast_unsigned(),
            gap_us: timing[1].cast_unsigned(),
            pooled: floats(pooled).to_vec(),
            token_counts: token_counts.to_vec(),
            copied: copied.to_vec(),
            copy_timing: CopyTiming {
                save_us: copy_timing.first().map_or(0, |us| us.cast_unsigned()),
                restore_us: copy_timing.get(1).map_or(0, |us| us.cast_unsigned()),
                waited_us: waited.first().map_or(0, |us| us.cast_unsigned()),
            },
            sparse_rows: SparseRows::of(sparse),
            prompt_logprobs: (!ranks.is_empty()).then(|| {
                let (ranks, ids) = (ranks.to_vec(), prompt_ids.to_vec());
                Box::new(PromptLogprobs { ranks, ids, values: floats(prompt_values).to_vec() })
            }),
        })
    }
}

/// All counts together; `None` if one is below 1.
fn sum(counts: &[i32]) -> Option<usize> {
    counts.iter().try_fold(0, |sum, &count| (count >= 1).then_some(sum + count as usize))
}
