//! All errors that clients receive, in the format of OpenAI's API.

use forebay_fair::Refusal;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use crate::cut::cut;

/// The largest size of an error message in bytes. Some messages quote the client.
const MESSAGE_BYTES: usize = 1024;
/// The largest size of a parameter's path in bytes.
const PARAM_BYTES: usize = 256;

/// The reason for an error response.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ApiError {
    /// The body is not valid JSON.
    #[error("the request body is not valid JSON: {reason} at line {line} column {column}")]
    MalformedJson {
        /// The syntax that the parser expected.
        reason: String,
        /// The line, counted from 1.
        line: usize,
        /// The column, counted from 1.
        column: usize,
    },
    /// The body is not valid UTF-8.
    #[error("the request body is not valid UTF-8 at byte {offset}")]
    InvalidUtf8 {
        /// The number of bytes before the first invalid one.
        offset: usize,
    },
    /// The connection broke or the framing was wrong while the body was read.
    #[error("the request body could not be read: {reason}")]
    BrokenBody {
        /// The error message of the transport.
        reason: String,
    },
    /// A parameter is missing, or its type or value is wrong.
    #[error("{reason}")]
    Invalid {
        /// Path of the parameter, as in `messages[0].content`.
        param: String,
        /// Why the parameter is invalid.
        reason: String,
    },
    /// The parameter is known, but this server does not support it.
    #[error("`{param}` is not supported yet")]
    Unsupported {
        /// Path of the parameter.
        param: String,
    },
    /// The prompt and the requested tokens do not fit into the context.
    #[error("{}", context_message(*.limit, *.prompt, *.max_tokens))]
    ContextLength {
        /// The parameter with the prompt.
        param: &'static str,
        /// The largest number of positions of a request.
        limit: u32,
        /// The number of tokens of the prompt.
        prompt: usize,
        /// The requested number of tokens, or `None` if the client gave none.
        max_tokens: Option<u32>,
    },
    /// A text has too many tokens. The encoder stopped before the end of the text.
    #[error(
        "This model's maximum context length is {limit} tokens. However, `{param}` has at least {at_least}. \
         Please reduce the length of the text."
    )]
    TextTooLong {
        /// Path of the parameter with the text.
        param: String,
        /// The largest number of tokens that the text may have.
        limit: usize,
        /// The least number of tokens that the text has, counted until the encoder stopped.
        at_least: usize,
    },
    /// An input of a pooling request, which generates nothing, exceeds the context.
    #[error(
        "This model's maximum context length is {limit} tokens. However, `{param}` has {tokens}. \
         Please cut it, or let the server do so with `truncate_prompt_tokens`."
    )]
    InputTooLong {
        /// Path of the parameter with the input.
        param: String,
        /// The largest number of positions of an input.
        limit: u32,
        /// The number of tokens of the input.
        tokens: usize,
    },
    /// No model has this name.
    #[error("The model `{model}` does not exist. This server has {}.", quoted(.served))]
    UnknownModel {
        /// The model's name, as the client wrote it.
        model: String,
        /// The names that requests may use.
        served: Vec<String>,
    },
    /// No stored response contains this item.
    #[error(
        "`{param}`: no item `{item}` is kept: its response was not stored, or is deleted or too old."
    )]
    UnknownItem {
        /// The item's id, as the client wrote it.
        item: String,
        /// The path of the parameter with the id.
        param: String,
    },
    /// No stored response has this id, or it was removed.
    #[error(
        "No response `{response}` is kept: it was not stored, or is deleted, too old, or was the oldest when room was needed."
    )]
    UnknownResponse {
        /// The response's id, as the client wrote it.
        response: String,
        /// The parameter with the id; `None` if the id is in the URL's path.
        param: Option<&'static str>,
    },
    /// No request has this id, or its timestamps are no longer kept.
    #[error(
        "Request `{id}` is unknown: it never existed, or is too old (only the last requests are kept)."
    )]
    UnknownRequest {
        /// The request's id, as the client wrote it.
        id: String,
    },
    /// The client has no stored object with this name, or the server stores no objects of this
    /// kind.
    #[error("{reason}")]
    NotKept {
        /// The reason, in one line.
        reason: String,
        /// A machine-readable code.
        code: &'static str,
    },
    /// The operation conflicts with the current state: another operation is running, or an earlier
    /// one has to be undone first.
    #[error("{reason}")]
    Conflict {
        /// The reason, in one line.
        reason: String,
    },
    /// The API key is missing or wrong.
    #[error("Incorrect API key provided; send it as `Authorization: Bearer KEY`.")]
    Unauthorized,
    /// The request comes from a host or web page that is not allowed.
    #[error("{reason}")]
    Forbidden {
        /// The reason, in one line, with the name of the flag.
        reason: String,
        /// A machine-readable code.
        code: &'static str,
    },
    /// A browser sent the body with a content type that web pages can send without a CORS
    /// preflight.
    #[error("a request from a browser needs `Content-Type: application/json`")]
    UnsupportedMediaType,
    /// The body has a content encoding that is not supported.
    #[error("`Content-Encoding: {encoding}` is not supported: send gzip, or the body as it is")]
    UnsupportedEncoding {
        /// The value of the header.
        encoding: String,
    },
    /// No route has this path.
    #[error("Unknown request URL: {method} {path}. {}/openapi.json lists the routes.", hint(.near))]
    UnknownRoute {
        /// The HTTP method.
        method: String,
        /// The path of the URL.
        path: String,
        /// The path of the most similar route, which the client probably meant.
        near: Option<String>,
    },
    /// The route does not support this method.
    #[error("Not allowed to {method} on {path}. /openapi.json lists the routes.")]
    MethodNotAllowed {
        /// The HTTP method.
        method: String,
        /// The path of the URL.
        path: String,
    },
    /// Other servers have this route, but this one has no counterpart.
    #[error("{reason}")]
    NotImplemented {
        /// The replacement for the route, in one line.
        reason: String,
    },
    /// The body is larger than the limit.
    #[error("the request body is larger than the limit of {limit} bytes ({flag})")]
    BodyTooLarge {
        /// The limit in bytes.
        limit: usize,
        /// The flag that sets the limit, directly or indirectly.
        flag: &'static str,
    },
    /// The request needs more memory than the limit for all requests together.
    #[error(
        "the request needs about {bytes} bytes, and all requests together have {limit}: \
         --max-request-bytes-in-flight makes that more"
    )]
    RequestTooLarge {
        /// The bytes that the request needs.
        bytes: usize,
        /// The limit in bytes for all requests together.
        limit: usize,
    },
    /// The embeddings of a prompt are larger than the arena.
    #[error(
        "`{param}` needs {bytes} bytes of the arena, which has {limit}: --arena-bytes makes it larger"
    )]
    PayloadTooLarge {
        /// The parameter with the embeddings.
        param: &'static str,
        /// The bytes that the request needs.
        bytes: usize,
        /// The size of the arena in bytes.
        limit: usize,
    },
    /// The client has left more unread bytes of a response than the server buffers.
    #[error(
        "more than {limit} bytes of the answer wait to be read: read faster, ask for less, or have it streamed \
         (--max-unread-bytes allows more)"
    )]
    AnswerTooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// The body did not arrive in time.
    #[error("the request body did not arrive within {seconds} seconds")]
    BodyTimeout {
        /// The limit in seconds.
        seconds: u64,
    },
    /// A bounded queue in front of the device is full.
    #[error("the server is overloaded, try again later: {reason}")]
    Overloaded {
        /// Which queue is full.
        reason: String,
    },
    /// The waiting queue is full, or this client's share of the queue is.
    #[error("the server is overloaded, try again later: {reason}")]
    QueueFull {
        /// The reason, in one line.
        reason: String,
        /// Seconds after which the client may try again.
        retry_after: u32,
    },
    /// The request waited too long in the queue.
    #[error("{reason}")]
    QueueTimeout {
        /// The reason, in one line.
        reason: String,
        /// Seconds after which the client may try again.
        retry_after: u32,
    },
    /// The server is shutting down.
    #[error("the server is shutting down and takes no new requests")]
    Draining,
    /// The model is not available: it is loading, recovering or failed.
    #[error("{reason}")]
    Unavailable {
        /// The reason, in one line.
        reason: String,
        /// The engine's state, as a machine-readable code.
        code: &'static str,
    },
    /// Backends of a router died while they computed the request. The request may be the cause.
    #[error(
        "{deaths} servers died while they computed this request. It may be the cause, so it is not retried"
    )]
    BackendDied {
        /// The number of backends that died while they computed the request.
        deaths: u8,
    },
    /// A backend of a router sent a response that cannot be forwarded.
    #[error("{reason}")]
    BadAnswer {
        /// The reason, in one line.
        reason: String,
        /// A machine-readable code.
        code: &'static str,
    },
    /// A backend of a router did not respond in time.
    #[error("{reason}")]
    BackendTimeout {
        /// The reason, in one line.
        reason: String,
    },
    /// The server aborted the request.
    #[error("the request was aborted by the server before it was finished")]
    Aborted,
    /// The prefix cache is in use, and can be flushed only while no request runs.
    #[error("requests are running, the cache was not flushed")]
    CacheInUse,
    /// The server failed.
    #[error("{reason}")]
    Internal {
        /// The reason, in one line.
        reason: String,
        /// A machine-readable code.
        code: Option<&'static str>,
    },
}

