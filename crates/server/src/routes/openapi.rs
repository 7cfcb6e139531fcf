//! `GET /openapi.json`.

use axum::extract::State;
use axum::response::Response;
use utoipa::OpenApi;
use utoipa::openapi::Server;

use crate::reply;
use crate::state::Shared;

#[derive(OpenApi)]
#[openapi(
    info(title = "forebay", description = "OpenAI-compatible LLM serving"),
    paths(
        super::chat::chat_completions,
        super::completions::completions,
        super::messages::messages,
        super::messages::count_tokens,
        super::responses::responses,
        super::responses::input_tokens,
        super::responses::retrieve,
        super::responses::delete,
        super::responses::cancel,
        super::responses::input_items,
        super::files::upload,
        super::files::list,
        super::files::retrieve,
        super::files::delete,
        super::files::content,
        super::batches::create,
        super::batches::list,
        super::batches::retrieve,
        super::batches::cancel,
        super::ollama::chat,
        super::ollama::generate,
        super::ollama::embed,
        super::ollama::embeddings,
        super::ollama::show,
        super::ollama::tags,
        super::ollama::ps,
        super::ollama::version,
        super::embeddings::embeddings,
        super::embeddings::pooling,
        super::classify::classify,
        super::rerank::rerank,
        super::rerank::score,
        super::llama::completion,
        super::llama::apply_template,
        super::llama::slots,
        super::info::tokenizer_info,
        super::info::models,
        super::info::model,
        super::generate::generate,
        super::adapters::load,
        super::adapters::unload,
        super::adapters::load_listed,
        super::adapters::unload_listed,
        super::adapters::list,
        super::weights::pause,
        super::weights::resume,
        super::weights::is_paused,
        super::weights::pause_generation,
        super::weights::continue_generation,
        super::weights::update,
        super::tensors::update,
        super::tensors::elsewhere,
        super::trainer::init,
        super::trainer::update,
        super::trainer::destroy,
        super::tensors::parameter_of_query,
        super::tensors::parameter,
        super::weights::rename,
        super::weights::name,
        super::tokenize::tokenize,
        super::tokenize::detokenize,
        super::info::server_info,
        super::loads::loads,
        crate::peers::blocks::blocks,
        super::info::flush_cache,
        super::replicas::drain,
        super::replicas::resume,
        super::replicas::role,
        crate::pd::prefill::prefill,
        super::live::live_feed,
        super::live::live_request,
        super::live::live_trace,
        super::info::live,
        super::info::health,
        super::info::health_generate,
        super::info::metrics,
        super::info::version,
        super::info::ping,
        openapi,
    )
)]
struct Document;

/// Describes every route, with the schemas of requests and responses.
#[utoipa::path(
    get,
    path = "/openapi.json",
    responses((status = 200, description = "This document")),
)]
pub(super) async fn openapi(State(state): State<Shared>) -> Response {
    answer(document(), &state.config.root_path)
}

/// Returns the response with the document, for a server whose paths are below `root_path`.
pub(super) fn answer(mut document: utoipa::openapi::OpenApi, root_path: &str) -> Response {
    if !root_path.is_empty() {
        document.servers = Some(vec![Server::new(root_path)]);
    }
    reply::ok(&document)
}

/// Alternative paths of routes, for clients of other servers.
const ALIASES: [(&str, &str); 6] = [
    ("/v1/classify", "/classify"),
    ("/v1/rerank", "/rerank"),
    ("/v2/rerank", "/rerank"),
    ("/v1/score", "/score"),
    ("/init_weight_transfer_engine", "/update_weights_from_ipc"),
    ("/update_weights", "/update_weights_from_ipc"),
];

/// Returns the OpenAPI document. Each path of a route, and each method of a path with several
/// methods, has a separate operation id.
pub(super) fn document() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    for (alias, path) in ALIASES {
        let Some(mut item) = document.paths.paths.get(path).cloned() else { continue };
        if let Some(operation) = &mut item.post {
            operation.operation_id = Some(alias.trim_start_matches('/').replace('/', "_"));
        }
        document.paths.paths.insert(alias.to_owned(), item);
    }
    for item in document.paths.paths.values_mut() {
        if item.get.is_some()
            && let Some(id) = item.post.as_mut().and_then(|post| post.operation_id.as_mut())
        {
            id.push_str("_post");
        }
    }
    document
}
