//! The types of the HTTP API: requests with their validation, responses, and errors. It has no
//! server and no I/O.
//!
//! There are three dialects: OpenAI's chat completions and completions, with vLLM's common
//! extensions, and SGLang's native `/generate`. All three become one validated [`Generation`].
//! After that only the prompt's length is unchecked, which is known after the text is tokenised
//! ([`Generation::room`]). Models that make vectors and scores have routes of their own: OpenAI's
//! embeddings, Jina's and Cohere's rerank, and vLLM's score.
//!
//! ```
//! use forebay_api::{ApiError, ChatRequest, GenerationDefaults, Limits, parse_request};
//!
//! let limits = Limits {
//!     context_length: 4096,
//!     prompt_length: 4096,
//!     vocab_size: 32_000,
//!     replicas: 1,
//!     images: 0,
//! };
//! let body = br#"{"messages": [{"role": "user", "content": "Why?"}], "temperature": 0}"#;
//! let parsed = parse_request::<ChatRequest>(body, |_weight| Ok(()))?;
//! let chat = parsed.request.validate(&GenerationDefaults::default(), limits)?;
//! assert_eq!(chat.prompt.messages[0]["content"], "Why?");
//!
//! // A value over its limit is refused by its name, and nothing is made of it.
//! let body = br#"{"messages": [], "temperature": -1}"#;
//! let error = parse_request::<ChatRequest>(body, |_weight| Ok(())).unwrap_err();
//! assert!(matches!(error, ApiError::Invalid { param, .. } if param == "temperature"));
//! # Ok::<(), ApiError>(())
//! ```

mod access;
mod chat;
mod completions;
mod content;
mod cut;
mod embeddings;
mod embeds;
mod error;
mod generate;
mod images;
mod inert;
pub mod limits;
mod llama;
mod messages;
mod ollama;
mod openai;
mod parse;
pub mod peer;
mod preference;
mod prompt;
mod rerank;
mod response;
mod responses;
mod salt;
mod sampling;
mod structure;
mod table;
mod tokenize;
mod tools;
#[cfg(test)]
mod trial;
mod turns;

pub use access::{Access, is_from_own_page};
pub use chat::{
    ChatMessage, ChatPrompt, ChatRequest, ContentPart, Effort, MessageContent, ReasoningOutput,
    Rendering, ValidChat,
};
pub use completions::{CompletionPrompts, CompletionRequest, ValidCompletion};
pub use content::TextOr;
pub use embeddings::{
    Embedding, EmbeddingRequest, EmbeddingResponse, EncodingFormat, PoolingData, PoolingResponse,
    PoolingUsage, ValidEmbedding, Vector,
};
pub use embeds::{EmbeddedPrompt, PromptEmbeds};
pub use error::{ApiError, ErrorBody, ErrorObject};
pub use generate::{
    GenerateFinish, GenerateItem, GenerateMeta, GenerateOutput, GenerateRequest, GenerateSampling,
    LogprobTriple, OneOrMany, ValidGenerate,
};
pub use images::{ImagePart, ImageUrl};
pub use inert::{Choice, Inert};
pub use llama::{
    LlamaCompletion, LlamaEnd, LlamaProbability, LlamaRequest, LlamaSlot, LlamaTimings, ValidLlama,
};
pub use messages::MessagesRequest;
pub use ollama::{
    OllamaAsk, OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest, OllamaShowRequest,
};
pub use openai::{StreamOptions, Streaming, TokenOutput};
pub use parse::{Parsed, parse, parse_request};
pub use preference::preference;
pub use prompt::{Prompt, Prompts, Strings};
pub use rerank::{
    Document, Pairs, RerankDocument, RerankRequest, RerankResponse, RerankResult, ScoreData,
    ScoreRequest, ScoreResponse, ValidRerank,
};
pub use response::{
    ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatTokenLogprob,
    ChatTopLogprob, Completion, CompletionChoice, CompletionLogprobs, CompletionTokensDetails,
    FunctionCall, FunctionDelta, ModelCard, ModelList, PromptTokenLogprob, PromptTokenLogprobs,
    PromptTokensDetails, ResponseMessage, StopReason, ToolCall, ToolCallDelta, Usage,
};
pub use responses::{
    CUSTOM_INPUT, Item, ItemPart, ResponsesRequest, ToolKind, ValidResponses, sealed,
};
pub use sampling::{Generation, GenerationDefaults, Limits, MaxTokens, choice_seed};
pub use structure::{JsonSchemaFormat, ResponseFormat, Structure, StructuredOutputs};
pub use table::{ROUTES, RouteLimits};
pub use tokenize::{
    DetokenizeRequest, DetokenizeResponse, TokenPiece, TokenPieces, TokenizeInput, TokenizeRequest,
    TokenizeResponse, TokenizedTexts,
};
pub use tools::{CallDemand, Calls, OfferedTool, OfferedTools, TextForm};
