//! Log-probabilities of prompts: which of them a row computes, and which of those in a result are
//! new.
//!
//! The log-probabilities of a token come from the logits of the position before it. So a request
//! for log-probabilities computes all positions from the one before the first requested token on,
//! even if they are cached. Each row returns the log-probabilities of the tokens after its
//! positions. A preempted request computes its prompt again, perhaps with old rows still in flight,
//! but no log-probability is reported twice.

use forebay_protocol::{PromptLogprobs, PromptLogprobsWant, StepResult};

use crate::entry::Entry;
use crate::steps::FlightRow;

/// The prompt tokens whose log-probabilities a client requested: all tokens from one position on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptTail {
    /// The position of the first token whose log-probabilities are not reported yet, at least 1.
    pub first: u32,
    /// The number of most likely tokens that are reported with each token.
    pub most: u8,
}

impl Entry {
    /// The part of the requested tail that is not reported yet.
    fn untold(&self) -> Option<PromptTail> {
        self.request.prompt_logprobs.filter(|tail| tail.first < self.prompt_len)
    }

    /// True if the request samples tokens.
    pub(crate) fn generates(&self) -> bool {
        self.limit > self.prompt_len
    }

    /// The position up to which the request computes its known tokens.
    pub(crate) fn goal(&self) -> u32 {
        // The last token's logits are not needed if the request asks only for its prompt's
        // log-probabilities.
        self.total - u32::from(!self.generates() && !self.pools())
    }

    /// Leading positions that the request may take from the cache. At least one position is left to
    /// compute, because logits and vectors come only from rows.
    pub(crate) fn reusable(&self) -> u32 {
        let untold = self.untold().map_or(u32::MAX, |tail| tail.first);
        self.known().min(untold).saturating_sub(1)
    }

    /// The prompt tokens whose log-probabilities a row of positions `start .. end` in `slot`
    /// returns.
    pub(crate) fn given_by(&self, slot: u32, start: u32, end: u32) -> Option<PromptLogprobsWant> {
        let tail = self.untold()?;
        let first = tail.first.max(start + 1);
        let count = (end + 1).min(self.prompt_len).checked_sub(first).filter(|&count| count > 0)?;
        Some(PromptLogprobsWant { slot, first, count, most: tail.most.into() })
    }

    /// The largest number of positions, at most `length`, that the request's next row may have so
    /// that its prompt's log-probabilities fit into the result. `answers` returns the number of
    /// tokens for whose log-probabilities there is still room
    /// ([`crate::steps::Flight::answers_left`]).
    pub(crate) fn room_in_result(&self, length: u32, answers: impl Fn(u32) -> u32) -> u32 {
        let start = self.computed;
        let Some(want) = self.given_by(0, start, start + length) else { return length };
        let left = answers(want.most);
        if want.count <= left { length } else { want.first - 1 + left - start }
    }

    /// True if the result has room for log-probabilities of the request's prompt, or the request
    /// needs none.
    pub(crate) fn has_room_in_result(&self, answers: impl Fn(u32) -> u32) -> bool {
        self.untold().is_none_or(|tail| answers(tail.most.into()) > 0)
    }
}

/// The log-probabilities of prompts in a result, read row by row.
#[derive(Clone, Copy, Default)]
pub(crate) struct PromptLogprobsOf<'a> {
    ranks: &'a [i32],
    ids: &'a [i32],
    values: &'a [f32],
}

impl<'a> PromptLogprobsOf<'a> {
    pub(crate) fn new(result: &'a StepResult) -> Self {
        Self { ranks: &result.prompt_ranks, ids: &result.prompt_ids, values: &result.prompt_values }
    }

    /// Returns the log-probabilities of `row`, which has to be the next row. The lengths of all
    /// columns must have been checked.
    pub(crate) fn take(&mut self, row: &FlightRow) -> Self {
        let (count, most) = row.prompt.map_or((0, 0), |want| (want.count, want.most));
        let (tokens, entries) = (count as usize, count as usize * (1 + most as usize));
        let (ranks, ids, values);
        (ranks, self.ranks) = self.ranks.split_at(tokens);
        (ids, self.ids) = self.ids.split_at(entries);
        (values, self.values) = self.values.split_at(entries);
        Self { ranks, ids, values }
    }

    /// The log-probabilities without those of the first `told` tokens. `most` is the number of most
    /// likely tokens per position.
    pub(crate) fn from(self, told: u32, most: u32) -> PromptLogprobs {
        let (tokens, entries) = (told as usize, told as usize * (1 + most as usize));
        PromptLogprobs {
            ranks: self.ranks[tokens..].to_vec(),
            ids: self.ids[entries..].to_vec(),
            values: self.values[entries..].to_vec(),
        }
    }
}
