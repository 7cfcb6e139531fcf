//! Errors and JSON as HTTP responses.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use forebay_api::ApiError;
use forebay_http::Refusal;
use serde::Serialize;

/// An error that becomes the client's response.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) ApiError);

/// The error of a response, kept in its extensions for APIs that encode errors in another format.
#[derive(Debug, Clone)]
pub(crate) struct ReplyError(pub(crate) ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let status =
            StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // Only a 500 is a warning. A state that causes a 503 was logged when it began, and health
        // probes repeat the request all the time.
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::warn!(status = status.as_u16(), %error, "request failed");
        } else {
            tracing::debug!(status = status.as_u16(), %error, "request refused");
        }
        let mut response = json(status, &error.body());
        if let Some(seconds) = error.retry_after() {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(ReplyError(error));
        response
    }
}

/// Creates a JSON response.
pub(crate) fn json<T: Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => {
            let mut response = Response::new(Body::from(body));
            *response.status_mut() = status;
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => {
            tracing::error!(%error, "a response could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Creates a JSON response with status 200.
pub(crate) fn ok<T: Serialize>(value: &T) -> Response {
    json(StatusCode::OK, value)
}

/// Creates the error for a response that serde could not write, which is a bug.
pub(crate) fn unwritable(error: serde_json::Error) -> Failure {
    let reason = format!("the response could not be written as JSON: {error}");
    Failure(ApiError::Internal { reason, code: None })
}
