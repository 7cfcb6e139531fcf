//! The record of a request that was sent. All times are microseconds from the start of the run.

/// One request, from its intended arrival to its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Record {
    /// The time at which the schedule wanted it sent. In a closed loop, that is the time at which a
    /// place became free.
    pub intended_us: u64,
    /// The time at which the first byte was written.
    pub sent_us: u64,
    /// The time at which the last byte was read, or the request failed.
    pub end_us: u64,
    /// Pieces of the answer, each with the time at which it was read. The first that has text marks
    /// the first token.
    pub chunks: Vec<Chunk>,
    /// Prompt tokens: the server's count, or the client's where the server gives none.
    pub input_tokens: u32,
    /// Of these, tokens that are not text.
    pub vision_tokens: u32,
    /// Generated tokens: the server's count, or what was asked for where it gives none.
    pub output_tokens: u32,
    /// The generated text.
    pub text: String,
    /// The end of the request: success or an error.
    pub outcome: Outcome,
}

/// A piece of a streamed answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The time at which the chunk was read.
    pub at_us: u64,
    /// Bytes of text it brought.
    pub text_bytes: u32,
    /// Tokens it brought; known after the run for servers that do not say.
    pub tokens: u32,
}

/// The end of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Completely.
    #[default]
    Success,
    /// With an HTTP status other than 200, an error event, or a broken connection; the text is for
    /// people.
    Failed(String),
}
