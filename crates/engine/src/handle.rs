//! The handle through which other threads use the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crossbeam_channel::Sender;
use forebay_protocol::AdapterOrder;
use forebay_scheduler::{
    BlockHash, ImageId, LoanId, MAX_REQUEST_WORDS, Request, RequestView, image_words, request_words,
};
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::executor::Wake;
use crate::journal::{Journal, Moment, Since, StepNote};
use crate::member::PayloadDelivery;
use crate::picture::Placed;
use crate::types::{
    Arrival, EngineRequest, Entrant, Facts, LoanReply, Orphan, PauseMode, PauseReply, Reload,
    RequestId, Stats, Status, SubmitError,
};
use crate::waiting::{Place, WaitingPlaces};

/// An order to the engine thread. All orders share one channel, so an abort always follows the
/// submit of its request. [`Shared::queued`] bounds submits; other orders must not be bounded.
pub(crate) enum Order {
    Submit {
        request: Box<EngineRequest>,
        arrival: Arrival,
    },
    Adopt(Box<Orphan>),
    HandOver,
    /// A waiting request may move to the replica with this number.
    Spare(usize),
    Abort(RequestId),
    Placed {
        image: ImageId,
        placed: Placed,
    },
    Carried(PayloadDelivery),
    Adapter(AdapterOrder),
    /// Another replica needs these blocks for a request.
    Lend(Vec<BlockHash>, LoanReply),
    /// No reader of the loan's pages is left.
    TakeBack(LoanId),
    /// Queries whether one of these blocks is being saved, or will be.
    WillSave(Vec<BlockHash>, Box<dyn FnOnce(bool) + Send>),
    FlushCache(Box<dyn FnOnce(bool) + Send>),
    Pause(PauseMode, PauseReply),
    Resume,
    Reload(Reload),
    Run(Box<dyn FnOnce() + Send>),
    Look(Box<dyn FnOnce(Vec<RequestView>) + Send>),
    Stop,
}

/// The state that handles and the engine thread share.
pub(crate) struct Shared {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) waker: Arc<dyn Wake>,
    /// Counts requests that were submitted and not admitted yet.
    pub(crate) queued: Arc<WaitingPlaces>,
    pub(crate) max_queued: usize,
    pub(crate) page_size: u32,
    pub(crate) fair: bool,
    /// The largest number of positions of a request at this engine; 0 until the hand is ready.
    pub(crate) room: AtomicU32,
    pub(crate) draining: AtomicBool,
    pub(crate) status: Mutex<Status>,
    pub(crate) stats: Mutex<Stats>,
    pub(crate) facts: Mutex<Option<Facts>>,
    pub(crate) journal: Journal,
    pub(crate) size: Size,
}

/// The sizes of an engine's tables, pages and plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// The number of slots in the device tables.
    pub slots: u32,
    /// The largest number of requests that run.
    pub max_running: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// The number of steps that are planned ahead.
    pub lookahead: u32,
}

/// Submits requests to an engine thread, reads its state and sends it orders. Cheap to clone. Its
/// methods never block.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) orders: Sender<Order>,
}

impl EngineHandle {
    /// Submits a request to the engine. Exactly one output with `finish` will follow.
    ///
    /// # Errors
    /// The request is too large, the queue is full, the server is draining, the hand has never been
    /// ready, or it has failed for good.
    pub fn submit(&self, request: EngineRequest) -> Result<(), SubmitError> {
        self.send(self.enter(request)?)
    }

    /// Checks a request, and enters it into the waiting queue. A full queue is answered with 429.
    ///
    /// # Errors
    /// The errors of [`Self::submit`].
    pub fn enter(&self, request: EngineRequest) -> Result<Entrant, SubmitError> {
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
        check_words(&request.request, shared.page_size)?;
        let place = Place {
            client: if shared.fair { request.request.client } else { 0 },
            tokens: positions(&request.request),
            probe: request.request.probe,
            background: request.request.background,
        };
        let (limit, at_us) = (shared.max_queued, shared.clock.now_us());
        let full = |retry_after| SubmitError::QueueFull { limit, retry_after };
        shared.queued.enter(place, limit, at_us).map_err(full)?;
        Ok(Entrant { request, arrival: Arrival { at_us, place } })
    }

    /// Sends a request that has entered the queue to the engine. Exactly one output with `finish`
    /// will follow.
    ///
    /// # Errors
    /// The engine thread has ended.
    pub fn send(&self, entrant: Entrant) -> Result<(), SubmitError> {
        let (shared, Entrant { request, arrival }) = (&self.shared, entrant);
        if self.orders.send(Order::Submit { request: Box::new(request), arrival }).is_err() {
            shared.queued.left(arrival.place, arrival.at_us);
            return Err(SubmitError::Unavailable("the engine thread has ended".into()));
        }
        shared.waker.wake();
        Ok(())
    }

    /// Makes the engine lend the longest run of these blocks, from the first on, that its host tier
    /// has.
    pub fn lend(&self, names: Vec<BlockHash>, reply: LoanReply) {
        self.order(Order::Lend(names, reply));
    }

    /// Calls `reply` with true if one of these blocks is being saved to the host tier, or will be.
    /// `reply` is dropped if the thread has ended.
    pub fn will_save(&self, names: Vec<BlockHash>, reply: Box<dyn FnOnce(bool) + Send>) {
        self.order(Order::WillSave(names, reply));
    }

