//! Calls whose response is not finished.

use std::sync::Arc;

use crate::peers::Peer;
use crate::state::{Inner, Shared};

impl Inner {
    /// Counts a call, which `peer` sent, until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>, peer: &Peer) -> LiveGuard {
        let tag = peer.tag();
        self.book.enter(tag);
        LiveGuard { state: Arc::clone(self), router: tag.map(|tag| tag.router) }
    }
}

/// Counts a call as alive.
pub(crate) struct LiveGuard {
    state: Shared,
    router: Option<u64>,
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        self.state.book.leave(self.router);
    }
}
