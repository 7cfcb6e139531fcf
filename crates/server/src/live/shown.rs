//! The state of the replicas in the form that viewers receive.

use std::sync::Arc;

use forebay_engine::{EngineHandle, RequestView};
use forebay_replicas::ReplicaReport;
use forebay_webui::Watchers;
use parking_lot::Mutex;
use tokio::sync::watch;

/// The viewers, and the snapshots shown to them.
#[derive(Default)]
pub(crate) struct Live {
    pub(super) watchers: Watchers,
    /// The latest snapshot; `None`: there is no viewer, so the engines are not queried.
    pub(super) shown: Mutex<Option<watch::Receiver<Arc<Snapshot>>>>,
}

/// The state of all replicas at one time.
#[derive(Default)]
pub(super) struct Snapshot {
    pub(super) now_us: u64,
    pub(super) replicas: Vec<ReplicaState>,
}

/// The state of a replica.
pub(super) struct ReplicaState {
    pub(super) engine: EngineHandle,
    pub(super) report: ReplicaReport,
    /// The requests of the replica.
    pub(super) views: Arc<[RequestView]>,
}
