//! The checks of a plan that somebody else has written.

use super::{
    FLAG_MASKED, FLAG_POOL, FLAG_SAMPLE, PAGE_WRITE_WORDS, PROMPT_LOGPROBS_WORDS, ROW_RECORD_WORDS,
    StepPlan, records, take_pair,
};
use crate::copy::{COPY_WORDS, MAX_WAIT_US, PageCopy, SPAN_WORDS};
use crate::frame::FrameError;
use crate::slot::{PAIR_WORDS, SLOT_FLOATS, SlotRecord};

/// Flags that a row may have.
const KNOWN: [i32; 4] = [0, FLAG_SAMPLE, FLAG_POOL, FLAG_SAMPLE | FLAG_MASKED];

impl StepPlan {
    /// Checks that the columns can be read as the columns of one plan.
    ///
    /// # Errors
    /// They contradict each other, or a number or flag can't be.
    pub(super) fn check(&self) -> Result<(), FrameError> {
        if !self.has_whole_records() {
            return Err(FrameError::Malformed("plan record length"));
        }
        let agree = self.slots_agree()?
            && self.rows_agree()
            && self.copies_agree()
            && self.images_agree()
            && self.group_agrees()
            && self.prompt_logprobs_agree();
        if !agree {
            return Err(FrameError::Malformed("plan columns disagree"));
        }
        let waits = match *self.wait_us {
            [] => true,
            [us] => self.rows.is_empty() && (0..=MAX_WAIT_US.cast_signed()).contains(&us),
            _ => false,
        };
        if !waits {
            return Err(FrameError::Malformed("wait_us beside rows or out of range"));
        }
        let mut flags = self.rows.chunks_exact(ROW_RECORD_WORDS).map(|row| row[3]);
        if flags.any(|flags| !KNOWN.contains(&flags)) {
            return Err(FrameError::Malformed("unknown row flags"));
        }
        Ok(())
    }

    fn has_whole_records(&self) -> bool {
        [
            (&self.slots, SlotRecord::WORDS),
            (&self.page_writes, PAGE_WRITE_WORDS),
            (&self.host_writes, PAGE_WRITE_WORDS),
            (&self.hot_rows, PAGE_WRITE_WORDS),
            (&self.rows, ROW_RECORD_WORDS),
            (&self.copies, COPY_WORDS),
            (&self.prompt_logprobs, PROMPT_LOGPROBS_WORDS),
        ]
        .iter()
        .all(|(column, words)| column.len().is_multiple_of(*words))
    }

    /// True if the columns beside the slots have what the slots count, and pairs of no others.
    fn slots_agree(&self) -> Result<bool, FrameError> {
        let (mut inline, mut stops, mut biases, mut allowed) = (0_u64, 0_u64, 0_u64, 0_u64);
        let (mut segments, mut embeds, mut counts) =
            (&self.segments[..], &self.embeds[..], &self.allowed_counts[..]);
        for record in records(&self.slots) {
            let count = |count: i32| u64::try_from(count);
            let own = [record.token_count, record.stop_count, record.bias_count].map(count);
            let [Ok(_), Ok(stop_count), Ok(bias_count)] = own else {
                return Err(FrameError::Malformed("negative count"));
            };
            inline += record.inline() as u64;
            stops += stop_count;
            biases += bias_count;
            take_pair(&mut segments, record.slot);
            take_pair(&mut embeds, record.slot);
            allowed += u64::from(take_pair(&mut counts, record.slot).unwrap_or(0));
        }
        let pairs = [&self.segments, &self.embeds];
        Ok(self.slot_floats.len() == self.slots.len() / SlotRecord::WORDS * SLOT_FLOATS
            && self.tokens.len() as u64 == inline
            && self.stop_ids.len() as u64 == stops
            && self.bias_ids.len() as u64 == biases
            && self.bias_values.len() == self.bias_ids.len()
            && self.allowed_ids.len() as u64 == allowed
            && [segments, embeds, counts].iter().all(|left| left.is_empty())
            && values(&self.allowed_counts).all(|count| count >= 1)
            && pairs.iter().flat_map(|pairs| values(pairs)).all(|value| value >= 0))
    }

    fn rows_agree(&self) -> bool {
        let most = &self.row_tokens;
        (most.is_empty() || most.len() == self.sampling_rows())
            && most.iter().all(|&most| most >= 1)
    }

    fn copies_agree(&self) -> bool {
        let (copies, spans) = (&self.copies, &self.copy_spans);
        copies.as_chunks().0.iter().all(|record| PageCopy::of(record, None).is_some())
            && (spans.is_empty() || spans.len() * COPY_WORDS == copies.len() * SPAN_WORDS)
            && spans.iter().all(|&number| number >= 0)
            && self.host_writes.iter().chain(&self.hot_rows).all(|&number| number >= 0)
    }
}

/// The values of a column of pairs.
fn values(pairs: &[i32]) -> impl Iterator<Item = i32> + '_ {
    let (pairs, _) = pairs.as_chunks::<PAIR_WORDS>();
    pairs.iter().map(|&[_, value]| value)
}