/// Joins the names for a sentence, each in backquotes.
fn quoted(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "no model".to_owned() } else { names.join(", ") }
}

/// Returns a question that suggests a similar path.
fn hint(near: &Option<String>) -> String {
    near.as_ref().map_or_else(String::new, |near| format!("Did you mean {near}? "))
}

fn context_message(limit: u32, prompt: usize, max_tokens: Option<u32>) -> String {
    let head = format!("This model's maximum context length is {limit} tokens. However,");
    match max_tokens {
        Some(new) => format!(
            "{head} you requested {} tokens ({prompt} in the prompt, {new} in the completion). \
             Please reduce the length of the prompt or the completion.",
            prompt as u64 + u64::from(new)
        ),
        None => format!(
            "{head} your prompt has {prompt} tokens, which leaves no room for a completion. \
             Please reduce the length of the prompt."
        ),
    }
}

impl ApiError {
    /// Creates the error for a parameter with an invalid value.
    pub fn invalid(param: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), reason: reason.into() }
    }

    /// Creates the error for a known parameter that is not supported.
    pub fn unsupported(param: impl Into<String>) -> Self {
        Self::Unsupported { param: param.into() }
    }

    /// Renames the parameter in the error's path and message.
    pub(crate) fn renamed(self, rename: impl Fn(&str) -> String) -> Self {
        match self {
            Self::Invalid { param, reason } => {
                Self::Invalid { param: rename(&param), reason: rename(&reason) }
            }
            Self::Unsupported { param } => Self::Unsupported { param: rename(&param) },
            other => other,
        }
    }

    /// Returns the HTTP status code.
    pub fn status(&self) -> u16 {
        match self {
            Self::MalformedJson { .. }
            | Self::InvalidUtf8 { .. }
            | Self::BrokenBody { .. }
            | Self::Invalid { .. }
            | Self::Unsupported { .. }
            | Self::ContextLength { .. }
            | Self::InputTooLong { .. }
            | Self::TextTooLong { .. }
            | Self::CacheInUse => 400,
            Self::Unauthorized => 401,
            Self::Forbidden { .. } => 403,
            Self::UnknownModel { .. }
            | Self::UnknownResponse { .. }
            | Self::UnknownItem { .. }
            | Self::UnknownRequest { .. }
            | Self::NotKept { .. }
            | Self::UnknownRoute { .. } => 404,
            Self::MethodNotAllowed { .. } => 405,
            Self::BodyTimeout { .. } => 408,
            Self::Conflict { .. } => 409,
            Self::BodyTooLarge { .. }
            | Self::RequestTooLarge { .. }
            | Self::PayloadTooLarge { .. }
            | Self::AnswerTooLarge { .. } => 413,
            Self::UnsupportedMediaType | Self::UnsupportedEncoding { .. } => 415,
            Self::Overloaded { .. } | Self::QueueFull { .. } => 429,
            Self::Internal { .. } => 500,
            Self::NotImplemented { .. } => 501,
            Self::BackendDied { .. } | Self::BadAnswer { .. } => 502,
            Self::BackendTimeout { .. } => 504,
            Self::Draining
            | Self::Unavailable { .. }
            | Self::QueueTimeout { .. }
            | Self::Aborted => 503,
        }
    }

    /// The seconds after which a client may try again, for the `Retry-After` header.
    pub fn retry_after(&self) -> Option<u32> {
        match self {
            Self::QueueFull { retry_after, .. } | Self::QueueTimeout { retry_after, .. } => {
                Some(*retry_after)
            }
            Self::Overloaded { .. } | Self::Draining | Self::Unavailable { .. } => Some(1),
            _ => None,
        }
    }

    /// Returns the type of the error in OpenAI's API.
    fn kind(&self) -> &'static str {
        match self.status() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500 | 502 | 504 => "server_error",
            503 => "service_unavailable_error",
            _ => "invalid_request_error",
        }
    }

    fn param(&self) -> Option<String> {
        match self {
            Self::Invalid { param, .. }
            | Self::Unsupported { param }
            | Self::InputTooLong { param, .. }
            | Self::TextTooLong { param, .. }
            | Self::UnknownItem { param, .. } => Some(param.clone()),
            Self::ContextLength { param, .. } | Self::PayloadTooLarge { param, .. } => {
                Some((*param).to_owned())
            }
            Self::UnknownModel { .. } => Some("model".to_owned()),
            Self::UnknownResponse { param, .. } => param.map(str::to_owned),
            _ => None,
        }
    }

    fn code(&self) -> Option<&'static str> {
        match self {
            Self::MalformedJson { .. } => Some("malformed_json"),
            Self::InvalidUtf8 { .. } => Some("invalid_utf8"),
            Self::BrokenBody { .. } => Some("broken_body"),
            Self::Invalid { .. } => Some("invalid_value"),
            Self::Unsupported { .. } => Some("unsupported_parameter"),
            Self::ContextLength { .. } | Self::InputTooLong { .. } | Self::TextTooLong { .. } => {
                Some("context_length_exceeded")
            }
            Self::UnknownModel { .. } => Some("model_not_found"),
            Self::UnknownResponse { .. } => Some("response_not_found"),
            Self::UnknownItem { .. } => Some("item_not_found"),
            Self::UnknownRequest { .. } => Some("request_not_found"),
            Self::Unauthorized => Some("invalid_api_key"),
            Self::Forbidden { code, .. } | Self::NotKept { code, .. } => Some(code),
            Self::Conflict { .. } => Some("conflict"),
            Self::UnsupportedMediaType => Some("unsupported_media_type"),
            Self::UnsupportedEncoding { .. } => Some("unsupported_encoding"),
            Self::UnknownRoute { .. } => Some("unknown_url"),
            Self::MethodNotAllowed { .. } => Some("method_not_allowed"),
            Self::NotImplemented { .. } => Some("not_implemented"),
            Self::BodyTooLarge { .. } => Some("body_too_large"),
            Self::RequestTooLarge { .. } => Some("request_too_large"),
            Self::PayloadTooLarge { .. } => Some("payload_too_large"),
            Self::AnswerTooLarge { .. } => Some("answer_too_large"),
            Self::BodyTimeout { .. } => Some("body_timeout"),
            Self::Overloaded { .. } | Self::QueueFull { .. } => Some("queue_full"),
            Self::QueueTimeout { .. } => Some("queue_timeout"),
            Self::Draining => Some("draining"),
            Self::Unavailable { code, .. } | Self::BadAnswer { code, .. } => Some(code),
            Self::BackendDied { .. } => Some("backend_died_twice"),
            Self::BackendTimeout { .. } => Some("timeout"),
            Self::Aborted => Some("aborted"),
            Self::CacheInUse => Some("cache_in_use"),
            Self::Internal { code, .. } => *code,
        }
    }

    /// Returns the body of the error response.
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            error: ErrorObject {
                message: cut(&self.to_string(), MESSAGE_BYTES).into_owned(),
                kind: self.kind().to_owned(),
                param: self.param().map(|param| cut(&param, PARAM_BYTES).into_owned()),
                code: self.code().map(str::to_owned),
            },
        }
    }
}

