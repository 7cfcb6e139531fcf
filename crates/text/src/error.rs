//! The error type of this crate.

/// Why text could not be encoded, or tokens could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The text pool's queue is full. The server should respond with 429, so that the client tries
    /// again.
    #[error("the tokeniser queue is full")]
    Busy,
    /// The text pool was shut down.
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
    /// The chat template did not compile, failed, or rejected the messages. If the template
    /// rejected them (`raise_exception`), this is only the message of the template's author.
    #[error("chat template: {0}")]
    Template(String),
    /// Rendering the chat template exceeded a limit on time, output or depth. A simpler template or
    /// a shorter chat may work.
    #[error("the chat template is too expensive for this chat: {0}")]
    Costly(String),
    /// The process that renders chats could not be started, or did not respond.
    #[error("the process that renders chats failed: {0}")]
    Renderer(String),
    /// The chat template interprets special tokens in content, so these cannot be distinguished
    /// from the template's own tokens.
    #[error(
        "a message contains special tokens, which this chat template can't keep as plain text: leave them out, or start the \
         server with --allow-special-tokens-in-content"
    )]
    Guarded,
    /// A text has too many tokens. It was not encoded, or only partly.
    #[error("the text has at least {at_least} tokens; at most {limit} are allowed")]
    TooLong {
        /// The index of the text in its request, from 0.
        text: usize,
        /// A lower bound on the number of tokens of the text.
        at_least: usize,
        /// The largest number of tokens that a text may have.
        limit: usize,
    },
    /// A text contains a run that is too long and cannot be cut. The text was not encoded.
    #[error(
        "the text has a word, or a run of white space, of {bytes} bytes; at most {limit} are allowed"
    )]
    Undivided {
        /// The number of bytes without a position for a cut.
        bytes: usize,
        /// The largest number of bytes that may have no position for a cut.
        limit: usize,
    },
    /// The tokenizer file could not be read or is not a tokenizer.
    #[error("cannot load the tokenizer: {0}")]
    Load(String),
}
