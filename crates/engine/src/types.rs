//! Types at the interface of the engine thread: requests, outputs and status.

use std::sync::Arc;

use derive_more::AddAssign;
use forebay_protocol::{PromptLogprobs, Ready};
use forebay_scheduler::{BlockEvent, Loan, QueuedRequest, Request};
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

use crate::constraint::Constraint;
use crate::payload::Payload;
use crate::picture::{Picture, PictureError};
use crate::waiting::Place;

/// A request's id, unique within the process. Clients never choose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A request that is to be submitted to an engine.
#[derive(Debug, Default)]
pub struct EngineRequest {
    /// The request.
    pub request: Request,
    /// The payloads in the arena that the request refers to. They are kept until no step can read
    /// them.
    pub payloads: Vec<Arc<dyn Payload>>,
    /// The files of the request's images, in their order.
    pub pictures: Vec<Arc<dyn Picture>>,
    /// The constraint on the request's tokens. It has already accepted the generated tokens.
    pub constraint: Option<Box<dyn Constraint>>,
    /// The client's preferences for the choice of a replica.
    pub preference: Preference,
}

impl EngineRequest {
    /// The id of the request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        RequestId(self.request.id)
    }
}

/// A client's preferences for the choice of a replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Preference {
    /// Requests with the same key go to the same replica, as long as that replica is up. `None`: no
    /// key.
    pub key: Option<Arc<str>>,
    /// The index of the requested replica; `None`: any.
    pub replica: Option<u32>,
}

/// A request that moves to another replica: this replica's hand has died, the other replica would
/// serve the request sooner, or the request is handed on as planned.
#[derive(Debug)]
pub struct Orphan {
    /// The request, with the tokens that it has generated so far.
    pub request: EngineRequest,
    /// The time of arrival and the request's entry in the waiting queue; `None` if it was admitted
    /// before.
    pub(crate) queued: Option<Arrival>,
    /// The admission to report with the first token; `None` if it was reported, or the request was
    /// never admitted.
    pub(crate) admission: Option<Admission>,
}

/// A request that has entered the waiting queue and is to be sent to an engine.
#[derive(Debug)]
pub struct Entrant {
    /// The request.
    pub request: EngineRequest,
    pub(crate) arrival: Arrival,
}

/// A callback that receives a requested loan, exactly once. It gets `None` if the engine lends
/// nothing or has ended.
pub struct LoanReply(Option<LoanTaker>);

type LoanTaker = Box<dyn FnOnce(Option<Arc<Loan>>) + Send>;

impl LoanReply {
    /// Wraps `reply`, which is called on the engine's thread, or on the thread that drops an
    /// unanswered request for a loan.
    #[must_use]
    pub fn new(reply: impl FnOnce(Option<Arc<Loan>>) + Send + 'static) -> Self {
        Self(Some(Box::new(reply)))
    }

    /// Calls the callback with the loan.
    pub(crate) fn answer(mut self, loan: Option<Arc<Loan>>) {
        if let Some(reply) = self.0.take() {
            reply(loan);
        }
    }
}

impl Drop for LoanReply {
    fn drop(&mut self) {
        if let Some(reply) = self.0.take() {
            reply(None);
        }
    }
}

/// The arrival of a request that was never admitted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// The time at which the request was submitted, in microseconds.
    pub(crate) at_us: u64,
    pub(crate) place: Place,
}

/// An engine's access to the other replicas. The engine thread calls these methods, so they must
/// not wait for another engine.
pub trait Peers: Send {
    /// Records whether the engine's hand takes plans.
    fn up(&self, up: bool);
    /// True if another replica's hand takes plans.
    fn others_up(&self) -> bool;
    /// True if another replica has not failed, so that it serves or may serve again. A failed
    /// engine sets its status before it calls this. So if all replicas fail at the same time, at
    /// least one of them gets false.
    fn others_live(&self) -> bool;
    /// Moves requests to other replicas, because this engine has lost its hand. Returns the
    /// requests that no replica can take now.
    fn adopt(&self, orphans: Vec<Orphan>) -> Vec<Orphan>;
    /// True if a request that waits at this engine would get its first token sooner at replica
    /// `to`.
    fn move_pays(&self, to: usize, request: &QueuedRequest<'_>) -> bool;
    /// Moves a waiting request to replica `to`. Returns the request if that replica takes none now.
    fn take(&self, to: usize, orphan: Orphan) -> Option<Orphan>;
    /// The index of the engine's replica.
    fn replica(&self) -> u32 {
        0
    }
    /// Hands a request on to another replica. Returns the request if no replica can take it.
    fn hand_on(&self, orphan: Orphan) -> Option<Orphan> {
        Some(orphan)
    }
    /// Notes that a request has got its slot and pages at this engine.
    fn admitted(&self, _id: u64) {}
    /// True while requests that are to be handed on may not be admitted, because the replicas that
    /// would continue them lack pages.
    fn holds_prompts(&self) -> bool {
        false
    }
    /// Aborts a request that the engine does not have, in case another replica has taken it over.
    fn abort(&self, id: RequestId);
}

/// The reason why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// One of its `stop_ids` was sampled. That token is in the last output.
    Stop {
        /// The id of the stop token.
        token: i32,
    },
    /// `max_tokens` tokens were generated, or the vector of a pooling request was computed.
    Length,
    /// [`crate::EngineHandle::abort`] was called, or the engine was stopped.
    Abort,
    /// The request cannot be served.
    Error(RequestError),
}

