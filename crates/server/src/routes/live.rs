//! The feed of the engine's activity, and the page that shows it.

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Uri};
use axum::response::{IntoResponse, Response};
use forebay_api::{ApiError, ErrorBody};
use forebay_webui::page;

use crate::live::{life, trace, watch};
use crate::reply::{self, Failure};
use crate::state::Shared;

/// The engine's activity as server-sent events: one `start`, then four `tick` a second.
#[utoipa::path(
    get,
    path = "/v1/live",
    responses(
        (status = 200, description = "Events", content_type = "text/event-stream", body = String),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn live_feed(State(state): State<Shared>) -> Result<Response, Failure> {
    Ok(watch(&state)?.map(Body::new))
}

/// The recorded events of a request, without its text.
#[utoipa::path(
    get,
    path = "/v1/live/requests/{id}",
    params(("id" = String, Path, description = "The request, as the feed names it")),
    responses(
        (status = 200, description = "Its life", body = serde_json::Value),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn live_request(
    State(state): State<Shared>,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    Ok(reply::ok(&life(&state, &id)?))
}

/// The recorded steps as a trace that Perfetto opens.
#[utoipa::path(
    get,
    path = "/v1/live/trace",
    responses(
        (status = 200, description = "A trace in Chrome's format", body = serde_json::Value),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn live_trace(State(state): State<Shared>) -> Result<Response, Failure> {
    let written = tokio::task::spawn_blocking(move || serde_json::to_vec(&trace(&state))).await;
    let body = written.ok().and_then(Result::ok).ok_or_else(|| {
        Failure(ApiError::Internal { reason: "the trace could not be written".into(), code: None })
    })?;
    let mut response = Response::new(Body::from(body));
    for (name, value) in [
        (CONTENT_TYPE, "application/json"),
        (CONTENT_DISPOSITION, "attachment; filename=\"forebay-trace.json\""),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// Serves a file of the web page. It contains no secrets, so it needs no key.
pub(crate) async fn page_file(uri: Uri, headers: HeaderMap) -> Response {
    match page(uri.path(), &headers) {
        Some(response) => response.map(Body::from),
        None => {
            let path = uri.path().to_owned();
            Failure(ApiError::UnknownRoute { method: "GET".into(), path, near: None })
                .into_response()
        }
    }
}
