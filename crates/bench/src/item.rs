//! The requests that a dataset gives.

use std::time::Duration;

/// A request, in a form that suits every kind of server.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkItem {
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens of the prompt's text by the client's tokenizer, without the chat template.
    pub text_tokens: u32,
    /// Tokens to generate; 0 for embeddings.
    pub output_tokens: u32,
    /// The time of arrival, from the start of the trace.
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
    /// A `data:` address of an image.
    Image(String),
}
