//! Demands of a plan about the tokens of prompts.

use super::StepPlan;

/// Words of a record of the `prompt_logprobs` column.
pub const PROMPT_LOGPROBS_WORDS: usize = 4;

/// A demand for log-probabilities of some of a prompt's tokens, each after the tokens before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLogprobsWant {
    /// Row of the device tables. A row of the plan computes the positions before those of the
    /// tokens.
    pub slot: u32,
    /// Position of the first token, at least 1.
    pub first: u32,
    /// The number of tokens, at least one.
    pub count: u32,
    /// The number of most likely tokens that are reported beside each token.
    pub most: u32,
}

impl PromptLogprobsWant {
    fn of(&[slot, first, count, most]: &[i32; PROMPT_LOGPROBS_WORDS]) -> Self {
        let [slot, first, count, most] = [slot, first, count, most].map(i32::cast_unsigned);
        Self { slot, first, count, most }
    }

    /// Words of the answer in a result: for each token a rank, and ids and values of it and the
    /// most likely ones.
    #[must_use]
    pub fn answer_words(count: u32, most: u32) -> usize {
        count as usize * (1 + 2 * (1 + most as usize))
    }
}

impl StepPlan {
    /// Demands log-probabilities of a slot's tokens. The plan has a row of the slot, and demands
    /// come in the order of rows.
    pub fn want_prompt_logprobs(&mut self, want: PromptLogprobsWant) {
        let PromptLogprobsWant { slot, first, count, most } = want;
        self.prompt_logprobs.extend([slot, first, count, most].map(u32::cast_signed));
    }

    /// The demands for log-probabilities of prompts, in the order of rows.
    pub fn prompt_logprobs(&self) -> impl ExactSizeIterator<Item = PromptLogprobsWant> + '_ {
        let (records, _) = self.prompt_logprobs.as_chunks();
        records.iter().map(PromptLogprobsWant::of)
    }

    /// True if each want is answered by positions of a row, in the order of rows.
    pub(super) fn prompt_logprobs_agree(&self) -> bool {
        let mut rows = self.rows();
        let within = |want: PromptLogprobsWant| {
            let Some(row) = rows.find(|row| row.slot == want.slot) else { return false };
            let end = u64::from(row.start) + u64::from(row.length);
            want.first > row.start
                && want.count >= 1
                && u64::from(want.first) + u64::from(want.count) <= end + 1
        };
        self.prompt_logprobs.iter().all(|&number| number >= 0) && self.prompt_logprobs().all(within)
    }
}
