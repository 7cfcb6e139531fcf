//! The load of the server.

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use forebay_api::peer::{LoadReport, QueuedDispatch};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::info::internal_state;
use crate::limits;
use crate::pd::side::Pd;
use crate::peers::{Peer, queued, report, wait};
use crate::reply::{self, Failure};
use crate::state::Shared;

/// The maximum number of waiting dispatches in a report to a router.
const MOST_QUEUED: usize = 64;

/// When to respond, and which details to include.
#[derive(Debug, Deserialize)]
pub(crate) struct LoadsAt {
    /// Seconds to wait until the number of requests differs from `requests`.
    #[serde(default)]
    wait: f64,
    requests: Option<usize>,
    /// The number of the router's own waiting dispatches to list.
    #[serde(default)]
    queued: usize,
}

/// The load of the whole server and of each replica.
#[derive(Serialize, ToSchema)]
pub(crate) struct Loads {
    /// The report that routers get: `requests` are alive, `running` choices have a slot, and
    /// `waiting` choices have none. `tokens` are left to compute, and `pages_free` pages are
    /// available.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    report: LoadReport,
    /// One object per replica: its running requests and its counters.
    #[schema(value_type = Vec<Object>)]
    loads: Vec<Value>,
    /// The latest dispatches of the requesting router that wait and were never admitted, with the
    /// number of tokens of their prompts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    queued: Vec<QueuedDispatch>,
    /// `prefill` or `decode` if the server computes prompts for other servers or has them computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregation_mode: Option<&'static str>,
}

/// Returns the server's load, now or when it changes.
#[utoipa::path(
    get,
    path = "/v1/loads",
    params(
        ("wait" = Option<f64>, Query, description = "Seconds to wait until the number of requests is another than `requests`"),
        ("requests" = Option<u64>, Query, description = "The number of requests that the client knows of"),
        ("queued" = Option<u64>, Query, description = "The number of its waiting requests that a router wants to hear of, at most 64"),
    ),
    responses((status = 200, description = "The load", body = Loads)),
)]
pub(crate) async fn loads(
    State(state): State<Shared>,
    uri: Uri,
    peer: Peer,
) -> Result<Response, Failure> {
    let when: LoadsAt = limits::query(&uri)?;
    let limit = wait(when.wait)?;
    if let Some(known) = when.requests {
        let mut live = state.book.watch();
        // After the time limit, the unchanged load is returned.
        let _ = timeout(limit, live.wait_for(|&live| live != known)).await;
    }
    let router = peer.tag().map(|tag| tag.router);
    let queued = match router.filter(|_| when.queued > 0) {
        Some(router) => queued(&state, router, when.queued.min(MOST_QUEUED)).await,
        None => Vec::new(),
    };
    let report = report(&state, router);
    let loads = state.engine.replicas().iter().map(internal_state).collect();
    let disaggregation_mode = state.pd.as_ref().map(Pd::mode);
    Ok(reply::ok(&Loads { report, loads, queued, disaggregation_mode }))
}
