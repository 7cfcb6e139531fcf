//! Middleware that requests pass before they reach a route.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forebay_api::ApiError;
use forebay_http::{KeyId, contained, panic_message};

use crate::names::{REQUEST_ID, random_hex};
use crate::peers::{is_router, not_a_router};
use crate::reply::Failure;
use crate::state::{HasSettings, Shared};

/// The maximum length of an `x-request-id` that is echoed, in bytes.
const MAX_REQUEST_ID: usize = 256;

/// Accepts requests with a client's or an administrator's key, and all requests if no key is
/// needed.
pub(super) async fn check_key<S: HasSettings>(
    State(state): State<Arc<S>>,
    key: KeyId,
    request: Request,
    next: Next,
) -> Response {
    let config = state.settings();
    let accepted = config.api_keys.is_empty()
        || key.0.is_some()
        || config.admin_keys.shown(request.headers()).is_some();
    if accepted { next.run(request).await } else { Failure(ApiError::Unauthorized).into_response() }
}

/// Accepts requests with an admin key. If there are no admin keys, accepts every client that may
/// use the model.
pub(super) async fn check_admin<S: HasSettings>(
    State(state): State<Arc<S>>,
    key: KeyId,
    request: Request,
    next: Next,
) -> Response {
    let keys = &state.settings().admin_keys;
    if keys.is_empty() {
        return check_key(State(state), key, request, next).await;
    }
    match keys.shown(request.headers()) {
        Some(_) => next.run(request).await,
        None => Failure(ApiError::Unauthorized).into_response(),
    }
}

/// Accepts requests for the load from routers and administrators.
pub(super) async fn check_loads(
    State(state): State<Shared>,
    key: KeyId,
    request: Request,
    next: Next,
) -> Response {
    match is_router(&state, request.headers()) {
        true => next.run(request).await,
        false => check_admin(State(state), key, request, next).await,
    }
}

/// Accepts only requests of routers: other clients may not list block names.
pub(super) async fn check_router(
    State(state): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    match is_router(&state, request.headers()) {
        true => next.run(request).await,
        false => Failure(not_a_router()).into_response(),
    }
}

/// Accepts only requests of routers, of servers with a router's key, and of administrators.
pub(super) async fn check_server(
    State(state): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    let is_admin = state.config.admin_keys.shown(request.headers()).is_some();
    match is_admin || is_router(&state, request.headers()) {
        true => next.run(request).await,
        false => Failure(not_a_router()).into_response(),
    }
}

/// Rejects requests if the model is a pooling model, which generates nothing.
pub(super) async fn check_generator(
    State(state): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    match state.generator() {
        Ok(()) => next.run(request).await,
        Err(error) => Failure(error).into_response(),
    }
}

/// Responds to a request whose handler panicked. The handler's state has been dropped by then,
/// which aborted its engine requests.
pub(super) async fn contain(request: Request, next: Next) -> Response {
    contained(next.run(request)).await.unwrap_or_else(|panic| {
        // A panic's message may describe the server's internals, so clients do not get it.
        tracing::error!("a handler panicked: {}", panic_message(&*panic));
        let reason = "the server failed on this request; its log says why".to_owned();
        Failure(ApiError::Internal { reason, code: Some("panic") }).into_response()
    })
}

/// Counts a response. Unknown routes and methods are counted together, because clients may invent
/// any number of them.
pub(super) async fn count(State(state): State<Shared>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let path = request.extensions().get::<MatchedPath>().cloned();
    let handler = path.as_ref().map_or("none", MatchedPath::as_str);
    let method = match *request.method() {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    };
    let response = next.run(request).await;
    state.metrics.answered(handler, method, response.status().as_u16(), began.elapsed());
    response
}

/// Echoes the request id that the client sent, or generates one.
pub(super) async fn name_request(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_REQUEST_ID).cloned();
    let mut response = next.run(request).await;
    let id = given.or_else(|| HeaderValue::from_str(&random_hex()).ok());
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}
