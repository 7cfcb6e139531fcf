//! Names of requests and of their answers.

use axum::http::HeaderName;

/// The header of a request's name.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The suffix of a model's name that Ollama's clients add.
pub(crate) const LATEST: &str = ":latest";

/// 128 random bits as 32 hexadecimal digits.
pub(crate) fn random_hex() -> String {
    format!("{:032x}", rand::random::<u128>())
}