    /// Makes the engine try to plan again.
    pub fn wake(&self) {
        self.shared.waker.wake();
    }

    /// Makes the engine continue a request of another engine. If the request still waits for its
    /// first admission, it is already counted in the queue.
    pub fn adopt(&self, orphan: Orphan) {
        self.order(Order::Adopt(Box::new(orphan)));
    }

    /// Informs the engine that another replica can take requests. An engine without a hand then
    /// gives its requests to that replica.
    pub fn hand_over(&self) {
        self.order(Order::HandOver);
    }

    /// Makes the engine give one of its waiting requests to replica `to`, if that pays.
    pub fn spare(&self, to: usize) {
        self.order(Order::Spare(to));
    }

    /// Aborts a request. Its last output has [`crate::FinishReason::Abort`], unless the request
    /// ended earlier.
    pub fn abort(&self, id: RequestId) {
        self.order(Order::Abort(id));
    }

    /// Announces an adapter that later requests may use, or one that no later request will use.
    pub fn adapter(&self, order: AdapterOrder) {
        self.order(Order::Adapter(order));
    }

    /// Ends a loan: no reader of its pages is left.
    pub(crate) fn take_back(&self, loan: LoanId) {
        self.order(Order::TakeBack(loan));
    }

    /// Drops all blocks of the prefix cache that no request uses. `reply` gets false if running
    /// requests still use some.
    pub fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>) {
        self.order(Order::FlushCache(reply));
    }

    /// Makes the engine stop planning until [`Self::resume`]; requests that arrive meanwhile wait.
    /// `reply` gets the number of the engine's requests once no step is in flight.
    pub fn pause(&self, mode: PauseMode, reply: PauseReply) {
        self.order(Order::Pause(mode, reply));
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.order(Order::Resume);
    }

    /// Restarts the hand with other weights. Requests keep their tokens, and their KV cache is
    /// computed again. Nothing that was computed with the old weights stays cached.
    pub fn reload(&self, reload: Reload) {
        self.order(Order::Reload(reload));
    }

    /// Runs `work` on the engine thread between two steps, and blocks everything else meanwhile.
    /// Benchmarks use it to measure the cost of work on this thread.
    pub fn run(&self, work: Box<dyn FnOnce() + Send>) {
        self.order(Order::Run(work));
    }

    /// Refuses new requests from now on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Aborts all requests, stops the hand and ends the thread.
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

    /// The statistics after the last step.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *self.shared.stats.lock()
    }

    /// The facts that the hand reported; `None` until a hand has been ready.
    #[must_use]
    pub fn facts(&self) -> Option<Facts> {
        self.shared.facts.lock().clone()
    }

    /// The finished steps, from index `place` on.
    #[must_use]
    pub fn steps_since(&self, place: u64) -> Since<StepNote> {
        self.shared.journal.steps_since(place)
    }

    /// The events of requests, from index `place` on.
    #[must_use]
    pub fn moments_since(&self, place: u64) -> Since<Moment> {
        self.shared.journal.moments_since(place)
    }

    /// The events of one request that are still in the journal.
    #[must_use]
    pub fn moments_of(&self, id: u64) -> Vec<Moment> {
        self.shared.journal.moments_of(id)
    }

    /// The present time of the engine's clock, in microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.shared.clock.now_us()
    }

    /// The sizes of the engine.
    #[must_use]
    pub fn size(&self) -> Size {
        self.shared.size
    }

    /// Calls `reply` with a list of the engine's requests, running ones first, at most
    /// [`crate::MOST_VIEWS`]. `reply` is dropped if the thread has ended.
    pub fn look(&self, reply: Box<dyn FnOnce(Vec<RequestView>) + Send>) {
        self.order(Order::Look(reply));
    }

    /// True if a request fits into the pages of this replica's hand, or if their number is not
    /// known yet.
    #[must_use]
    pub fn fits(&self, request: &EngineRequest) -> bool {
        let room = self.shared.room.load(Ordering::Acquire);
        room == 0 || positions(&request.request) <= u64::from(room)
    }

    /// The largest number of requests that may wait.
    #[must_use]
    pub fn max_queued(&self) -> usize {
        self.shared.max_queued
    }

    fn order(&self, order: Order) {
        // A closed channel means that the thread has ended, and every request with it.
        if self.orders.send(order).is_ok() {
            self.shared.waker.wake();
        }
    }
}

/// The largest number of positions that a request may reach.
pub(crate) fn positions(request: &Request) -> u64 {
    request.prompt.len() as u64 + u64::from(request.max_tokens)
}

/// Refuses requests that do not fit into a plan.
fn check_words(request: &Request, page_size: u32) -> Result<(), SubmitError> {
    let spec = &request.spec;
    let words =
        request_words(positions(request), spec, page_size, 2) + image_words(&request.images);
    if words <= MAX_REQUEST_WORDS {
        return Ok(());
    }
    let (stop_ids, biases) = (spec.suppressed().len(), spec.sampling.logit_bias.len());
    let param = if stop_ids > 2 * biases { "stop_token_ids" } else { "logit_bias" };
    Err(SubmitError::TooLarge { param, words, limit: MAX_REQUEST_WORDS })
}
