//! The record of a sent request. All times are microseconds from the start of the run.

/// A request and its response, from the intended arrival to the end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// The planned time of sending. In a closed loop: the time at which another request ended and
    /// so made room for this one.
    pub intended_us: u64,
    /// The time at which sending began, which includes the set-up of a new connection if one was
    /// needed.
    pub sent_us: u64,
    /// The time at which the last byte was read, or the request failed.
    pub end_us: u64,
    /// The chunks of the response, each with the time at which it was read. The first chunk with
    /// text counts as the first token.
    pub chunks: Vec<Chunk>,
    /// Prompt tokens, by the server's count, or by the client's if the server reports none.
    pub input_tokens: u32,
    /// The number of prompt tokens that are not text.
    pub vision_tokens: u32,
    /// Generated tokens, by the server's count, or the requested number if the server reports none.
    pub output_tokens: u32,
    /// The generated text.
    pub text: String,
    /// The outcome of the request: success or an error.
    pub outcome: Outcome,
}

/// A chunk of a streamed response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The time at which the chunk was read.
    pub at_us: u64,
    /// Bytes of text in the chunk.
    pub text_bytes: u32,
    /// Tokens in the chunk. If the server does not report this number, it is computed after the
    /// run.
    pub tokens: u32,
}

/// The outcome of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The request succeeded.
    #[default]
    Success,
    /// The request failed, by an HTTP status other than 200, an error event, or a broken
    /// connection. The error message is for display.
    Failed(String),
}
