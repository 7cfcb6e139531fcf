//! The requests that a dataset consists of.

use std::time::Duration;

/// A request, independent of the kind of server.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkItem {
    /// The prompt.
    pub prompt: Prompt,
    /// Text tokens of the prompt by the client's tokenizer, without the chat template.
    pub text_tokens: u32,
    /// The number of tokens to generate; 0 for embeddings.
    pub output_tokens: u32,
    /// The time of arrival, from the start of the trace; `None`: the dataset is not a trace.
    pub arrival: Option<Duration>,
}

/// A prompt in one of the forms that servers accept.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Text; chat backends send it as one user message.
    Text(String),
    /// Token ids, for completions and /generate only.
    Tokens(Vec<u32>),
    /// One user message of several parts, for chat backends only.
    Parts(Vec<Part>),
    /// The inputs of one embeddings request.
    Inputs(Vec<String>),
}

/// A part of a chat message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text.
    Text(String),
    /// An image as a `data:` URL.
    Image(String),
}
