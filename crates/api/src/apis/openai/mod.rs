//! OpenAI's API: chat completions, completions and embeddings.

mod chat;
mod completions;
mod conversation;
mod embeddings;
mod shared;

pub use chat::ChatRequest;
#[cfg(test)]
pub(crate) use chat::{REASONING, ReasoningRequest};
pub use completions::{CompletionPrompts, CompletionRequest, ValidCompletion};
pub(crate) use conversation::{ChatMessage, MESSAGE, Rendering, chat_prompt};
#[cfg(test)]
pub(crate) use conversation::{ContentPart, PART};
pub use embeddings::{
    Embedding, EmbeddingRequest, EmbeddingResponse, EncodingFormat, PoolingData, PoolingResponse,
    ValidEmbedding, Vector,
};
#[cfg(test)]
pub(crate) use shared::{STREAM_OPTIONS, StreamOptions};
