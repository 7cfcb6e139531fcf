//! Pauses, and weight updates at run time, with the routes of vLLM and SGLang.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use forebay_engine::PauseMode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::limits::{Upload, query, small};
use crate::reply::{self, Failure};
use crate::state::Shared;
use crate::weights::{Source, Update};

/// A pause, with vLLM's parameters.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct PauseQuery {
    /// `abort` (default): running requests are aborted; `wait`: they are finished first; `keep`:
    /// they continue after the pause.
    mode: Option<String>,
    /// The older name of `mode=wait`.
    #[serde(default)]
    wait_for_inflight_requests: bool,
    /// True if the prefix cache is emptied. Kept requests are then computed again.
    #[serde(default = "yes")]
    clear_cache: bool,
}

/// A pause, with SGLang's parameters.
#[derive(Deserialize, ToSchema)]
pub(crate) struct PauseGeneration {
    /// `abort` (default): running requests are aborted; `retract`: they free their pages and are
    /// queued again; `in_place`: they keep their pages.
    mode: Option<String>,
}

/// The state of a pause.
#[derive(Serialize, ToSchema)]
pub(crate) struct PauseState {
    /// `paused` or `resumed`.
    status: &'static str,
    /// The number of requests that continue after the pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_paused_requests: Option<usize>,
}

/// Whether generation is paused.
#[derive(Serialize, ToSchema)]
pub(crate) struct IsPaused {
    is_paused: bool,
}

/// The weights to load.
#[derive(Deserialize, ToSchema)]
pub(crate) struct UpdateWeights {
    /// A folder or GGUF file on the server's machine, with the same architecture and shapes as the
    /// served model.
    #[schema(value_type = String)]
    model_path: PathBuf,
    /// `auto`, or null.
    load_format: Option<String>,
    /// True if running requests are aborted before the update. Otherwise they continue with the new
    /// weights.
    #[serde(default)]
    abort_all_requests: bool,
    /// The version that later responses report.
    weight_version: Option<String>,
    /// True if generation stays paused after the update.
    #[serde(default)]
    keep_pause: bool,
}

/// The outcome of an update.
#[derive(Serialize, ToSchema)]
pub(crate) struct WeightsUpdated {
    success: bool,
    message: String,
    /// The number of requests that continue with the new weights.
    num_paused_requests: usize,
}

/// A new name for the weights.
#[derive(Deserialize, ToSchema)]
pub(crate) struct NameWeights {
    /// The version that later responses report.
    new_version: String,
    /// True if running requests are aborted.
    #[serde(default)]
    abort_all_requests: bool,
}

/// The name of the weights.
#[derive(Serialize, ToSchema)]
pub(crate) struct WeightsName {
    weight_version: String,
}

fn yes() -> bool {
    true
}

/// Pauses generation: no step is computed, and new requests wait.
#[utoipa::path(
    post,
    path = "/pause",
    operation_id = "pause_vllm",
    params(PauseQuery),
    responses(
        (status = 200, description = "Nothing is computed", body = PauseState),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn pause(State(state): State<Shared>, uri: Uri) -> Result<Response, Failure> {
    let PauseQuery { mode, wait_for_inflight_requests, clear_cache } = query(&uri)?;
    let usual = if wait_for_inflight_requests { "wait" } else { "abort" };
    let mode = match mode.as_deref().unwrap_or(usual) {
        "abort" => PauseMode::Abort,
        "wait" => PauseMode::Wait,
        "keep" if clear_cache => PauseMode::Retract,
        "keep" => PauseMode::Keep,
        other => return Err(Failure(unknown_mode(other, "abort, wait or keep"))),
    };
    paused(&state, mode, clear_cache).await
}

/// Pauses generation: no step is computed, and new requests wait.
#[utoipa::path(
    post,
    path = "/pause_generation",
    operation_id = "pause_sglang",
    request_body = PauseGeneration,
    responses(
        (status = 200, description = "Nothing is computed", body = PauseState),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn pause_generation(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    let PauseGeneration { mode } = small(&state, body).await?;
    let mode = match mode.as_deref().unwrap_or("abort") {
        "abort" => PauseMode::Abort,
        "retract" => PauseMode::Retract,
        "in_place" => PauseMode::Keep,
        other => return Err(Failure(unknown_mode(other, "abort, retract or in_place"))),
    };
    paused(&state, mode, false).await
}

/// Ends a pause.
#[utoipa::path(
    post,
    path = "/resume",
    operation_id = "resume_vllm",
    responses((status = 200, description = "Requests go on", body = PauseState)),
)]
pub(crate) async fn resume(State(state): State<Shared>) -> Response {
    state.weights.resume().await;
    reply::ok(&PauseState { status: "resumed", num_paused_requests: None })
}

