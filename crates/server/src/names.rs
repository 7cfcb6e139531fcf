//! Names of requests and of their responses.

use axum::http::HeaderName;

/// The header with a request's id.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The suffix that Ollama's clients add to a model's name.
pub(crate) const LATEST: &str = ":latest";

/// Returns 128 random bits as 32 hexadecimal digits.
pub(crate) fn random_hex() -> String {
    format!("{:032x}", rand::random::<u128>())
}
