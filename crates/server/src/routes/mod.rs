//! The routes, and the layers around all of them.

mod admitted;
mod chat;
mod completions;
mod embeddings;
mod generate;
pub(crate) mod info;
mod live;
mod llama;
mod loads;
mod messages;
mod ollama;
mod openapi;
mod replicas;
mod rerank;
mod responses;
#[cfg(test)]
mod scripted;
mod tokenize;

use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use forebay_api::{ApiError, StopReason, TokenOutput};
use forebay_text::Tokenizer;
use tower::ServiceExt;
use tower::util::option_layer;

use crate::access::{check_access, check_type, cors};
use crate::client::KeyId;
use crate::guard;
use crate::ignored;
use crate::loading::hold;
use crate::names::{REQUEST_ID, random_hex};
use crate::peers::blocks::blocks;
use crate::peers::{is_router, not_a_router, talk};
use crate::reply::Failure;
use crate::shapes::tell_errors;
use crate::state::Shared;
use crate::stream::delta::End;

/// Longest `x-request-id` that is echoed, in bytes.
const MAX_REQUEST_ID: usize = 256;

/// All routes. Health and metrics need no key.
pub(crate) fn router(state: Shared) -> Router {
    let generating = Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/generate", post(generate::generate))
        .route("/completion", post(llama::completion))
        .route("/apply-template", post(llama::apply_template))
        .route("/slots", get(llama::slots))
        .route_layer(from_fn_with_state(state.clone(), check_generator));
    let keyed = Router::new()
        .merge(generating)
        .route("/api/embed", post(ollama::embed))
        .route("/api/show", post(ollama::show))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/pooling", post(embeddings::pooling))
        .route("/rerank", post(rerank::rerank))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/score", post(rerank::score))
        .route("/v1/score", post(rerank::score))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(info::tokenizer_info))
        .route("/health_generate", get(info::health_generate))
        .layer(from_fn_with_state(state.clone(), talk))
        .layer(from_fn_with_state(state.clone(), hold))
        .layer(from_fn_with_state(state.clone(), check_key));
    let admin = Router::new()
        .route("/server_info", get(info::server_info))
        .route("/v1/live", get(live::live_feed))
        .route("/v1/live/requests/{id}", get(live::live_request))
        .route("/v1/live/trace", get(live::live_trace))
        .route("/replicas/{replica}/drain", post(replicas::drain))
        .route("/replicas/{replica}/resume", post(replicas::resume))
        .route("/flush_cache", post(info::flush_cache))
        .layer(from_fn_with_state(state.clone(), talk))
        .layer(from_fn_with_state(state.clone(), check_admin));
    let loads = Router::new()
        .route("/v1/loads", get(loads::loads))
        .layer(from_fn_with_state(state.clone(), talk))
        .layer(from_fn_with_state(state.clone(), check_loads));
    let blocks = Router::new()
        .route("/v1/blocks", get(blocks))
        .layer(from_fn_with_state(state.clone(), talk))
        .layer(from_fn_with_state(state.clone(), check_router));
    let page = match state.config.webui {
        true => Router::new()
            .route("/", get(live::page_file))
            .route("/assets/{name}", get(live::page_file)),
        false => Router::new(),
    };
    let cors = cors(&state.config.access);
    let routes = Router::new()
        .merge(page)
        .merge(keyed.layer(from_fn(check_type)))
        .merge(admin.layer(from_fn(check_type)))
        .merge(loads)
        .merge(blocks)
        .route("/livez", get(info::live))
        .route("/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(openapi::openapi))
        .route("/api/version", get(ollama::version))
        .route("/version", get(info::version))
        .route("/ping", get(info::ping).post(info::ping))
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(option_layer(cors))
        .layer(from_fn_with_state(state.clone(), check_access))
        .layer(from_fn(ignored::tell))
        .layer(from_fn(contain))
        .layer(from_fn(tell_errors))
        .layer(from_fn_with_state(state.clone(), count))
        .layer(from_fn(name_request));
    let root = state.config.root_path.clone();
    let routes = routes.with_state(state);
    if root.is_empty() {
        return routes;
    }
    // Before a route is looked for.
    let below = routes.map_request(move |mut request: Request| {
        if let Some(uri) = without_root(request.uri(), &root) {
            *request.uri_mut() = uri;
        }
        request
    });
    Router::new().fallback_service(below)
}

