//! The routes, and the middleware around them.

mod adapters;
mod admitted;
mod batches;
mod chat;
mod classify;
mod completions;
mod embeddings;
mod files;
pub(crate) mod fleet;
mod generate;
pub(crate) mod info;
mod layers;
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
mod tensors;
mod tokenize;
mod trainer;
mod weights;
mod wording;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use forebay_api::{ApiError, ROUTES};
use tower::ServiceExt;
use tower::util::option_layer;

use crate::access::{check_access, check_type, cors};
use crate::ignored;
use crate::loading::hold;
use crate::pd::prefill::prefill;
use crate::peers::blocks::blocks;
use crate::peers::talk;
use crate::reply::Failure;
use crate::shapes::tell_errors;
use crate::state::{Inner, Shared};

use layers::{
    check_admin, check_generator, check_key, check_loads, check_router, check_server, contain,
    count, name_request,
};

/// Creates all routes. Health and metrics need no key.
pub(crate) fn router(state: Shared) -> Router {
    let talk = || from_fn_with_state(state.clone(), talk);
    let keyed = computing(&state);
    let stored = stored().layer(from_fn_with_state(state.clone(), check_key::<Inner>));
    let admin = administration()
        .layer(talk())
        .layer(from_fn_with_state(state.clone(), check_admin::<Inner>));
    let adapters = Router::new()
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/load_lora_adapter", post(adapters::load_listed))
        .route("/unload_lora_adapter", post(adapters::unload_listed))
        .layer(from_fn_with_state(state.clone(), adapters::check_adapters));
    let weights = Router::new()
        .route("/pause", post(weights::pause))
        .route("/resume", post(weights::resume))
        .route("/is_paused", get(weights::is_paused))
        .route("/pause_generation", post(weights::pause_generation))
        .route("/continue_generation", post(weights::continue_generation))
        .route("/update_weights_from_disk", post(weights::update))
        .route("/update_weights_from_tensor", post(tensors::update))
        .route("/update_weights_from_distributed", post(trainer::update))
        .route("/update_weights_from_ipc", post(tensors::elsewhere))
        .route("/init_weights_update_group", post(trainer::init))
        .route("/destroy_weights_update_group", post(trainer::destroy))
        .route("/init_weight_transfer_engine", post(tensors::elsewhere))
        .route("/update_weights", post(tensors::elsewhere))
        .route("/get_weights_by_name", get(tensors::parameter_of_query).post(tensors::parameter))
        .route("/update_weight_version", post(weights::rename))
        .route("/get_weight_version", get(weights::name))
        .layer(from_fn_with_state(state.clone(), weights::check_weights));
    let loads = Router::new()
        .route("/v1/loads", get(loads::loads))
        .layer(talk())
        .layer(from_fn_with_state(state.clone(), check_loads));
    let blocks = Router::new()
        .route("/v1/blocks", get(blocks))
        .layer(talk())
        .layer(from_fn_with_state(state.clone(), check_router));
    let prefills = Router::new()
        .route("/pd/prefill", post(prefill))
        .route_layer(from_fn_with_state(state.clone(), check_generator))
        .layer(from_fn_with_state(state.clone(), check_server));
    let page = if state.config.webui { page() } else { Router::new() };
    let cors = cors(&state.config.access);
    let root = state.config.root_path.clone();
    let routes = Router::new()
        .merge(page)
        .merge(keyed.layer(from_fn(check_type)))
        .merge(stored.layer(from_fn(check_type)))
        .merge(admin.layer(from_fn(check_type)))
        .merge(adapters.layer(from_fn(check_type)))
        .merge(weights.layer(from_fn(check_type)))
        .merge(loads)
        .merge(blocks)
        .merge(prefills.layer(from_fn(check_type)))
        .merge(open())
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(option_layer(cors))
        .layer(from_fn_with_state(state.clone(), check_access::<Inner>))
        .layer(from_fn(ignored::tell))
        .layer(from_fn(contain))
        .layer(from_fn(tell_errors))
        .layer(from_fn_with_state(state.clone(), count))
        .layer(from_fn(name_request))
        .with_state(state);
    below(routes, root)
}

/// Creates the computing routes for requests that the server itself makes.
pub(crate) fn computed(state: &Shared) -> Router {
    computing(state)
        .fallback(unknown_route)
        .layer(from_fn(ignored::tell))
        .layer(from_fn(contain))
        .layer(from_fn(tell_errors))
        .layer(from_fn_with_state(state.clone(), count))
        .layer(from_fn(name_request))
        .with_state(state.clone())
}

