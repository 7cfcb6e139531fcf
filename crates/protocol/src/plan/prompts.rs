//! Requests in a plan for log-probabilities of prompt tokens.

use super::StepPlan;
use crate::columns::record;

record! {
    /// A request for log-probabilities of some of a prompt's tokens. Each is the probability given
    /// the tokens before it.
    #[derive(Eq)]
    pub struct PromptLogprobsWant {
        /// The index in the device tables. A row of the plan computes the positions that precede
        /// the tokens.
        pub slot: u32,
        /// The position of the first token, at least 1.
        pub first: u32,
        /// The number of tokens, at least one.
        pub count: u32,
        /// The number of most likely tokens to report for each position.
        pub most: u32,
    }
}

impl PromptLogprobsWant {
    /// The number of words in the result: for each token its rank, then ids and values of the token
    /// and of the most likely ones.
    #[must_use]
    pub fn answer_words(count: u32, most: u32) -> usize {
        count as usize * (1 + 2 * (1 + most as usize))
    }
}

impl StepPlan {
    /// Requests log-probabilities of a slot's tokens. The plan must have a row of the slot, and
    /// requests must be in the order of rows.
    pub fn want_prompt_logprobs(&mut self, want: PromptLogprobsWant) {
        self.prompt_logprobs.push(want);
    }

    /// Iterates over the requests for log-probabilities of prompts, in the order of rows.
    pub fn prompt_logprobs(&self) -> impl ExactSizeIterator<Item = PromptLogprobsWant> + '_ {
        self.prompt_logprobs.iter().copied()
    }

    /// True if rows compute the positions of each request, and the requests are in the order of
    /// rows.
    pub(super) fn prompt_logprobs_agree(&self) -> bool {
        let mut rows = self.rows();
        self.prompt_logprobs.iter().all(|want| {
            let Some(row) = rows.find(|row| row.slot == want.slot) else { return false };
            let end = u64::from(row.start) + u64::from(row.length);
            let numbers = [want.slot, want.first, want.count, want.most];
            numbers.iter().all(|number| number.cast_signed() >= 0)
                && want.first > row.start
                && want.count >= 1
                && u64::from(want.first) + u64::from(want.count) <= end + 1
        })
    }
}