/// Ends a pause.
#[utoipa::path(
    post,
    path = "/continue_generation",
    operation_id = "resume_sglang",
    responses((status = 200, description = "Requests go on", body = PauseState)),
)]
pub(crate) async fn continue_generation(state: State<Shared>) -> Response {
    resume(state).await
}

/// Reports whether generation is paused.
#[utoipa::path(
    get,
    path = "/is_paused",
    operation_id = "is_paused",
    responses((status = 200, description = "The state", body = IsPaused)),
)]
pub(crate) async fn is_paused(State(state): State<Shared>) -> Response {
    reply::ok(&IsPaused { is_paused: state.weights.is_paused() })
}

/// Loads other weights of the same shapes. Running requests continue with the new weights, or are
/// aborted.
#[utoipa::path(
    post,
    path = "/update_weights_from_disk",
    operation_id = "update_weights_from_disk",
    request_body = UpdateWeights,
    responses(
        (status = 200, description = "All replicas compute with them", body = WeightsUpdated),
        (status = 400, description = "They can't be loaded; the last ones compute on", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn update(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    let update: UpdateWeights = small(&state, body).await?;
    if let Some(format) = update.load_format.filter(|format| format != "auto") {
        let reason = format!("`load_format` {format:?} is not served: auto, or null");
        return Err(Failure(ApiError::invalid("load_format", reason)));
    }
    let weights = Arc::clone(&state.weights);
    let updated = weights.update(Update {
        source: Source::Path(update.model_path),
        param: "model_path",
        version: update.weight_version,
        aborts: update.abort_all_requests,
        keeps_pause: update.keep_pause,
    });
    Ok(updated_answer(updated.await?))
}

/// Creates the response to an update that succeeded.
pub(super) fn updated_answer(num_paused_requests: usize) -> Response {
    let message = "Succeeded to update model weights.".to_owned();
    reply::ok(&WeightsUpdated { success: true, message, num_paused_requests })
}

/// Changes the name of the weights that responses report.
#[utoipa::path(
    post,
    path = "/update_weight_version",
    operation_id = "update_weight_version",
    request_body = NameWeights,
    responses(
        (status = 200, description = "Answers have the name", body = WeightsName),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn rename(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    let NameWeights { new_version, abort_all_requests } = small(&state, body).await?;
    let version = version(&state)?;
    version.set(&new_version)?;
    if abort_all_requests {
        state.abort_all();
    }
    Ok(reply::ok(&WeightsName { weight_version: new_version }))
}

/// Returns the name of the weights.
#[utoipa::path(
    get,
    path = "/get_weight_version",
    operation_id = "weight_version",
    responses(
        (status = 200, description = "The name", body = WeightsName),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn name(State(state): State<Shared>) -> Result<Response, Failure> {
    let weight_version = version(&state)?.now().to_string();
    Ok(reply::ok(&WeightsName { weight_version }))
}

fn version(state: &Shared) -> Result<&crate::weights::WeightVersion, ApiError> {
    state.weights.version().ok_or_else(|| {
        let reason = "the weights of this server do not change".to_owned();
        ApiError::Forbidden { reason, code: "weights_fixed" }
    })
}

async fn paused(state: &Shared, mode: PauseMode, clears: bool) -> Result<Response, Failure> {
    let left = Arc::clone(&state.weights).pause(mode, clears).await?;
    Ok(reply::ok(&PauseState { status: "paused", num_paused_requests: Some(left) }))
}

fn unknown_mode(mode: &str, known: &str) -> ApiError {
    ApiError::invalid("mode", format!("`mode`: {mode:?} is not {known}"))
}

/// Accepts a request with an admin key, or any request if the server can be reached only from the
/// local machine.
pub(super) async fn check_weights(
    State(state): State<Shared>,
    key: forebay_http::KeyId,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    let is_open = state.weights.is_open();
    let what = "weights are changed, and generation is paused,";
    super::adapters::check_operator(state, key, request, next, is_open, what).await
}
