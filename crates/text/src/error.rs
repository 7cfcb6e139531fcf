//! The one error type of this crate.

/// Why text could not be turned into tokens, or tokens into text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The text pool's queue is full: the caller should answer 429 and let the client try again.
    #[error("the tokeniser queue is full")]
    Busy,
    /// The text pool is gone.
    #[error("the text pool has shut down")]
    Closed,
    /// A chat was given, but the model has no chat template.
    #[error("this model has no chat template")]
    NoTemplate,
    /// The text could not be encoded.
    #[error("cannot encode the text: {0}")]
    Encode(String),
    /// The ids could not be decoded.
    #[error("cannot decode the token ids: {0}")]
    Decode(String),
    /// The chat template did not compile, did not render, or refused the messages. For a refusal
    /// (the template called `raise_exception`) this is the template author's message and nothing
    /// else.
    #[error("chat template: {0}")]
    Template(String),
    /// The chat template took more time, text or depth than a template may: it is the template that
    /// has to change, or the chat to be shorter.
    #[error("the chat template is too expensive for this chat: {0}")]
    Costly(String),
    /// The chat template looks at special tokens in content itself, so that they can't be told from
    /// its own.
    #[error(
        "the chat template treats the special tokens in this chat in a way of its own: leave them out, or have the server \
         started with --allow-special-tokens-in-content"
    )]
    Guarded,
    /// A text has more tokens than it may; it was not encoded, or not to its end.
    #[error("the text has at least {at_least} tokens, and {limit} may be")]
    TooLong {
        /// The index of the text among those that came together, from 0.
        text: usize,
        /// Tokens that it has at least.
        at_least: usize,
        /// Tokens that it may have.
        limit: usize,
    },
    /// The tokenizer file could not be read or is not a tokenizer.
    #[error("cannot load the tokenizer: {0}")]
    Load(String),
}
