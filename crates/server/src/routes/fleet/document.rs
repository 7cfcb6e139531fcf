//! `GET /openapi.json` of a server of several models.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use utoipa::OpenApi;

use super::super::openapi as described;
use crate::fleet::Front;

#[derive(OpenApi)]
#[openapi(paths(
    super::wishes::load,
    super::wishes::unload,
    super::wishes::sleep,
    super::wishes::wake_up,
    super::wishes::is_sleeping,
    super::wishes::release,
    super::wishes::resume,
))]
struct FleetDocument;

/// The prefixes of paths that a server of several models does not have.
const OF_ONE_MODEL: [&str; 18] = [
    "/v1/files",
    "/v1/batches",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/lora-adapters",
    "/pause",
    "/resume",
    "/is_paused",
    "/continue_generation",
    "/update_weight",
    "/get_weight",
    "/init_weight",
    "/destroy_weight",
    "/v1/blocks",
    "/v1/loads",
    "/pd/",
];

/// Returns the OpenAPI document of a server of several models.
pub(super) async fn openapi(State(front): State<Arc<Front>>) -> Response {
    let mut document = described::document();
    document
        .paths
        .paths
        .retain(|path, _| !OF_ONE_MODEL.iter().any(|begin| path.starts_with(begin)));
    document.merge(FleetDocument::openapi());
    described::answer(document, &front.config.root_path)
}
