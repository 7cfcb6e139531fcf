//! The engine as other threads see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::executor::Wake;
use crate::types::{EngineRequest, Facts, Orphan, RequestId, Stats, Status, SubmitError};

/// An order to the engine thread. One lane for all keeps an abort behind its submit; submits are bounded by [`Shared::queued`], the
/// rest must not be.
pub(crate) enum Order {
    Submit { request: Box<EngineRequest>, at_us: u64 },
    Adopt(Box<Orphan>),
    HandOver,
    Abort(RequestId),
    FlushCache(Box<dyn FnOnce(bool) + Send>),
    Run(Box<dyn FnOnce() + Send>),
    Stop,
}

/// What handles and the engine thread share.
pub(crate) struct Shared {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) waker: Arc<dyn Wake>,
    /// Requests submitted and never yet admitted.
    pub(crate) queued: Arc<AtomicUsize>,
    pub(crate) max_queued: usize,
    pub(crate) draining: AtomicBool,
    pub(crate) status: Mutex<Status>,
    pub(crate) stats: Mutex<Stats>,
    pub(crate) facts: Mutex<Option<Facts>>,
}

/// Submits to, asks and steers an engine thread. Cheap to clone; no call blocks.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) orders: Sender<Order>,
}

impl EngineHandle {
    /// Gives a request to the engine. Exactly one output with `finish` will follow.
    ///
    /// # Errors
    /// The queue is full, the server drains, or the hand is gone for good.
    pub fn submit(&self, request: EngineRequest) -> Result<(), SubmitError> {
        let shared = &self.shared;
        if shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Draining);
        }
        match &*shared.status.lock() {
            Status::Failed(reason) => return Err(SubmitError::Unavailable(reason.clone())),
            Status::Starting(stage) => {
                return Err(SubmitError::Unavailable(format!("it is still starting ({stage})")));
            }
            Status::Ready | Status::Recovering(_) | Status::Draining => {}
        }
        let limit = shared.max_queued;
        let take = |queued| (queued < limit).then_some(queued + 1);
        shared
            .queued
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
            .map_err(|_| SubmitError::QueueFull { limit })?;
        if self
            .orders
            .send(Order::Submit { request: Box::new(request), at_us: shared.clock.now_us() })
            .is_err()
        {
            return Err(SubmitError::Unavailable("the engine thread has ended".into()));
        }
        shared.waker.wake();
        Ok(())
    }

    /// Has the engine go on with a request that another one has lost. It counts as queued there already, or never will.
    pub fn adopt(&self, orphan: Orphan) {
        self.order(Order::Adopt(Box::new(orphan)));
    }

    /// Another replica can take requests over: if the engine has no hand, it gives its own away.
    pub fn hand_over(&self) {
        self.order(Order::HandOver);
    }

    /// Ends a request. Its terminal output has [`crate::FinishReason::Abort`], unless it ended by itself before.
    pub fn abort(&self, id: RequestId) {
        self.order(Order::Abort(id));
    }

    /// Drops every unreferenced block of the prefix cache; `reply` gets false when running requests kept some.
    pub fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>) {
        self.order(Order::FlushCache(reply));
    }

    /// Has the engine thread do `work` between two steps. Everything waits meanwhile: it is there to measure what it costs to do work here
    /// that other threads could do.
    pub fn run(&self, work: Box<dyn FnOnce() + Send>) {
        self.order(Order::Run(work));
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Aborts what is alive, stops the hand and ends the thread.
    pub fn stop(&self) {
        self.drain();
        self.order(Order::Stop);
    }

    /// The state that /health shows.
    #[must_use]
    pub fn status(&self) -> Status {
        let status = self.shared.status.lock().clone();
        match status {
            Status::Failed(_) => status,
            _ if self.shared.draining.load(Ordering::Acquire) => Status::Draining,
            _ => status,
        }
    }

    /// The snapshot after the last step.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *self.shared.stats.lock()
    }

    /// The hand's facts; `None` until it was ready for the first time.
    #[must_use]
    pub fn facts(&self) -> Option<Facts> {
        self.shared.facts.lock().clone()
    }

    /// Most requests that may wait.
    #[must_use]
    pub fn max_queued(&self) -> usize {
        self.shared.max_queued
    }

    fn order(&self, order: Order) {
        // A closed lane means that the thread has ended, and with it every request.
        if self.orders.send(order).is_ok() {
            self.shared.waker.wake();
        }
    }
}
