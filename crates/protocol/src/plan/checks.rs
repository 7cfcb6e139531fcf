//! Checks a received plan.

use super::{FLAG_MASKED, FLAG_POOL, FLAG_SAMPLE, StepPlan};
use crate::copy::{MAX_WAIT_US, PageCopy};
use crate::frame::FrameError;

/// The combinations of flags that a row may have.
const KNOWN: [i32; 4] = [0, FLAG_SAMPLE, FLAG_POOL, FLAG_SAMPLE | FLAG_MASKED];

impl StepPlan {
    /// Checks that the columns form a valid plan.
    ///
    /// # Errors
    /// The columns are inconsistent, or a number or flag is invalid.
    pub(super) fn check(&self) -> Result<(), FrameError> {
        let agree = self.slots_agree()?
            && self.rows_agree()
            && self.drafts_agree()
            && self.copies_agree()
            && self.places_agree()
            && self.images_agree()
            && self.group_agrees()
            && self.states_agree()
            && self.prompt_logprobs_agree();
        if !agree {
            return Err(FrameError::Malformed("plan columns disagree"));
        }
        if self.wait_us.is_some_and(|us| us > MAX_WAIT_US || !self.rows.is_empty()) {
            return Err(FrameError::Malformed("wait_us beside rows or out of range"));
        }
        if self.rows.iter().any(|row| !KNOWN.contains(&row.flags)) {
            return Err(FrameError::Malformed("unknown row flags"));
        }
        Ok(())
    }

    fn rows_agree(&self) -> bool {
        let most = &self.row_tokens;
        (most.is_empty() || most.len() == self.sampling_rows())
            && most.iter().all(|&most| most >= 1)
    }

    fn copies_agree(&self) -> bool {
        let spans = &self.copy_spans;
        let sources = &self.copy_sources;
        let source = |at| sources.get(at).copied().unwrap_or(0);
        let copies = self.copies.iter().enumerate();
        copies.map(|(at, &record)| PageCopy::new(record, None, source(at))).all(|it| it.is_some())
            && (sources.is_empty() || sources.len() == self.copies.len())
            && (spans.is_empty() || spans.len() == self.copies.len())
            && spans.iter().all(|span| (span.first | span.count).cast_signed() >= 0)
            && self.host_writes.iter().chain(&self.hot_rows).all(|write| write.is_whole())
    }
}
