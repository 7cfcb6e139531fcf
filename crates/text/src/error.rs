//! The error type of this crate.

/// Why text could not be encoded, or tokens not decoded.
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
    /// The chat template did not compile, did not render, or refused the messages. If the template
    /// refused (`raise_exception`), this is only the template author's message.
    #[error("chat template: {0}")]
    Template(String),
    /// Rendering the chat template exceeded a limit on time, text or depth. Use a simpler template
    /// or a shorter chat.
    #[error("the chat template is too expensive for this chat: {0}")]
    Costly(String),
    /// The process that renders chats could not be started, or did not answer.
    #[error("the process that renders chats failed: {0}")]
    Renderer(String),
    /// The chat template itself interprets special tokens in content, so they can't be told from
    /// its own.
    #[error(
        "the chat template treats the special tokens in this chat in a way of its own: leave them out, or have the server \
         started with --allow-special-tokens-in-content"
    )]
    Guarded,
    /// A text has too many tokens. It was not encoded, or only in part.
    #[error("the text has at least {at_least} tokens, and {limit} may be")]
    TooLong {
        /// The index of the text in its request, from 0.
        text: usize,
        /// A lower bound on the text's tokens.
        at_least: usize,
        /// The largest number of tokens of a text.
        limit: usize,
    },
    /// A text cannot be encoded in parts, because it is too long at one place. It was not encoded.
    #[error("the text has a word, or white space, of {bytes} bytes, and {limit} may be in one")]
    Undivided {
        /// The number of bytes without a place to divide the text.
        bytes: usize,
        /// The largest number of such bytes.
        limit: usize,
    },
    /// The tokenizer file could not be read or is not a tokenizer.
    #[error("cannot load the tokenizer: {0}")]
    Load(String),
}
