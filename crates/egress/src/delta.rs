//! The output of a choice since the last delta.

use forebay_api::ApiError;
use forebay_dialect::Parts;
use forebay_engine::PredictedTokens;

use crate::prompt_logprobs::PromptLogprobList;

/// The smallest log-probability to write; JSON has no minus infinity.
const SMALLEST_LOGPROB: f32 = -9999.0;

/// A token that could have been sampled, and the natural logarithm of its probability, which is
/// finite.
pub type Candidate = (i32, f32);

/// The log-probabilities of tokens in binary form: 8 bytes per candidate and 4 per token. They are
/// formatted only when they are written, so that a slow reader does not make text pile up.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logprobs {
    /// The candidates of all tokens, in order. Each token's candidates start with the sampled one,
    /// followed by the most likely ones in descending order.
    candidates: Vec<Candidate>,
    /// The end of each token's candidates in `candidates`.
    ends: Vec<u32>,
}

impl Logprobs {
    /// True if there are no log-probabilities.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Appends a token's candidates, the sampled one first. An empty list appends nothing.
    pub fn push(&mut self, candidates: &[Candidate]) {
        if candidates.is_empty() {
            return;
        }
        let finite = candidates.iter().map(|&(id, logprob)| (id, logprob.max(SMALLEST_LOGPROB)));
        self.candidates.extend(finite);
        self.end_token();
    }

    /// Iterates over the tokens: the sampled candidate of each, and the most likely ones.
    pub fn iter(&self) -> impl Iterator<Item = (Candidate, &[Candidate])> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(&self.ends).filter_map(|(start, &end)| {
            let (sampled, top) = self.candidates[start as usize..end as usize].split_first()?;
            Some((*sampled, top))
        })
    }

    fn end_token(&mut self) {
        // A response is bounded in bytes, far below 2^32 candidates.
        self.ends.push(u32::try_from(self.candidates.len()).unwrap_or(u32::MAX));
    }

    /// Returns the total number of candidates.
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

/// The approximate size in bytes of a log-probability as JSON: the token's text, the
/// log-probability, and the token's bytes as a list of numbers.
pub const LOGPROB_JSON: usize = 96;

/// The reason why a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub enum End {
    /// An end-of-sequence token was sampled.
    Eos(i32),
    /// A stop token that the client requested was sampled.
    Token(i32),
    /// A stop string was found in the text.
    Text(String),
    /// The only required tool call is complete.
    Call,
    /// The limit on the number of tokens was reached.
    Length,
    /// An error ended the choice.
    Error(ApiError),
}

/// The output of a choice since the last delta.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Delta {
    /// The new text. The text of some tokens may be held back.
    pub parts: Parts,
    /// The new tokens, including a stop token.
    pub tokens: Vec<i32>,
    /// The number of new tokens that are reasoning.
    pub reasoning_tokens: u32,
    /// The tokens of the predicted output that were verified.
    pub predicted: PredictedTokens,
    /// The log-probabilities of each of `tokens`, if requested.
    pub logprobs: Logprobs,
    /// The log-probabilities of the prompt's tokens, if requested. All of them arrive with the
    /// first token.
    pub prompt: PromptLogprobList,
    /// The number of prompt tokens found in the prefix cache; set with the first token.
    pub cached_tokens: Option<u32>,
    /// Why the choice ended; set in the last delta.
    pub end: Option<End>,
    /// True if the choice ended with a complete tool call, unless the client forced that call.
    pub called: bool,
}

impl Delta {
    /// Returns the choice's finish reason in OpenAI's format, for all responses, streamed or not.
    /// `None` before the end, and after an error.
    ///
    /// `length` takes precedence. Otherwise the reason is `tool_calls` or `stop`. It is `stop` if
    /// the client forced the call, as with OpenAI and vLLM (vLLM's #25054).
    pub fn finish_reason(&self) -> Option<&'static str> {
        match (self.end.as_ref()?, self.called) {
            (End::Error(_), _) => None,
            (End::Length, _) => Some("length"),
            (End::Eos(_) | End::Token(_) | End::Text(_) | End::Call, true) => Some("tool_calls"),
            (End::Eos(_) | End::Token(_) | End::Text(_) | End::Call, false) => Some("stop"),
        }
    }

    /// Clears the delta, and keeps the allocated memory.
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

    /// Appends a later delta and clears it.
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

    /// The approximate encoded size in bytes, and at least the size in memory. The prompt's
    /// log-probabilities are not included.
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
        /// The allocated memory in bytes.
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
        // As text, each of the 21 candidates would take two allocations and 56 bytes more, in all
        // 1.6 KB.
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
