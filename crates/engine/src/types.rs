//! Types at the interface of the engine thread: requests in, outputs out, and status.

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

/// A request's id, unique for the life of the process. It is never an id that a client chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A request on its way into an engine.
#[derive(Debug, Default)]
pub struct EngineRequest {
    /// The request.
    pub request: Request,
    /// The payloads in the arena that the request refers to, kept until no step can read them.
    pub payloads: Vec<Arc<dyn Payload>>,
    /// The files of the request's images, in their order.
    pub pictures: Vec<Arc<dyn Picture>>,
    /// The constraint on the request's tokens, which has already accepted the generated ones.
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
    /// Requests with the same key go to the same replica, as long as that replica is up.
    pub key: Option<Arc<str>>,
    /// The number of the requested replica.
    pub replica: Option<u32>,
}

/// A request on its way to another replica: because its hand has died, because others have less to
/// do while it waits, or as planned.
#[derive(Debug)]
pub struct Orphan {
    /// The request, with the tokens that it has generated so far.
    pub request: EngineRequest,
    /// The time of arrival and the request's place in the queue, if it was never admitted.
    pub(crate) queued: Option<Arrival>,
    /// The report for its first output with a token, if it was admitted and has none yet.
    pub(crate) admission: Option<Admission>,
}

/// A request that has taken its place in the queue, on its way to an engine.
#[derive(Debug)]
pub struct Entrant {
    /// The request.
    pub request: EngineRequest,
    pub(crate) arrival: Arrival,
}

/// Receives a requested loan, once. `None`: the engine lends nothing, or has ended.
pub struct LoanReply(Option<LoanTaker>);

type LoanTaker = Box<dyn FnOnce(Option<Arc<Loan>>) + Send>;

impl LoanReply {
    /// `reply` is called on the engine's thread, or where the unanswered request is dropped.
    #[must_use]
    pub fn new(reply: impl FnOnce(Option<Arc<Loan>>) + Send + 'static) -> Self {
        Self(Some(Box::new(reply)))
    }

    /// Gives the answer.
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

/// A request that was never admitted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// The time of the submit.
    pub(crate) at_us: u64,
    pub(crate) place: Place,
}

/// An engine's access to the other replicas. The engine thread calls this, and must not wait for
/// another engine.
pub trait Peers: Send {
    /// Notes that the engine's hand takes plans from now on, or is gone.
    fn up(&self, up: bool);
    /// True if another replica's hand takes plans.
    fn others_up(&self) -> bool;
    /// True if another replica serves, or may again: all replicas except failed ones. An engine
    /// calls this after it has failed and set its status. So if several fail at the same time, at
    /// least one of them gets false.
    fn others_live(&self) -> bool;
    /// Takes over requests of an engine that has lost its hand. Gives back the requests that no
    /// replica can take now.
    fn adopt(&self, orphans: Vec<Orphan>) -> Vec<Orphan>;
    /// True if a request that waits here gets its first token sooner at replica `to`.
    fn move_pays(&self, to: usize, request: &QueuedRequest<'_>) -> bool;
    /// Moves a waiting request to replica `to`. Returns it if that replica takes none now.
    fn take(&self, to: usize, orphan: Orphan) -> Option<Orphan>;
    /// The number of the engine's replica.
    fn replica(&self) -> u32 {
        0
    }
    /// Makes another replica continue a request that leaves as planned. Returns it if none can.
    fn hand_on(&self, orphan: Orphan) -> Option<Orphan> {
        Some(orphan)
    }
    /// Notes that a request has its slot and pages here.
    fn admitted(&self, _id: u64) {}
    /// True while no prompt that leaves may be admitted, because the replicas that would continue
    /// it have no pages.
    fn holds_prompts(&self) -> bool {
        false
    }
    /// Aborts a request that the engine does not have, in case another replica has taken it over.
    fn abort(&self, id: RequestId);
}

/// The reason for which a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// One of its `stop_ids` was sampled. That token is in the last output.
    Stop {
        /// The id of the stop token.
        token: i32,
    },
    /// `max_tokens` were generated, or the vector was computed.
    Length,
    /// [`crate::EngineHandle::abort`] was called, or the engine ends.
    Abort,
    /// The request cannot be served.
    Error(RequestError),
}

/// Why an admitted request failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The model gave logits that are not finite.
    #[error("the model produced logits that are not finite")]
    NotFinite,
    /// The request was alone in flight when the hand died for the second time.
    #[error("the request brought the model process down twice and is not tried again")]
    Poisoned,
    /// The hand is gone for good.
    #[error("the model process is not available: {0}")]
    HandFailed(String),
    /// The request's constraint allows no token any more, or takes too long.
    #[error("{0}")]
    Constraint(String),
    /// One of the request's images has no patches.
    #[error("image {index}: {error}")]
    Image {
        /// The number of the image among the request's.
        index: usize,
        /// The reason.
        error: PictureError,
    },
    /// The request's adapter can't be used.
    #[error("the adapter can't be used: {0}")]
    Adapter(String),
    /// The request waited too long for a place.
    #[error("the request waited {seconds} seconds for its turn and is not tried any more")]
    QueueTimeout {
        /// The limit.
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

/// When a request reached the stages before its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Microseconds from the submit to the admission.
    pub queue_us: u64,
}

