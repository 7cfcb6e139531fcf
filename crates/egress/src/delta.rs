//! The new part of a choice.

use forebay_api::ApiError;
use forebay_dialect::Parts;
use forebay_engine::PredictedTokens;

use crate::prompt_logprobs::PromptLogprobList;

/// Lower log-probabilities are written as this value, because JSON has no minus infinity.
const SMALLEST_LOGPROB: f32 = -9999.0;

/// A token that could have been sampled, and the natural logarithm of its probability (finite).
pub type Candidate = (i32, f32);

/// Log-probabilities of tokens, as numbers: 8 bytes a candidate and 4 a token. They are converted
/// to text only when they are written, so that a slow reader makes only numbers wait.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logprobs {
    /// The candidates of all tokens, in order. For each token the sampled one comes first, then the
    /// most likely ones in descending order.
    candidates: Vec<Candidate>,
    /// The end of each token's candidates.
    ends: Vec<u32>,
}

impl Logprobs {
    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Appends a token's candidates, the sampled one first. Without candidates it appends nothing.
    pub fn push(&mut self, candidates: &[Candidate]) {
        if candidates.is_empty() {
            return;
        }
        let finite = candidates.iter().map(|&(id, logprob)| (id, logprob.max(SMALLEST_LOGPROB)));
        self.candidates.extend(finite);
        self.end_token();
    }

    /// The sampled candidate of each token, and its most likely ones.
    pub fn iter(&self) -> impl Iterator<Item = (Candidate, &[Candidate])> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(&self.ends).filter_map(|(start, &end)| {
            let (sampled, top) = self.candidates[start as usize..end as usize].split_first()?;
            Some((*sampled, top))
        })
    }

    fn end_token(&mut self) {
        // Answers are bounded in bytes far below 2^32 candidates.
        self.ends.push(u32::try_from(self.candidates.len()).unwrap_or(u32::MAX));
    }

    /// Candidates of all tokens.
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    pub(crate) fn clear(&mut self) {
        self.candidates.clear();
        self.ends.clear();
    }

    pub(crate) fn append(&mut self, newer: &mut Self) {
        let before = u32::try_from(self.candidates.len()).unwrap_or(u32::MAX);
        self.candidates.append(&mut newer.candidates);
        self.ends.extend(newer.ends.drain(..).map(|end| before.saturating_add(end)));
    }
}

/// The approximate number of bytes of JSON for a log-probability: its token's text, the number, and
/// its token's bytes one by one.
pub const LOGPROB_JSON: usize = 96;

/// The reason of a choice's end.
#[derive(Debug, Clone, PartialEq)]
pub enum End {
    /// End-of-sequence was sampled.
    Eos(i32),
    /// A stop token of the client was sampled.
    Token(i32),
    /// A stop string was found.
    Text(String),
    /// The only required call is complete.
    Call,
    /// The answer has the requested number of tokens.
    Length,
    /// The answer broke off with an error.
    Error(ApiError),
}

/// The new part of a choice since the last delta.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Delta {
    /// The new text. Some tokens' text may still be held back.
    pub parts: Parts,
    /// New tokens, a stop token included.
    pub tokens: Vec<i32>,
    /// The number of tokens that are reasoning.
    pub reasoning_tokens: u32,
    /// Tokens of the predicted answer that were verified.
    pub predicted: PredictedTokens,
    /// The log-probabilities of each of `tokens`, if requested.
    pub logprobs: Logprobs,
    /// The log-probabilities of the prompt's tokens, if requested. All have come with the first
    /// token.
    pub prompt: PromptLogprobList,
    /// The number of prompt tokens found in the prefix cache; it comes with the first token.
    pub cached_tokens: Option<u32>,
    /// Set in the last delta.
    pub end: Option<End>,
    /// At the end, true if the choice has a complete tool call that the model chose to make.
    pub called: bool,
}

