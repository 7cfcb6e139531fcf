//! Limits and helper functions for tests of requests.

use serde_json::Value;

use crate::limits::Limited;
use crate::{ApiError, Limits, parse_request};

/// The limits of a small server.
pub(crate) const LIMITS: Limits =
    Limits { context_length: 100, prompt_length: 100, vocab_size: 1000, replicas: 2, images: 0 };

/// Parses a body into a request.
pub(crate) fn request<T: Limited>(body: &Value) -> Result<T, ApiError> {
    Ok(parse_request(body.to_string().as_bytes(), |_| Ok(()))?.request)
}

/// Returns the body with keys added or replaced.
pub(crate) fn with(mut body: Value, more: &Value) -> Value {
    for (key, value) in more.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body
}
