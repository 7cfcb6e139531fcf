//! The checks on requests of browsers: see [`forebay_api::Access`].

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, ORIGIN};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forebay_api::{Access, ApiError};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::reply::Failure;
use crate::state::HasSettings;

/// The headers that only browsers send with a request.
const SEC_FETCH: [HeaderName; 3] = [
    HeaderName::from_static("sec-fetch-site"),
    HeaderName::from_static("sec-fetch-mode"),
    HeaderName::from_static("sec-fetch-dest"),
];
/// How long a browser may cache the answer to a preflight request.
const PREFLIGHT_AGE: std::time::Duration = std::time::Duration::from_secs(600);

/// Creates the layer that lists the origins whose pages may read responses. `None`: only the
/// server's own pages may.
pub(crate) fn cors(access: &Access) -> Option<CorsLayer> {
    if access.allowed_origins.is_empty() {
        return None;
    }
    let allowed = match access.allows_every_origin() {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(
            access.allowed_origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()),
        ),
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([crate::names::REQUEST_ID])
        .max_age(PREFLIGHT_AGE);
    Some(layer)
}

/// Rejects requests for a host name that is not allowed, or from pages of other origins.
pub(crate) async fn check_access<S: HasSettings>(
    State(state): State<Arc<S>>,
    request: Request,
    next: Next,
) -> Response {
    match state.settings().access.check(request.headers(), request.uri(), request.version()) {
        Ok(()) => next.run(request).await,
        Err(error) => Failure(error).into_response(),
    }
}

/// Rejects a browser's POST request that is not JSON: browsers send such requests without a
/// preflight.
pub(crate) async fn check_type(request: Request, next: Next) -> Response {
    if request.method() == Method::POST
        && from_browser(request.headers())
        && !is_json(request.headers())
    {
        return Failure(ApiError::UnsupportedMediaType).into_response();
    }
    next.run(request).await
}

fn from_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) || SEC_FETCH.iter().any(|name| headers.contains_key(name))
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/json")
}