/// The URI without the prefix of a proxy; `None` if it does not begin with the prefix.
fn without_root(uri: &Uri, root: &str) -> Option<Uri> {
    let rest = uri.path_and_query()?.as_str().strip_prefix(root)?;
    let rest = match rest.as_bytes().first() {
        Some(b'/') => rest.to_owned(),
        None | Some(b'?') => format!("/{rest}"),
        Some(_) => return None,
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(rest.parse().ok()?);
    Uri::from_parts(parts).ok()
}

async fn unknown_route(method: Method, uri: Uri) -> Failure {
    Failure(ApiError::UnknownRoute { method: method.to_string(), path: uri.path().to_owned() })
}

async fn method_not_allowed(method: Method, uri: Uri) -> Failure {
    Failure(ApiError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() })
}

async fn check_key(
    State(state): State<Shared>,
    key: KeyId,
    request: Request,
    next: Next,
) -> Response {
    let config = &state.config;
    let accepted = config.api_keys.is_empty()
        || key.0.is_some()
        || config.admin_keys.shown(request.headers()).is_some();
    if accepted { next.run(request).await } else { Failure(ApiError::Unauthorized).into_response() }
}

/// Lets a request pass with a key of administrators. If there are none, every client that may use
/// the model may do this too.
async fn check_admin(
    State(state): State<Shared>,
    key: KeyId,
    request: Request,
    next: Next,
) -> Response {
    let keys = &state.config.admin_keys;
    if keys.is_empty() {
        return check_key(State(state), key, request, next).await;
    }
    match keys.shown(request.headers()) {
        Some(_) => next.run(request).await,
        None => Failure(ApiError::Unauthorized).into_response(),
    }
}

/// Lets a request for the load pass from routers, and from administrators.
async fn check_loads(
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

/// Names of blocks are for routers alone.
async fn check_router(State(state): State<Shared>, request: Request, next: Next) -> Response {
    match is_router(&state, request.headers()) {
        true => next.run(request).await,
        false => Failure(not_a_router()).into_response(),
    }
}

/// A model that pools generates nothing.
async fn check_generator(State(state): State<Shared>, request: Request, next: Next) -> Response {
    match state.generator() {
        Ok(()) => next.run(request).await,
        Err(error) => Failure(error).into_response(),
    }
}

/// Answers a request whose handler panics. The handler's data are dropped by then, which aborts its
/// engine requests.
async fn contain(request: Request, next: Next) -> Response {
    guard::contained(next.run(request)).await.unwrap_or_else(|panic| {
        // What it says is about the server, and not for a client.
        tracing::error!("a handler panicked: {}", guard::message(&*panic));
        let reason = "the server failed on this request; its log says why".to_owned();
        Failure(ApiError::Internal { reason, code: Some("panic") }).into_response()
    })
}

/// Counts an answer. Unknown routes and methods are counted together, since clients may make up
/// any.
async fn count(State(state): State<Shared>, request: Request, next: Next) -> Response {
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

/// vLLM's `stop_reason`: what ended the text, unless it was end-of-sequence.
fn stop_reason(end: &End) -> Option<StopReason> {
    match end {
        End::Token(id) => Some(StopReason::Token(*id)),
        End::Text(text) => Some(StopReason::Text(text.clone())),
        End::Eos(_) | End::Length | End::Call | End::Error(_) => None,
    }
}

/// SGLang's `matched_stop`: what ended the text, end-of-sequence too.
fn matched_stop(end: &End) -> Option<StopReason> {
    match end {
        End::Eos(id) => Some(StopReason::Token(*id)),
        end => stop_reason(end),
    }
}

/// The name of a token in log-probabilities.
fn token_name(tokenizer: &Tokenizer, id: i32, output: TokenOutput) -> String {
    if output.as_ids { format!("token_id:{id}") } else { tokenizer.token_text(id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_taken_off_whole_names_only() {
        let without = |uri: &str| {
            let uri = without_root(&uri.parse().unwrap(), "/llm")?;
            Some(uri.to_string())
        };
        assert_eq!(without("/llm/v1/models?a=b").as_deref(), Some("/v1/models?a=b"));
        assert_eq!(without("/llm").as_deref(), Some("/"));
        assert_eq!(without("/llm?a").as_deref(), Some("/?a"));
        assert_eq!(without("http://h/llm/x").as_deref(), Some("http://h/x"));
        assert_eq!(without("/llmx/v1"), None);
        assert_eq!(without("/v1/models"), None);
    }
}