impl From<Refusal> for ApiError {
    /// Converts the refusal of memory for a request.
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::TooLarge { bytes, limit } => Self::RequestTooLarge { bytes, limit },
            Refusal::Full { all, own, more, limit } => {
                let reason = format!(
                    "requests in flight take {all} of {limit} bytes (--max-request-bytes-in-flight), \
                     {own} of them for this client. While others are active, a client gets at most \
                     half, and this request needs {more} more"
                );
                Self::Overloaded { reason }
            }
        }
    }
}

/// The body of an error response, or of an error event in a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// The parts of an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorObject {
    /// The message for people.
    pub message: String,
    /// OpenAI's class of the error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Path of the parameter at fault.
    pub param: Option<String>,
    /// The code for programs.
    pub code: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_has_openai_shape() {
        let body = serde_json::to_value(ApiError::unsupported("tools").body()).unwrap();
        assert_eq!(
            body,
            serde_json::json!({"error": {
                "message": "`tools` is not supported yet",
                "type": "invalid_request_error",
                "param": "tools",
                "code": "unsupported_parameter",
            }})
        );
    }

    #[test]
    fn a_refusal_says_whether_to_come_again() {
        let never = ApiError::from(Refusal::TooLarge { bytes: 800, limit: 700 });
        assert_eq!((never.status(), never.retry_after()), (413, None));
        let later = ApiError::from(Refusal::Full { all: 700, own: 400, more: 1, limit: 700 });
        assert_eq!((later.status(), later.retry_after()), (429, Some(1)));
        for error in [never, later] {
            assert!(error.to_string().contains("--max-request-bytes-in-flight"), "{error}");
        }
    }

    #[test]
    fn context_length_names_the_numbers() {
        let error = ApiError::ContextLength {
            param: "messages",
            limit: 100,
            prompt: 90,
            max_tokens: Some(u32::MAX),
        };
        let message = error.to_string();
        assert!(message.starts_with("This model's maximum context length is 100 tokens. However,"));
        assert!(
            message.contains("4294967385 tokens (90 in the prompt, 4294967295 in the completion)")
        );
    }
}
