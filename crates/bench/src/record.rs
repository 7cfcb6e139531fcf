//! The record of a sent request. All times are microseconds from the start of the run.

/// One request, from its intended arrival to its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// The planned time of sending. In a closed loop, when another request ended.
    pub intended_us: u64,
    /// The time of the first written byte.
    pub sent_us: u64,
    /// When the last byte was read, or the request failed.
    pub end_us: u64,
    /// Pieces of the answer, each with the time of its read. The first piece with text is the first
    /// token.
    pub chunks: Vec<Chunk>,
    /// Prompt tokens, by the server's count, or by the client's if the server gives none.
    pub input_tokens: u32,
    /// The number of prompt tokens that are not text.
    pub vision_tokens: u32,
    /// Generated tokens, by the server's count, or the requested number if the server gives none.
    pub output_tokens: u32,
    /// The generated text.
    pub text: String,
    /// The end of the request: success or an error.
    pub outcome: Outcome,
}

/// A piece of a streamed answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The time of the chunk's read.
    pub at_us: u64,
    /// Bytes of text in the chunk.
    pub text_bytes: u32,
    /// Tokens in the chunk. If the server does not report them, they are computed after the run.
    pub tokens: u32,
}

/// The end of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The request ended well.
    #[default]
    Success,
    /// The request failed by an HTTP status other than 200, an error event, or a broken connection.
    /// The text is for display.
    Failed(String),
}
