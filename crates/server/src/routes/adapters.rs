//! Loading and unloading adapters at run time, with the routes of vLLM and SGLang, and
//! llama-server's list of adapters.

use std::collections::BTreeMap;
use std::path::PathBuf;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_api::{ApiError, ErrorBody};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::adapters::{Adapters, check_adapter_name};
use crate::limits::{Upload, small};
use crate::reply::{self, Failure};
use crate::state::Shared;

/// An adapter to load.
#[derive(Deserialize, ToSchema)]
pub(crate) struct LoadAdapter {
    /// The name that requests will use.
    lora_name: String,
    /// The folder or GGUF file, below `--lora-root`.
    #[schema(value_type = String)]
    lora_path: PathBuf,
    /// True if the name may exist already. Requests that use the old adapter finish with it.
    #[serde(default)]
    load_inplace: bool,
}

/// An adapter to unload.
#[derive(Deserialize, ToSchema)]
pub(crate) struct UnloadAdapter {
    /// The name of the adapter.
    lora_name: String,
}

/// The loaded adapters, as SGLang lists them.
#[derive(Serialize, ToSchema)]
pub(crate) struct LoadedAdapters {
    success: bool,
    /// Paths by name.
    loaded_adapters: BTreeMap<String, String>,
}

/// A loaded adapter, as llama-server lists it.
#[derive(Serialize, ToSchema)]
pub(crate) struct ListedAdapter {
    id: u32,
    /// The name that requests use.
    name: String,
    path: String,
    /// 0: an adapter applies only to requests that name it.
    scale: f32,
}

/// Loads an adapter.
#[utoipa::path(
    post,
    path = "/v1/load_lora_adapter",
    operation_id = "load_adapter_vllm",
    request_body = LoadAdapter,
    responses(
        (status = 200, description = "Requests may name it", body = String),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn load(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    let name = load_one(&state, body).await?;
    Ok(format!("Success: LoRA adapter '{name}' added successfully.").into_response())
}

/// Unloads an adapter. Requests that already use it finish.
#[utoipa::path(
    post,
    path = "/v1/unload_lora_adapter",
    operation_id = "unload_adapter_vllm",
    request_body = UnloadAdapter,
    responses(
        (status = 200, description = "No further request may name it", body = String),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn unload(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    let name = unload_one(&state, body).await?;
    Ok(format!("Success: LoRA adapter '{name}' removed successfully.").into_response())
}

/// Loads an adapter.
#[utoipa::path(
    post,
    path = "/load_lora_adapter",
    operation_id = "load_adapter_sglang",
    request_body = LoadAdapter,
    responses(
        (status = 200, description = "Requests may name it", body = LoadedAdapters),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn load_listed(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    load_one(&state, body).await?;
    Ok(listed(&state))
}

/// Unloads an adapter. Requests that already use it finish.
#[utoipa::path(
    post,
    path = "/unload_lora_adapter",
    operation_id = "unload_adapter_sglang",
    request_body = UnloadAdapter,
    responses(
        (status = 200, description = "No further request may name it", body = LoadedAdapters),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn unload_listed(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    unload_one(&state, body).await?;
    Ok(listed(&state))
}

/// Lists the loaded adapters.
#[utoipa::path(
    get,
    path = "/lora-adapters",
    operation_id = "list_adapters",
    responses((status = 200, description = "The adapters", body = Vec<ListedAdapter>)),
)]
pub(crate) async fn list(State(state): State<Shared>) -> Response {
    let all = state.adapters.iter().flat_map(Adapters::all);
    let all: Vec<ListedAdapter> = all
        .map(|adapter| ListedAdapter {
            id: adapter.id,
            name: adapter.name.clone(),
            path: adapter.path.display().to_string(),
            scale: 0.0,
        })
        .collect();
    reply::ok(&all)
}

fn listed(state: &Shared) -> Response {
    let all = state.adapters.iter().flat_map(Adapters::all);
    let paths = all.map(|adapter| (adapter.name.clone(), adapter.path.display().to_string()));
    reply::ok(&LoadedAdapters { success: true, loaded_adapters: paths.collect() })
}

async fn load_one(state: &Shared, body: Upload) -> Result<String, ApiError> {
    let LoadAdapter { lora_name, lora_path, load_inplace } = small(state, body).await?;
    let adapters = adapters(state)?;
    check_adapter_name(&lora_name).map_err(|reason| ApiError::invalid("lora_name", reason))?;
    if state.model.is_called(&lora_name) {
        return Err(ApiError::invalid("lora_name", format!("`{lora_name}` is the model's name")));
    }
    adapters.load(&lora_name, lora_path, load_inplace).await?;
    Ok(lora_name)
}

async fn unload_one(state: &Shared, body: Upload) -> Result<String, ApiError> {
    let UnloadAdapter { lora_name } = small(state, body).await?;
    adapters(state)?.unload(&lora_name)?;
    Ok(lora_name)
}

fn adapters(state: &Shared) -> Result<&Adapters, ApiError> {
    state.adapters.as_ref().ok_or_else(|| {
        let reason = "the server was started without --enable-lora".to_owned();
        ApiError::Forbidden { reason, code: "lora_not_enabled" }
    })
}

/// Accepts a request with an admin key, or any request if the server can be reached only from the
/// local machine.
pub(super) async fn check_adapters(
    State(state): State<Shared>,
    key: forebay_http::KeyId,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    let is_open = state.adapters.as_ref().is_none_or(Adapters::is_open);
    check_operator(state, key, request, next, is_open, "adapters are loaded").await
}

/// Accepts a request with an admin key. If there are no admin keys, accepts all requests if
/// `is_open`, that is, if the server can be reached only from the local machine. `what` names the
/// action in errors.
pub(super) async fn check_operator(
    state: Shared,
    key: forebay_http::KeyId,
    request: axum::extract::Request,
    next: axum::middleware::Next,
    is_open: bool,
    what: &str,
) -> Response {
    if is_open || !state.config.admin_keys.is_empty() {
        return super::layers::check_admin(State(state), key, request, next).await;
    }
    let reason = format!(
        "{what} only with an admin key: start the server with --admin-api-key, or let it listen on this machine only"
    );
    Failure(ApiError::Forbidden { reason, code: "admin_key_needed" }).into_response()
}
