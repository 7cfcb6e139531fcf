//! The types of the HTTP API: requests with their validation, responses, and errors. It has no
//! server and no I/O.
//!
//! Each API has a folder in `apis`: OpenAI's chats and completions with vLLM's common extensions,
//! OpenAI's responses, Anthropic's messages, Ollama's, llama.cpp's and SGLang's. Their requests
//! become one validated [`Generation`]. After that only the prompt's length is unchecked, which is
//! known after the text is tokenised ([`Generation::room`]). Models that make vectors and scores
//! have requests of their own: OpenAI's embeddings, Jina's and Cohere's rerank, vLLM's score and
//! classify.
//!
//! A parameter is declared once: `parameter::generation` has those that several APIs share, with
//! name, bound, description and target field. An API accepts one by a line in its table. One pass
//! over a body reads it by the table.
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
