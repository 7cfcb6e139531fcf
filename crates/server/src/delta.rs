//! What is new in a choice.

use forebay_api::ApiError;

/// A token with its log-probabilities, as text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenLogprobs {
    /// The sampled token.
    pub(crate) sampled: Candidate,
    /// The most likely ones, descending.
    pub(crate) top: Vec<Candidate>,
}

/// A token that could have been sampled.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) id: i32,
    pub(crate) text: String,
    pub(crate) bytes: Vec<u8>,
    /// Natural logarithm, finite.
    pub(crate) logprob: f32,
}

/// What ended a choice.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum End {
    /// End-of-sequence was sampled.
    Eos(i32),
    /// A stop token of the client was sampled.
    Token(i32),
    /// A stop string was found.
    Text(String),
    /// As many tokens as asked for.
    Length,
    /// It was not served to its end.
    Error(ApiError),
}

/// What is new in a choice since the last delta.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Delta {
    /// New text. Some tokens' text may still be held back.
    pub(crate) text: String,
    /// New tokens, a stop token included.
    pub(crate) tokens: Vec<i32>,
    /// One a token of `tokens`, where asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// With the first token: prompt tokens found in the prefix cache.
    pub(crate) cached_tokens: Option<u32>,
    /// Set in the last delta.
    pub(crate) end: Option<End>,
}

impl Delta {
    /// Forgets what it holds and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.cached_tokens = None;
        self.end = None;
    }

    /// Adds what came later and leaves it empty.
    pub(crate) fn merge(&mut self, newer: &mut Self) {
        self.text.push_str(&newer.text);
        newer.text.clear();
        self.tokens.append(&mut newer.tokens);
        self.logprobs.append(&mut newer.logprobs);
        self.cached_tokens = self.cached_tokens.or(newer.cached_tokens.take());
        self.end = self.end.take().or(newer.end.take());
    }
}
