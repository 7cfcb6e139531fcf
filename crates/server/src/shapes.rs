//! Error formats, which differ by API.

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, Uri};
use axum::middleware::Next;
use axum::response::Response;
use forebay_api::ApiError;
use serde_json::{Value, json};

use crate::reply::ReplyError;

/// The API whose error format a client expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Shape {
    fn of(uri: &Uri) -> Self {
        match uri.path() {
            path if path == "/v1/messages" || path.starts_with("/v1/messages/") => Self::Anthropic,
            path if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }
}

/// Runs a request. Converts an error response to the error format of the route's API.
pub(crate) async fn tell_errors(request: Request, next: Next) -> Response {
    let shape = Shape::of(request.uri());
    let mut response = next.run(request).await;
    let Some(ReplyError(error)) = response.extensions_mut().remove::<ReplyError>() else {
        return response;
    };
    let body = match shape {
        Shape::OpenAi => return response,
        Shape::Anthropic => anthropic(&error),
        Shape::Ollama => ollama(&error),
    };
    let headers = response.headers_mut();
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    *response.body_mut() = Body::from(body.to_string());
    response
}

/// Formats an error for Anthropic's API.
pub(crate) fn anthropic(error: &ApiError) -> Value {
    let kind = match error.status() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    let message = match error {
        // Anthropic's clients recognise this text, and shorten the conversation. A prompt has to
        // leave room for one token.
        ApiError::ContextLength { prompt, limit, .. } => {
            format!("prompt is too long: {prompt} tokens > {} maximum", limit.saturating_sub(1))
        }
        ApiError::TextTooLong { at_least, limit, .. } => {
            format!("prompt is too long: {at_least} tokens > {limit} maximum")
        }
        error => error.body().error.message,
    };
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

/// Formats an error for Ollama's API.
pub(crate) fn ollama(error: &ApiError) -> Value {
    json!({"error": error.body().error.message})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anthropic_s_kinds_are_those_of_the_status() {
        let kind = |error: ApiError| anthropic(&error)["error"]["type"].clone();
        assert_eq!(kind(ApiError::Unauthorized), "authentication_error");
        assert_eq!(kind(ApiError::invalid("a", "b")), "invalid_request_error");
        assert_eq!(kind(ApiError::Draining), "overloaded_error");
        assert_eq!(kind(ApiError::BackendDied { deaths: 2 }), "api_error");
    }

    #[test]
    fn a_prompt_beyond_the_context_is_told_in_anthropic_s_words() {
        let told = |error: ApiError| anthropic(&error)["error"]["message"].clone();
        let (param, limit) = ("messages", 100);
        for (prompt, max_tokens) in [(100, None), (170, Some(5))] {
            let expected = format!("prompt is too long: {prompt} tokens > 99 maximum");
            assert_eq!(
                told(ApiError::ContextLength { param, limit, prompt, max_tokens }),
                expected
            );
        }
        let error = ApiError::TextTooLong { param: "messages".into(), limit: 100, at_least: 333 };
        assert_eq!(told(error), "prompt is too long: 333 tokens > 100 maximum");
    }

    #[test]
    fn routes_have_the_shape_of_their_api() {
        for (path, shape) in [
            ("/v1/messages", Shape::Anthropic),
            ("/v1/messages/batches", Shape::Anthropic),
            ("/v1/messagesx", Shape::OpenAi),
            ("/api/chat", Shape::Ollama),
            ("/v1/models", Shape::OpenAi),
        ] {
            assert_eq!(Shape::of(&path.parse().expect("a path")), shape, "{path}");
        }
    }
}
