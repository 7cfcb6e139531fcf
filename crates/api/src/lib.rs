//! The types of the HTTP API: requests with their validation, responses, and errors. The crate has
//! no server and does no I/O.
//!
//! Each API has a folder or file in `apis`: OpenAI's chat completions, completions and responses
//! with vLLM's common extensions, Anthropic's messages, and the APIs of Ollama, llama.cpp and
//! SGLang. Their requests become one validated [`Generation`]. After that, only the length of the
//! prompt is unchecked: it is known once the text is tokenised ([`Generation::room`]). Pooling
//! models have separate request types: OpenAI's embeddings, Jina's and Cohere's rerank, vLLM's
//! score and classify.
//!
//! A parameter is declared once. `parameter::generation` declares those that several APIs share,
//! each with its name, bound, description and target field. An API accepts such a parameter by a
//! line in its table. A single pass over a body reads it according to the table.
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
//! // A value over its limit is refused with the parameter's name.
//! let body = br#"{"messages": [], "temperature": -1}"#;
//! let error = parse_request::<ChatRequest>(body, |_weight| Ok(())).unwrap_err();
//! assert!(matches!(error, ApiError::Invalid { param, .. } if param == "temperature"));
//! # Ok::<(), ApiError>(())
//! ```

mod access;
mod apis;
mod chat;
mod content;
mod cut;
mod embeds;
mod error;
mod gzip;
mod images;
mod inert;
pub mod limits;
mod parameter;
mod parse;
pub mod peer;
mod pooling;
mod preference;
mod prompt;
mod response;
mod salt;
mod sampling;
mod scan;
mod structure;
mod tools;
#[cfg(test)]
mod trial;
mod turns;
mod url;

pub use access::{Access, is_from_own_page};
pub use apis::anthropic::MessagesRequest;
pub use apis::classify::{ClassifyData, ClassifyRequest, ClassifyResponse};
pub use apis::llama::{
    LlamaCompletion, LlamaEnd, LlamaProbability, LlamaRequest, LlamaSlot, LlamaTimings, ValidLlama,
};
pub use apis::ollama::{
    OllamaAsk, OllamaChatRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest,
    OllamaGenerateRequest, OllamaShowRequest,
};
pub use apis::openai::{
    ChatRequest, CompletionPrompts, CompletionRequest, Embedding, EmbeddingRequest,
    EmbeddingResponse, EncodingFormat, PoolingData, PoolingResponse, ValidCompletion,
    ValidEmbedding, Vector,
};
pub use apis::ranking::{
    Document, Pairs, RerankDocument, RerankRequest, RerankResponse, RerankResult, ScoreData,
    ScoreRequest, ScoreResponse, ValidRerank,
};
pub use apis::responses::{
    CUSTOM_INPUT, Item, ItemPart, ResponsesRequest, ToolKind, ValidResponses, sealed,
};
pub use apis::router::RegistrationRequest;
pub use apis::sglang::{
    GenerateFinish, GenerateItem, GenerateMeta, GenerateOutput, GenerateRequest, LogprobTriple,
    ValidGenerate,
};
pub use apis::tokens::{
    DetokenizeRequest, DetokenizeResponse, TokenPiece, TokenPieces, TokenizeInput, TokenizeRequest,
    TokenizeResponse, TokenizedTexts,
};
pub use apis::{ROUTES, RouteLimits};
pub use chat::{
    ChatPrompt, Effort, EffortParams, ReasoningOutput, Streaming, TokenOutput, ValidChat,
};
pub use content::TextOr;
pub use embeds::{EmbeddedPrompt, PromptEmbeds};
pub use error::{ApiError, ErrorBody, ErrorObject};
pub use gzip::Inflater;
pub use images::{ImagePart, ImageUrl};
pub use parameter::Field;
pub use parameter::generation::GenerationDefaults;
pub use parse::{ParsedRequest, parse_request};
pub use pooling::PoolingUsage;
pub use preference::preference;
pub use prompt::{Prompt, Prompts, Strings};
pub use response::{
    ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatTokenLogprob,
    ChatTopLogprob, Completion, CompletionChoice, CompletionLogprobs, CompletionTokensDetails,
    FunctionCall, FunctionDelta, ModelCard, ModelList, PromptTokenLogprob, PromptTokenLogprobs,
    PromptTokensDetails, ResponseMessage, StopReason, ToolCall, ToolCallDelta, Usage,
};
pub use sampling::{Generation, Limits, MaxTokens, choice_seed};
pub use scan::{Members, members, plain_string};
pub use structure::Structure;
pub use tools::{CallDemand, Calls, OfferedTool, OfferedTools, TextForm};
pub use url::{BackendUrl, UrlError};
