//! Weight updates from a trainer's process group, with the routes of SGLang.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::limits::{Upload, small, whole};
use crate::reply::{self, Failure};
use crate::state::Shared;
use crate::trainer::SentTensors;
use crate::weight_files::{NamedTensor, TrainerGroup};

use super::weights::{WeightsUpdated, updated_answer};

/// The trainer's group to join.
#[derive(Deserialize, ToSchema)]
pub(crate) struct InitGroup {
    /// The trainer's host, where the ranks meet.
    master_address: String,
    /// The port of the trainer's host.
    master_port: u16,
    /// The rank of this server, at least 1: the trainer has rank 0. A server is one rank, whatever
    /// its `--tp-size`.
    #[serde(default = "first_rank")]
    rank_offset: u32,
    /// The number of ranks.
    world_size: u32,
    #[serde(default = "usual_name")]
    group_name: String,
    /// `gloo`. SGLang's default, `nccl`, is not supported.
    #[serde(default = "usual_backend")]
    backend: String,
}

/// The group to leave.
#[derive(Deserialize, ToSchema)]
pub(crate) struct DestroyGroup {
    #[serde(default = "usual_name")]
    group_name: String,
}

/// The tensors that the trainer now broadcasts, in this order.
#[derive(Deserialize, ToSchema)]
pub(crate) struct UpdateFromGroup {
    /// Names of tensors of the served checkpoint.
    names: Vec<String>,
    /// The types of the tensors, such as `bfloat16` or `torch.bfloat16`.
    dtypes: Vec<String>,
    /// The shapes of the tensors.
    shapes: Vec<Vec<u64>>,
    #[serde(default = "usual_name")]
    group_name: String,
    /// `auto`, or null.
    load_format: Option<String>,
    /// True if later requests send further tensors of the same update: nothing is loaded before the
    /// last request.
    #[serde(default)]
    more: bool,
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

/// The outcome of a command.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderOutcome {
    success: bool,
    message: String,
}

fn first_rank() -> u32 {
    1
}

fn usual_name() -> String {
    "weight_update_group".to_owned()
}

fn usual_backend() -> String {
    "nccl".to_owned()
}

/// Joins a trainer's process group. Responds when all ranks have joined.
#[utoipa::path(
    post,
    path = "/init_weights_update_group",
    operation_id = "init_weights_update_group",
    request_body = InitGroup,
    responses(
        (status = 200, description = "All ranks have met", body = OrderOutcome),
        (status = 400, description = "They did not meet", body = ErrorBody),
        (status = 409, description = "There is a group", body = ErrorBody),
        (status = 501, description = "The backend is not served", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn init(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    let asked: InitGroup = small(&state, body).await?;
    let InitGroup { master_address, master_port, rank_offset, world_size, .. } = asked;
    if asked.backend != "gloo" {
        let reason = format!(
            "`backend` {:?} is not served: make the group with gloo, or send safetensors to /update_weights_from_tensor",
            asked.backend
        );
        return Err(Failure(ApiError::NotImplemented { reason }));
    }
    if rank_offset == 0 || rank_offset >= world_size {
        let reason = format!(
            "`rank_offset` is {rank_offset}: the trainer is rank 0, and `world_size` is {world_size}"
        );
        return Err(Failure(ApiError::invalid("rank_offset", reason)));
    }
    let group = TrainerGroup {
        address: master_address,
        port: master_port,
        rank: rank_offset,
        world_size,
        name: asked.group_name,
    };
    Arc::clone(&state.trainer).join(group).await?;
    Ok(obeyed("Succeeded to initialize the process group."))
}

/// Leaves a trainer's process group.
#[utoipa::path(
    post,
    path = "/destroy_weights_update_group",
    operation_id = "destroy_weights_update_group",
    request_body = DestroyGroup,
    responses(
        (status = 200, description = "It was left", body = OrderOutcome),
        (status = 400, description = "There is no such group", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn destroy(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    let DestroyGroup { group_name } = small(&state, body).await?;
    state.trainer.leave(&group_name).await?;
    Ok(obeyed("Succeeded to destroy the process group."))
}

/// Receives tensors from a trainer's process group. Running requests continue with the new tensors,
/// or are aborted.
#[utoipa::path(
    post,
    path = "/update_weights_from_distributed",
    operation_id = "update_weights_from_distributed",
    request_body = UpdateFromGroup,
    responses(
        (status = 200, description = "All replicas compute with them, or more are to come", body = WeightsUpdated),
        (status = 400, description = "They can't be had or loaded; the last ones compute on", body = ErrorBody),
        (status = 409, description = "Another update is being received", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn update(State(state): State<Shared>, body: Upload) -> Result<Response, Failure> {
    // A large model has many names, so the body may exceed the usual limit of admin requests.
    let (body, _charge) = whole(body, &state).await?;
    let sent: UpdateFromGroup = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid("body", format!("the body: {error}")))?;
    let UpdateFromGroup { names, dtypes, shapes, .. } = sent;
    if let Some(format) = sent.load_format.filter(|format| format != "auto") {
        let reason = format!("`load_format` {format:?} is not served: auto, or null");
        return Err(Failure(ApiError::invalid("load_format", reason)));
    }
    if names.is_empty() || names.len() != dtypes.len() || names.len() != shapes.len() {
        let reason = format!(
            "`names`, `dtypes` and `shapes` have {}, {} and {} entries: each needs the same number, at least one",
            names.len(),
            dtypes.len(),
            shapes.len()
        );
        return Err(Failure(ApiError::invalid("names", reason)));
    }
    let tensors = names.into_iter().zip(dtypes).zip(shapes);
    let tensors = tensors.map(|((name, dtype), shape)| NamedTensor { name, dtype, shape });
    let sent = SentTensors {
        group: sent.group_name,
        tensors: tensors.collect(),
        more: sent.more,
        version: sent.weight_version,
        aborts: sent.abort_all_requests,
        keeps_pause: sent.keep_pause,
    };
    Ok(match Arc::clone(&state.trainer).receive(sent).await? {
        Some(left) => updated_answer(left),
        None => obeyed("Received the tensors; the update has more."),
    })
}

fn obeyed(message: &str) -> Response {
    reply::ok(&OrderOutcome { success: true, message: message.to_owned() })
}
