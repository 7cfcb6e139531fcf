//! The error type of this crate.

/// The reason for which text could not become tokens, or tokens text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The text pool's queue is full. The caller should answer 429, so that the client tries again.
    #[error("the tokeniser queue is full")]
    Busy,
    /// The text pool has ended.
    #[error("the text pool has shut down")]
    Closed,
    /// The input is a chat, but the model has no chat template.
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
    /// The chat template took too much time, text or depth. A simpler template or a shorter chat is
    /// needed.
    #[error("the chat template is too expensive for this chat: {0}")]
    Costly(String),
    /// The process that renders chats could not be started, or did not answer.
    #[error("the process that renders chats failed: {0}")]
    Renderer(String),
    /// The chat template reads special tokens in content itself, so that they can't be
    /// distinguished from its own.
    #[error(
        "the chat template treats the special tokens in this chat in a way of its own: leave them out, or have the server \
         started with --allow-special-tokens-in-content"
    )]
    Guarded,
    /// A text has too many tokens. It was not encoded, or not to its end.
    #[error("the text has at least {at_least} tokens, and {limit} may be")]
    TooLong {
        /// The index of the text in its request, from 0.
        text: usize,
        /// The least number of tokens that the text has.
        at_least: usize,
        /// The largest number of tokens of a text.
        limit: usize,
    },
    /// A text is too long in one place to be encoded in parts, and was not encoded.
    #[error("the text has a word, or white space, of {bytes} bytes, and {limit} may be in one")]
    Undivided {
        /// Bytes without a place at which the text may be divided.
        bytes: usize,
        /// The largest number of such bytes.
        limit: usize,
    },
    /// The tokenizer file could not be read or is not a tokenizer.
    #[error("cannot load the tokenizer: {0}")]
    Load(String),
}
