//! The state of a pause.

use std::collections::BTreeSet;

use crate::types::{PauseMode, PauseReply};

/// A pause that was requested.
pub(super) struct Pause {
    pub(super) mode: PauseMode,
    /// True if no step is in flight and none will be planned.
    pub(super) has_begun: bool,
    pub(super) replies: Vec<PauseReply>,
    /// Requests that arrived after the pause was requested in the mode `Wait`, while earlier
    /// requests were being finished.
    pub(super) kept_back: BTreeSet<u64>,
}

impl Pause {
    /// True if a new request has to wait for the end of the pause, because only earlier requests
    /// are being finished.
    pub(super) fn keeps_back(&mut self, id: u64) -> bool {
        self.mode == PauseMode::Wait && self.kept_back.insert(id)
    }

    pub(super) fn has_kept_back(&self, id: u64) -> bool {
        self.kept_back.contains(&id)
    }

    pub(super) fn forget(&mut self, id: u64) {
        self.kept_back.remove(&id);
    }
}