impl Delta {
    /// The finish reason of the choice in OpenAI's form, for streamed and other answers alike.
    /// `None` before the end, and after an error.
    ///
    /// `length` has precedence. Otherwise the reason is `tool_calls` or `stop`. If the client has
    /// forced the tool, the model made no choice: OpenAI and vLLM give `stop` then (vLLM's #25054).
    pub fn finish_reason(&self) -> Option<&'static str> {
        match (self.end.as_ref()?, self.called) {
            (End::Error(_), _) => None,
            (End::Length, _) => Some("length"),
            (End::Eos(_) | End::Token(_) | End::Text(_) | End::Call, true) => Some("tool_calls"),
            (End::Eos(_) | End::Token(_) | End::Text(_) | End::Call, false) => Some("stop"),
        }
    }

    /// Removes the content and keeps the memory.
    pub fn clear(&mut self) {
        self.parts.clear();
        self.tokens.clear();
        self.reasoning_tokens = 0;
        self.predicted = PredictedTokens::default();
        self.logprobs.clear();
        self.prompt.clear();
        self.cached_tokens = None;
        self.end = None;
        self.called = false;
    }

    /// Appends a later delta and leaves it empty.
    pub fn merge(&mut self, newer: &mut Self) {
        self.parts.append(&mut newer.parts);
        self.tokens.append(&mut newer.tokens);
        self.reasoning_tokens += std::mem::take(&mut newer.reasoning_tokens);
        self.predicted += std::mem::take(&mut newer.predicted);
        self.logprobs.append(&mut newer.logprobs);
        self.prompt.append(&mut newer.prompt);
        self.cached_tokens = self.cached_tokens.or(newer.cached_tokens.take());
        self.end = self.end.take().or(newer.end.take());
        self.called |= std::mem::take(&mut newer.called);
    }

    /// The approximate encoded size in bytes, without the prompt's log-probabilities, and at least
    /// the size in memory.
    pub fn weight(&self) -> usize {
        self.parts.weight()
            + self.tokens.len() * size_of::<i32>()
            + self.logprobs.candidates() * LOGPROB_JSON
            + self.prompt.weight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Logprobs {
        /// Bytes of memory.
        fn memory(&self) -> usize {
            self.candidates.capacity() * size_of::<Candidate>()
                + self.ends.capacity() * size_of::<u32>()
        }
    }

    #[test]
    fn a_token_with_twenty_alternatives_is_a_few_hundred_bytes() {
        let candidates: Vec<Candidate> = (0..21).map(|id| (id, -(id as f32))).collect();
        let mut all = Logprobs::default();
        const TOKENS: usize = 10_000;
        for _ in 0..TOKENS {
            let mut one = Logprobs::default();
            one.push(&candidates);
            all.append(&mut one);
        }
        assert_eq!(all.iter().count(), TOKENS);
        // As text, the 21 candidates would each take two allocations and 56 bytes on top, 1.6 KB in
        // all.
        assert!(all.memory() <= TOKENS * 400, "{} bytes a token", all.memory() / TOKENS);
        let delta = Delta { logprobs: all, tokens: vec![0; TOKENS], ..Delta::default() };
        assert!(delta.weight() >= delta.logprobs.memory());
    }

    #[test]
    fn what_is_merged_is_what_was_pushed() {
        let tokens: [&[Candidate]; 4] =
            [&[(1, -0.5), (2, f32::NEG_INFINITY)], &[], &[(3, -1.0)], &[(4, -2.0), (5, 0.0)]];
        let mut all = Logprobs::default();
        all.push(tokens[0]);
        let mut newer = Logprobs::default();
        tokens[1..].iter().for_each(|candidates| newer.push(candidates));
        all.append(&mut newer);
        assert!(newer.is_empty());
        let expected: [(Candidate, &[Candidate]); 3] =
            [((1, -0.5), &[(2, -9999.0)]), ((3, -1.0), &[]), ((4, -2.0), &[(5, 0.0)])];
        assert_eq!(all.iter().collect::<Vec<_>>(), expected);
    }

    /// The table of all cases is in tests/e2e/test_finish.py.
    #[test]
    fn one_function_says_why_an_answer_ended() {
        let ends = [
            (End::Eos(2), "stop", "tool_calls"),
            (End::Token(7), "stop", "tool_calls"),
            (End::Text("x".into()), "stop", "tool_calls"),
            (End::Call, "stop", "tool_calls"),
            (End::Length, "length", "length"),
        ];
        for (end, without, with) in ends {
            for (called, expected) in [(false, without), (true, with)] {
                let mut delta = Delta { called, ..Delta::default() };
                assert_eq!(delta.finish_reason(), None, "not before the end");
                delta.merge(&mut Delta { end: Some(end.clone()), ..Delta::default() });
                assert_eq!(delta.finish_reason(), Some(expected), "{end:?}");
            }
        }
        let failed = End::Error(ApiError::Aborted);
        let delta = Delta { end: Some(failed), called: true, ..Delta::default() };
        assert_eq!(delta.finish_reason(), None);
    }
}
