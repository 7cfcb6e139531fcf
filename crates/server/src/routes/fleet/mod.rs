//! The routes of a server of several models: the server's own routes, and the dispatch of requests
//! to the routes of a model.

mod dispatch;
mod document;
pub(crate) mod lists;
mod wishes;

use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use forebay_api::ROUTES;
use tower::util::option_layer;

use super::layers::{check_admin, check_key, contain, name_request};
use super::{below, info, method_not_allowed, ollama, page, unknown_route};
use crate::access::{check_access, check_type, cors};
use crate::fleet::Front;
use crate::shapes::tell_errors;

/// Creates all routes. Health and metrics need no key.
pub(crate) fn router(front: Arc<Front>) -> Router {
    let keyed = models().layer(from_fn_with_state(front.clone(), check_key::<Front>));
    let admin = administration().layer(from_fn_with_state(front.clone(), check_admin::<Front>));
    let page = if front.config.webui { page() } else { Router::new() };
    let cors = cors(&front.config.access);
    let root = front.config.root_path.clone();
    let routes = Router::new()
        .merge(page)
        .merge(keyed.layer(from_fn(check_type)))
        .merge(admin.layer(from_fn(check_type)))
        .merge(open())
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(option_layer(cors))
        .layer(from_fn_with_state(front.clone(), check_access::<Front>))
        .layer(from_fn(contain))
        .layer(from_fn(tell_errors))
        .layer(from_fn(name_request))
        .with_state(front);
    below(routes, root)
}

/// The routes for clients with an API key.
fn models() -> Router<Arc<Front>> {
    let lists = Router::new()
        .route("/v1/models", get(lists::models))
        .route("/v1/models/{*id}", get(lists::model))
        .route("/models", get(lists::models))
        .route("/api/tags", get(lists::tags))
        .route("/api/ps", get(lists::running));
    let kept = Router::new()
        .route("/v1/responses/{id}", get(dispatch::kept).delete(dispatch::kept))
        .route("/v1/responses/{id}/cancel", post(dispatch::kept))
        .route("/v1/responses/{id}/input_items", get(dispatch::kept));
    let named = Router::new()
        .route("/slots", get(dispatch::by_query))
        .route("/tokenizer_info", get(dispatch::by_query))
        .route("/health_generate", get(dispatch::by_query));
    let bodies = ROUTES
        .iter()
        .fold(Router::new(), |router, route| router.route(route.path, post(dispatch::by_body)));
    lists.merge(kept).merge(named).merge(bodies)
}

/// The routes for administrators.
fn administration() -> Router<Arc<Front>> {
    Router::new()
        .route("/models/load", post(wishes::load))
        .route("/models/unload", post(wishes::unload))
        .route("/sleep", post(wishes::sleep))
        .route("/wake_up", post(wishes::wake_up))
        .route("/is_sleeping", get(wishes::is_sleeping))
        .route("/release_memory_occupation", post(wishes::release))
        .route("/resume_memory_occupation", post(wishes::resume))
        .route("/server_info", get(dispatch::by_query))
        .route("/v1/live", get(dispatch::by_query))
        .route("/v1/live/requests/{id}", get(dispatch::by_query))
        .route("/v1/live/trace", get(dispatch::by_query))
        .route("/replicas/{replica}/drain", post(dispatch::by_query))
        .route("/replicas/{replica}/role", post(dispatch::by_query))
        .route("/replicas/{replica}/resume", post(dispatch::by_query))
        .route("/flush_cache", post(dispatch::by_query))
}

/// The routes that need no key.
fn open() -> Router<Arc<Front>> {
    Router::new()
        .route("/livez", get(info::live))
        .route("/health", get(lists::health))
        .route("/metrics", get(lists::metrics))
        .route("/openapi.json", get(document::openapi))
        .route("/api/version", get(ollama::version))
        .route("/version", get(info::version))
        .route("/ping", get(info::ping).post(info::ping))
}
