//! Calls whose response is not finished.

use std::sync::Arc;

use forebay_api::peer::RouterTag;
use forebay_engine::RequestId;

use crate::peers::Peer;
use crate::state::{Inner, Shared};

impl Inner {
    /// Counts a call from `peer` until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>, peer: &Peer) -> LiveGuard {
        let tag = peer.tag();
        self.book.enter(tag);
        LiveGuard { state: Arc::clone(self), tag: tag.copied() }
    }
}

/// A guard that counts a call as alive until it is dropped.
pub(crate) struct LiveGuard {
    state: Shared,
    tag: Option<RouterTag>,
}

impl LiveGuard {
    /// Records that the call has submitted an engine request.
    pub(crate) fn submitted(&self, id: RequestId) {
        if let Some(tag) = &self.tag {
            self.state.book.submitted(tag, id.0);
        }
    }
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        self.state.book.leave(self.tag.as_ref());
    }
}
