//! Draining and resuming replicas, and their roles.

use axum::extract::{Path, State};
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use forebay_replicas::Role;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::limits::{Upload, small};
use crate::reply::{self, Failure};
use crate::state::Shared;

/// Whether a replica is drained or accepts new requests.
#[derive(Serialize, ToSchema)]
pub(crate) struct DrainState {
    /// The number of the replica.
    replica: u32,
    /// True if the replica gets no new requests.
    drained: bool,
    /// The number of replicas that accept new requests. 0: requests get a 503, and /health reports
    /// `drained`.
    taking: usize,
}

/// Stops new requests to a replica. Requests that the replica already has finish.
#[utoipa::path(
    post,
    path = "/replicas/{replica}/drain",
    params(("replica" = u32, Path, description = "The replica's number")),
    responses(
        (status = 200, description = "It gets no new requests", body = DrainState),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn drain(
    State(state): State<Shared>,
    Path(replica): Path<String>,
) -> Result<Response, Failure> {
    set(&state, &replica, true)
}

/// Sends requests to a drained replica again.
#[utoipa::path(
    post,
    path = "/replicas/{replica}/resume",
    params(("replica" = u32, Path, description = "The replica's number")),
    responses(
        (status = 200, description = "It gets requests again", body = DrainState),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn resume(
    State(state): State<Shared>,
    Path(replica): Path<String>,
) -> Result<Response, Failure> {
    set(&state, &replica, false)
}

/// The new role of a replica.
#[derive(Deserialize, ToSchema)]
pub(crate) struct NewRole {
    /// `prefill`: prompts and first tokens; `decode`: later tokens; `both`.
    role: String,
}

/// The role of a replica, and the roles of all replicas.
#[derive(Serialize, ToSchema)]
pub(crate) struct ReplicaRole {
    /// The number of the replica.
    replica: u32,
    /// The role of the replica.
    role: &'static str,
    /// The role of each replica.
    roles: Vec<&'static str>,
}

/// Sets the role of a replica (disaggregated prefill). Requests that the replica already has finish
/// there, or move to another replica after their first token as planned.
#[utoipa::path(
    post,
    path = "/replicas/{replica}/role",
    operation_id = "set_role",
    params(("replica" = u32, Path, description = "The replica's number")),
    request_body = NewRole,
    responses(
        (status = 200, description = "It has the role", body = ReplicaRole),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn role(
    State(state): State<Shared>,
    Path(replica): Path<String>,
    body: Upload,
) -> Result<Response, Failure> {
    let NewRole { role: name } = small(&state, body).await?;
    let Some(role) = Role::ALL.into_iter().find(|role| role.name() == name) else {
        let names = Role::ALL.map(Role::name).join(", ");
        return Err(Failure(ApiError::invalid("role", format!("`{name}` is not one of {names}"))));
    };
    if !state.engine.has_roles() {
        let reason = "replicas have roles where the server was started with --pd";
        return Err(Failure(ApiError::invalid("role", reason.to_owned())));
    }
    let number = replica.parse::<u32>().ok();
    match number.filter(|&at| state.engine.set_role(at as usize, role)) {
        Some(replica) => {
            let roles = state.engine.replicas().iter().map(|one| one.role.name()).collect();
            Ok(reply::ok(&ReplicaRole { replica, role: role.name(), roles }))
        }
        None => Err(no_such(&state, &replica)),
    }
}

fn set(state: &Shared, replica: &str, drained: bool) -> Result<Response, Failure> {
    let number = replica.parse::<u32>().ok();
    match number.filter(|&at| state.engine.drain_replica(at as usize, drained)) {
        Some(replica) => {
            let all = state.engine.replicas();
            let taking = all.iter().filter(|replica| !replica.drained).count();
            Ok(reply::ok(&DrainState { replica, drained, taking }))
        }
        None => Err(no_such(state, replica)),
    }
}

fn no_such(state: &Shared, replica: &str) -> Failure {
    let most = state.engine.count().saturating_sub(1);
    Failure(ApiError::invalid("replica", format!("`{replica}` is not a replica from 0 to {most}")))
}
