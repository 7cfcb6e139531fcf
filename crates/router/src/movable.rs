//! A backend's dispatches that may still move, because nothing of their answers has arrived.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::ask::Ask;

/// The dispatches of one backend that may move, by dispatch number.
#[derive(Debug, Default)]
pub(crate) struct Movable(Mutex<BTreeMap<u64, Waiter>>);

#[derive(Debug)]
struct Waiter {
    ask: Arc<Ask>,
    order: oneshot::Sender<u32>,
}

impl Movable {
    /// Registers a dispatch that may move until the returned entry is dropped.
    pub(crate) fn enter(self: &Arc<Self>, seq: u64, ask: &Arc<Ask>) -> Place {
        let (order, ordered) = oneshot::channel();
        self.0.lock().insert(seq, Waiter { ask: Arc::clone(ask), order });
        Place { movable: Arc::clone(self), seq, ordered }
    }

    /// True if none of the dispatches may move.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Returns the request of a dispatch that may move.
    pub(crate) fn ask(&self, seq: u64) -> Option<Arc<Ask>> {
        self.0.lock().get(&seq).map(|waiter| Arc::clone(&waiter.ask))
    }

    /// Orders a dispatch to end, so that its request goes to backend `to`. Returns false if the
    /// dispatch may not move any more.
    pub(crate) fn order(&self, seq: u64, to: u32) -> bool {
        let waiter = self.0.lock().remove(&seq);
        waiter.is_some_and(|waiter| waiter.order.send(to).is_ok())
    }
}

/// A dispatch's entry in the list of dispatches that may move. Dropping it removes the entry.
#[derive(Debug)]
pub(crate) struct Place {
    movable: Arc<Movable>,
    seq: u64,
    ordered: oneshot::Receiver<u32>,
}

impl Place {
    /// Polls for an order to move. Ready with the backend to which the request should move.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<u32> {
        match Pin::new(&mut self.ordered).poll(context) {
            Poll::Ready(Ok(to)) => Poll::Ready(to),
            // The sender is dropped only when this entry is dropped.
            Poll::Ready(Err(_)) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.movable.0.lock().remove(&self.seq);
    }
}