/// The reason why an accepted request failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The model gave logits that are not finite.
    #[error("the model produced logits that are not finite")]
    NotFinite,
    /// The request was alone in flight when the hand died for the second time.
    #[error("the request brought the model process down twice and is not tried again")]
    Poisoned,
    /// The hand has failed and is not started again.
    #[error("the model process is not available: {0}")]
    HandFailed(String),
    /// The request's constraint allows no further token, or takes too long.
    #[error("{0}")]
    Constraint(String),
    /// The patches of one of the request's images could not be prepared.
    #[error("image {index}: {error}")]
    Image {
        /// The index of the image among the request's images.
        index: usize,
        /// The reason.
        error: PictureError,
    },
    /// The request's adapter can't be used.
    #[error("the adapter can't be used: {0}")]
    Adapter(String),
    /// The request waited too long for admission.
    #[error("the request waited {seconds} seconds for its turn and is not tried any more")]
    QueueTimeout {
        /// The limit on the wait, in seconds.
        seconds: u64,
        /// Seconds after which to try again.
        retry_after: u32,
    },
}

/// A sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// The id of the token.
    pub id: i32,
    /// Natural log-probabilities if requested: the sampled token first, then the most likely ones
    /// in descending order.
    pub logprobs: Option<Box<[(i32, f32)]>>,
}

/// Data about a request's admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// The number of prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Microseconds from submission to admission.
    pub queue_us: u64,
}

/// Counts of verified tokens of a predicted answer (`prediction`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign)]
pub struct PredictedTokens {
    /// The number of predicted tokens that were generated.
    pub accepted: u32,
    /// The number of predicted tokens that were not generated.
    pub rejected: u32,
}

/// The output of one step for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The request's id.
    pub id: RequestId,
    /// Set in the request's first output with a token, a vector or log-probabilities of its prompt.
    /// A request that ends without such an output has no admission.
    pub admission: Option<Admission>,
    /// More log-probabilities of the request's prompt. All of them are delivered before the first
    /// token or with it.
    pub prompt: Option<PromptLogprobs>,
    /// The token of this step.
    pub token: Option<SampledToken>,
    /// Counts of predicted tokens that were verified in this step.
    pub predicted: Option<PredictedTokens>,
    /// The raw vector of a pooling request, as the model gave it: neither truncated nor normalised.
    pub pooled: Option<Box<[f32]>>,
    /// Set exactly once, in the request's last output.
    pub finish: Option<FinishReason>,
}

impl Output {
    /// Creates an empty output of a request.
    #[must_use]
    pub fn of(id: RequestId) -> Self {
        Self {
            id,
            admission: None,
            prompt: None,
            token: None,
            predicted: None,
            pooled: None,
            finish: None,
        }
    }

    /// True if the token of this step may still be added to this output.
    pub(crate) fn lacks_token(&self) -> bool {
        let before = self.prompt.is_some() || self.predicted.is_some();
        before && self.token.is_none() && self.finish.is_none()
    }
}

/// The receiver of outputs. The engine thread calls it once per step, with all outputs of the step.
/// A call may block for backpressure. Work that can wait belongs on another thread.
pub trait OutputSink: Send {
    /// Delivers the outputs of a step. The order between requests is arbitrary.
    fn deliver(&mut self, outputs: Vec<Output>);
}

/// The receiver of changes to a replica's prefix cache. The engine thread calls it at most once per
/// step. It must not block.
pub trait BlockObserver: Send {
    /// Delivers the changes since the last call, in order.
    fn changed(&mut self, events: Vec<BlockEvent>);
}

