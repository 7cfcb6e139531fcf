//! Replicas that are taken out of the set, and put back.

use axum::extract::{Path, State};
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use serde::Serialize;
use utoipa::ToSchema;

use crate::reply::{self, Failure};
use crate::state::Shared;

/// The state of a replica: drained, or open to new requests.
#[derive(Serialize, ToSchema)]
pub(crate) struct Drained {
    /// The number of the replica.
    replica: u32,
    /// True if the replica gets no new requests.
    drained: bool,
    /// Replicas that get new requests now. None: requests are answered 503, and /health says
    /// `drained`.
    taking: usize,
}

/// Sends no new requests to a replica. Its own requests are finished.
#[utoipa::path(
    post,
    path = "/replicas/{replica}/drain",
    params(("replica" = u32, Path, description = "The replica's number")),
    responses(
        (status = 200, description = "It gets no new requests", body = Drained),
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
        (status = 200, description = "It gets requests again", body = Drained),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn resume(
    State(state): State<Shared>,
    Path(replica): Path<String>,
) -> Result<Response, Failure> {
    set(&state, &replica, false)
}

fn set(state: &Shared, replica: &str, drained: bool) -> Result<Response, Failure> {
    let number = replica.parse::<u32>().ok();
    match number.filter(|&at| state.engine.drain_replica(at as usize, drained)) {
        Some(replica) => {
            let all = state.engine.replicas();
            let taking = all.iter().filter(|replica| !replica.drained).count();
            Ok(reply::ok(&Drained { replica, drained, taking }))
        }
        None => {
            let most = state.engine.count().saturating_sub(1);
            let reason = format!("`{replica}` is not a replica from 0 to {most}");
            Err(Failure(ApiError::invalid("replica", reason)))
        }
    }
}