/// Tokens of a predicted answer that were verified.
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
    /// A request that ends without such an output has none.
    pub admission: Option<Admission>,
    /// Further log-probabilities of its prompt. All have been delivered by the first token.
    pub prompt: Option<PromptLogprobs>,
    /// The token of this step.
    pub token: Option<SampledToken>,
    /// Tokens of a predicted answer that were verified in this step.
    pub predicted: Option<PredictedTokens>,
    /// The model's raw vector of a pooled request: not cut, not normalised.
    pub pooled: Option<Box<[f32]>>,
    /// Set exactly once, in the request's last output.
    pub finish: Option<FinishReason>,
}

impl Output {
    /// Makes an empty output.
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

    /// True if the output has nothing for its step's token yet.
    pub(crate) fn lacks_token(&self) -> bool {
        let before = self.prompt.is_some() || self.predicted.is_some();
        before && self.token.is_none() && self.finish.is_none()
    }
}

/// The receiver of outputs. The engine thread calls it once a step, with all outputs of the step. A
/// call may block for backpressure. Work that can wait belongs on another thread.
pub trait OutputSink: Send {
    /// Delivers a step's outputs, in any order between requests.
    fn deliver(&mut self, outputs: Vec<Output>);
}

/// The receiver of changes of a replica's prefix cache. The engine thread calls it at most once a
/// step. It must not block.
pub trait BlockObserver: Send {
    /// Delivers the changes since the last call, in order.
    fn changed(&mut self, events: Vec<BlockEvent>);
}

/// Why a request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// `max_queued_requests` are waiting, or the client has its share of them: answer 429.
    #[error("the waiting queue is full ({limit} requests, and a part of them for one client)")]
    QueueFull {
        /// The bound.
        limit: usize,
        /// Seconds after which to try again.
        retry_after: u32,
    },
    /// The request needs more than a step's plan can carry: answer 400.
    #[error(
        "the request does not fit into a step: with its prompt, answer, `{param}` and pages it comes to {words} words, and {limit} are the most"
    )]
    TooLarge {
        /// The parameter with most words, except the prompt.
        param: &'static str,
        /// The words of the plan that writes the request.
        words: u64,
        /// The largest number of words.
        limit: u64,
    },
    /// The server shuts down: answer 503.
    #[error("the server is draining and takes no new requests")]
    Draining,
    /// The hand is starting for the first time, or is gone for good: answer 503.
    #[error("the model is not available: {0}")]
    Unavailable(String),
}

/// The engine's state, which /health shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// The hand is loading for the first time; the text names the part.
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

/// The hand's facts and their consequences, known once the engine has been ready.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Facts {
    /// The largest number of positions of a request. It is the configured context length, or the
    /// size of the KV pool if that is smaller and there is a pool.
    pub context_length: u32,
    /// The largest number of positions of a prompt. It is smaller than `context_length` if answers
    /// may outgrow the device's pages, which prompts may not.
    pub prompt_length: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// The facts that the hand reported.
    #[serde(flatten)]
    pub hand: Ready,
}

/// The counters and gauges after the last step, from one moment. Counters only grow, also across a
/// respawn.
#[derive(Debug, Clone, Copy, Default, PartialEq, AddAssign, Serialize)]
pub struct Stats {
    /// Requests and pages.
    #[serde(flatten)]
    pub scheduler: forebay_scheduler::Stats,
    /// The rank group.
    #[serde(flatten)]
    pub hand: HandStats,
}

/// Numbers of a rank group.
#[derive(Debug, Clone, Copy, Default, PartialEq, AddAssign, Serialize)]
pub struct HandStats {
    /// Microseconds from the start of steps to their end, on the device.
    pub device_us: u64,
    /// Microseconds between two steps of the device although there was work, and of waits for masks
    /// within steps. Those for which kernels of a step wait for each other are not among them.
    pub gap_us: u64,
    /// The number of deaths of the hand.
    #[serde(rename = "hand_deaths")]
    pub deaths: u64,
    /// The number of these deaths in which the operating system killed the hand for lack of memory.
    #[serde(rename = "hand_memory_kills")]
    pub memory_kills: u64,
    /// The number of requests that were replayed after a death.
    pub replayed: u64,
    /// The number of requests that another replica continued after their first token.
    pub handed: u64,
    /// Microseconds that requests waited for their blocks to be restored from the host tier.
    pub copy_wait_us: u64,
    /// Masks that were made for rows with constraints.
    pub masks: u64,
    /// Microseconds of CPU time that masks took, on all threads.
    pub mask_us: u64,
    /// Microseconds that the engine thread spent on masks: making its own, and waiting for mask
    /// threads.
    pub mask_wait_us: u64,
    /// How long the last step could wait for masks at most, in microseconds.
    pub mask_budget_us: u64,
    /// Rows that sat a step out because their mask was not ready.
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
    /// Keep the requests where they are, with their pages.
    Keep,
    /// Running requests go back to the queue without pages. Their blocks are cached.
    Retract,
}

/// Gets the number of an engine's requests once it is paused. It is dropped if the engine ends, or
/// if the pause is ended before it has begun.
pub type PauseReply = Box<dyn FnOnce(usize) + Send>;

/// Gets the outcome of a reload. The error says why the hand could not start with the new weights;
/// it then runs with the old ones again.
pub type ReloadReply = Box<dyn FnOnce(Result<(), String>) + Send>;

/// An order to load other weights.
pub struct Reload {
    /// A unique number of the reload. All members of a step group get the same.
    pub id: u64,
    /// The description of the model in the hand's configuration.
    pub model: Value,
    /// Called with the outcome.
    pub reply: ReloadReply,
}