/// The reason why a request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// `max_queued_requests` requests are waiting, or the client has used up its share of the
    /// queue: answer 429.
    #[error("the waiting queue, or this client's share of it, is full ({limit} requests in all)")]
    QueueFull {
        /// The largest number of waiting requests.
        limit: usize,
        /// Seconds after which to try again.
        retry_after: u32,
    },
    /// The request needs more than a step's plan can carry: answer 400.
    #[error(
        "the request is too large for a step: its prompt, answer, `{param}` and pages take {words} words, and at most {limit} are allowed"
    )]
    TooLarge {
        /// The request parameter, apart from the prompt, that takes the most words.
        param: &'static str,
        /// The number of words that a plan needs for the request.
        words: u64,
        /// The largest allowed number of words.
        limit: u64,
    },
    /// The server is shutting down: answer 503.
    #[error("the server is draining and takes no new requests")]
    Draining,
    /// The hand is starting for the first time, or has failed for good: answer 503.
    #[error("the model is not available: {0}")]
    Unavailable(String),
}

/// The engine's state, which /health shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// The hand is loading for the first time; the text names the stage.
    Starting(String),
    /// The engine runs steps.
    Ready,
    /// The hand died and is being respawned; requests wait and will be replayed.
    Recovering(String),
    /// New requests are refused, and running ones finish.
    Draining,
    /// The hand cannot start, for this reason (one line).
    Failed(String),
}

/// The facts that the hand reported, and limits derived from them. Available once the engine has
/// been ready.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Facts {
    /// The largest number of positions of a request: the configured context length, or the size of
    /// the KV pool if there is a pool and it is smaller.
    pub context_length: u32,
    /// The largest number of positions of a prompt. It is smaller than `context_length` if an
    /// answer may outgrow the device's pages, which a prompt may not.
    pub prompt_length: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// The facts that the hand reported.
    #[serde(flatten)]
    pub hand: Ready,
}

/// The counters and gauges after the last step, as one consistent snapshot. Counters never
/// decrease, even when the hand is respawned.
#[derive(Debug, Clone, Copy, Default, PartialEq, AddAssign, Serialize)]
pub struct Stats {
    /// Statistics of requests and pages.
    #[serde(flatten)]
    pub scheduler: forebay_scheduler::Stats,
    /// Statistics of the rank group.
    #[serde(flatten)]
    pub hand: HandStats,
}

/// Statistics of a rank group.
#[derive(Debug, Clone, Copy, Default, PartialEq, AddAssign, Serialize)]
pub struct HandStats {
    /// Microseconds for which the device computed steps.
    pub device_us: u64,
    /// Microseconds for which the device idled between steps although there was work, plus waits
    /// for masks within steps. Waits between the kernels of one step are not included.
    pub gap_us: u64,
    /// The number of times that the hand died.
    #[serde(rename = "hand_deaths")]
    pub deaths: u64,
    /// The number of times that the operating system killed the hand for lack of memory.
    #[serde(rename = "hand_memory_kills")]
    pub memory_kills: u64,
    /// The number of requests that were replayed after a death.
    pub replayed: u64,
    /// The number of requests that were handed on to another replica after their first token.
    pub handed: u64,
    /// The total time that requests waited for blocks to be restored from the host tier, in
    /// microseconds.
    pub copy_wait_us: u64,
    /// The number of masks computed for rows with constraints.
    pub masks: u64,
    /// Microseconds of CPU time spent on masks, on all threads.
    pub mask_us: u64,
    /// Microseconds that the engine thread spent on masks: computing some itself, and waiting for
    /// the mask threads.
    pub mask_wait_us: u64,
    /// The longest time that the last step could wait for masks, in microseconds.
    pub mask_budget_us: u64,
    /// The number of rows that sat a step out because their mask was not ready.
    pub sat_out: u64,
    /// Bytes of blocks that were saved to the host tier.
    pub saved_bytes: u64,
    /// Bytes of blocks that were restored from the host tier.
    pub restored_bytes: u64,
}

/// The treatment of live requests when a pause begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseMode {
    /// Abort the requests.
    Abort,
    /// Finish live requests before the pause begins; new ones wait.
    Wait,
    /// Keep the requests as they are: running ones keep their pages.
    Keep,
    /// Move running requests back to the queue without pages. Their blocks stay cached.
    Retract,
}

/// A callback that gets the number of an engine's requests once the engine is paused. It is dropped
/// if the engine ends, or if the pause is cancelled before it has begun.
pub type PauseReply = Box<dyn FnOnce(usize) + Send>;

/// A callback that gets the outcome of a reload. The error states why the hand could not start with
/// the new weights; the hand then runs with the old ones again.
pub type ReloadReply = Box<dyn FnOnce(Result<(), String>) + Send>;

/// An order to load other weights.
pub struct Reload {
    /// The unique id of the reload. All members of a step group get the same id.
    pub id: u64,
    /// The description of the model in the hand's configuration.
    pub model: Value,
    /// Called with the outcome.
    pub reply: ReloadReply,
}
