//! The routes and what every one of them goes through.

mod chat;
mod completions;
mod embeddings;
mod generate;
mod info;
mod loads;
mod openapi;
mod replicas;
mod rerank;
mod tokenize;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use forebay_api::{ApiError, StopReason};

use crate::delta::End;
use crate::guard;
use crate::limits::authorized;
use crate::peers::blocks::blocks;
use crate::peers::talk;
use crate::reply::Failure;
use crate::state::Shared;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest `x-request-id` that is echoed, in bytes.
const MAX_REQUEST_ID: usize = 256;

/// All routes. Health and metrics need no API key.
pub(crate) fn router(state: Shared) -> Router {
    let generating = Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/generate", post(generate::generate))
        .route_layer(from_fn_with_state(state.clone(), check_generator));
    let keyed = Router::new()
        .merge(generating)
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/rerank", post(rerank::rerank))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/score", post(rerank::score))
        .route("/v1/score", post(rerank::score))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/server_info", get(info::server_info))
        .route("/v1/loads", get(loads::loads))
        .route("/v1/blocks", get(blocks))
        .route("/replicas/{replica}/drain", post(replicas::drain))
        .route("/replicas/{replica}/resume", post(replicas::resume))
        .route("/flush_cache", get(info::flush_cache).post(info::flush_cache))
        .layer(from_fn_with_state(state.clone(), talk))
        .layer(from_fn_with_state(state.clone(), check_key));
    Router::new()
        .merge(keyed)
        .route("/health", get(info::health))
        .route("/health_generate", get(info::health_generate))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(openapi::openapi))
        .route("/version", get(info::version))
        .route("/ping", get(info::ping).post(info::ping))
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn(contain))
        .layer(from_fn(name_request))
        .with_state(state)
}

async fn unknown_route(method: Method, uri: Uri) -> Failure {
    Failure(ApiError::UnknownRoute { method: method.to_string(), path: uri.path().to_owned() })
}

async fn method_not_allowed(method: Method, uri: Uri) -> Failure {
    Failure(ApiError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() })
}

async fn check_key(State(state): State<Shared>, request: Request, next: Next) -> Response {
    if authorized(request.headers(), state.config.api_key.as_deref()) {
        next.run(request).await
    } else {
        Failure(ApiError::Unauthorized).into_response()
    }
}

/// A model that pools generates nothing.
async fn check_generator(State(state): State<Shared>, request: Request, next: Next) -> Response {
    match state.generator() {
        Ok(()) => next.run(request).await,
        Err(error) => Failure(error).into_response(),
    }
}

/// Answers a request that makes its handler panic; what the handler held is dropped by then, which aborts what it waited for.
async fn contain(request: Request, next: Next) -> Response {
    guard::contained(next.run(request)).await.unwrap_or_else(|panic| {
        let reason = format!("the server failed on this request: {}", guard::message(&*panic));
        Failure(ApiError::Internal { reason, code: Some("panic") }).into_response()
    })
}

/// Echoes the client's name for the request, or makes one up.
async fn name_request(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_REQUEST_ID).cloned();
    let mut response = next.run(request).await;
    let id = given.or_else(|| HeaderValue::from_str(&random_hex()).ok());
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// 128 random bits as 32 hexadecimal digits.
pub(crate) fn random_hex() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// vLLM's `stop_reason`: what ended the text, unless it was end-of-sequence.
fn stop_reason(end: &End) -> Option<StopReason> {
    match end {
        End::Token(id) => Some(StopReason::Token(*id)),
        End::Text(text) => Some(StopReason::Text(text.clone())),
        End::Eos(_) | End::Length | End::Error(_) => None,
    }
}