/// The routes that compute with the model, for clients with a key.
fn computing(state: &Shared) -> Router<Shared> {
    generation(state)
        .merge(models())
        .layer(from_fn_with_state(state.clone(), talk))
        .layer(from_fn_with_state(state.clone(), hold))
        .layer(from_fn_with_state(state.clone(), check_key::<Inner>))
}

/// The routes of files and batches.
fn stored() -> Router<Shared> {
    Router::new()
        .route("/v1/files", post(files::upload).get(files::list))
        .route("/v1/files/{id}", get(files::retrieve).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", post(batches::create).get(batches::list))
        .route("/v1/batches/{id}", get(batches::retrieve))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        // Files have a separate limit, which is checked while they are written.
        .layer(DefaultBodyLimit::disable())
}

/// The routes of a generating model.
fn generation(state: &Shared) -> Router<Shared> {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/generate", post(generate::generate))
        .route("/completion", post(llama::completion))
        .route("/apply-template", post(llama::apply_template))
        .route("/slots", get(llama::slots))
        .route_layer(from_fn_with_state(state.clone(), check_generator))
}

/// The routes of any model.
fn models() -> Router<Shared> {
    Router::new()
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
        .route("/api/show", post(ollama::show))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/pooling", post(embeddings::pooling))
        .route("/classify", post(classify::classify))
        .route("/v1/classify", post(classify::classify))
        .route("/rerank", post(rerank::rerank))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/score", post(rerank::score))
        .route("/v1/score", post(rerank::score))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/lora-adapters", get(adapters::list))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(info::tokenizer_info))
        .route("/health_generate", get(info::health_generate))
}

/// The routes for administrators.
fn administration() -> Router<Shared> {
    Router::new()
        .route("/server_info", get(info::server_info))
        .route("/v1/live", get(live::live_feed))
        .route("/v1/live/requests/{id}", get(live::live_request))
        .route("/v1/live/trace", get(live::live_trace))
        .route("/replicas/{replica}/drain", post(replicas::drain))
        .route("/replicas/{replica}/resume", post(replicas::resume))
        .route("/replicas/{replica}/role", post(replicas::role))
        .route("/flush_cache", post(info::flush_cache))
}

/// The routes that need no key.
fn open() -> Router<Shared> {
    Router::new()
        .route("/livez", get(info::live))
        .route("/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(openapi::openapi))
        .route("/api/version", get(ollama::version))
        .route("/version", get(info::version))
        .route("/ping", get(info::ping).post(info::ping))
}

fn page<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(live::page_file)).route("/assets/{name}", get(live::page_file))
}

/// Removes a proxy's path prefix from URIs before routing.
fn below(routes: Router, root: String) -> Router {
    if root.is_empty() {
        return routes;
    }
    let below = routes.map_request(move |mut request: Request| {
        if let Some(uri) = without_root(request.uri(), &root) {
            *request.uri_mut() = uri;
        }
        request
    });
    Router::new().fallback_service(below)
}

/// Returns the URI without the prefix of a proxy; `None` if it does not begin with the prefix.
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

pub(super) async fn unknown_route(method: Method, uri: Uri) -> Failure {
    let path = uri.path().to_owned();
    let near = near(&path);
    Failure(ApiError::UnknownRoute { method: method.to_string(), path, near })
}

/// Returns the route that a client probably means if its URL has `/v1` twice or not at all.
fn near(path: &str) -> Option<String> {
    const OTHERS: [&str; 2] = ["/v1/models", "/v1/live"];
    let meant = path.strip_prefix("/v1").map_or_else(|| format!("/v1{path}"), str::to_owned);
    let meant = meant.trim_end_matches('/');
    let known = ROUTES.iter().map(|route| route.path).chain(OTHERS);
    known.into_iter().find(|known| *known == meant).map(str::to_owned)
}

pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> Failure {
    Failure(ApiError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_without_its_version_is_told_the_right_one() {
        for (path, meant) in [
            ("/chat/completions", Some("/v1/chat/completions")),
            ("/v1/v1/messages", Some("/v1/messages")),
            ("/models", Some("/v1/models")),
            ("/v1/api/chat", Some("/api/chat")),
            ("/v1/chat/completions/", None),
            ("/nothing", None),
        ] {
            assert_eq!(near(path).as_deref(), meant, "{path}");
        }
    }

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
