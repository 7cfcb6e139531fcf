//! What crosses the engine thread's border: requests in, outputs out, status beside them.

use std::sync::Arc;

use forebay_protocol::{Dtype, Pooling, SamplingParams};
use forebay_scheduler::{BlockEvent, BlockHash, Past};
use thiserror::Error;

use crate::payload::Embeds;
use crate::waiting::Place;

/// A request's name, unique for the life of the process (client-supplied ids never come this far).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A validated request. Nothing in it can be wrong any more; only capacity can refuse it.
#[derive(Debug, Clone)]
pub struct EngineRequest {
    /// Unique name.
    pub id: RequestId,
    /// Prompt token ids, at least one, each below the vocabulary size. With `embeds` they only say how many positions the prompt has.
    /// The choices of a prompt share them.
    pub prompt: Arc<[i32]>,
    /// Tokens that were generated before, by another brain or another replica; none is in `stop_ids`, and they are fewer than `max_tokens`,
    /// which counts them. The request goes on after them, exactly as if it had generated them here, and only what is new comes out.
    pub generated: Vec<i32>,
    /// Names of the leading full blocks of both, as far as they were computed already.
    pub names: Arc<[BlockHash]>,
    /// Most tokens to generate, at least one; 0 exactly where `pooling` is set. `prompt.len() + max_tokens` is at most the context length.
    pub max_tokens: u32,
    /// One vector is made of the prompt, and nothing is generated. For models that pool, and no others.
    pub pooling: Option<Pooling>,
    /// Token ids that end the request: end-of-sequence (unless ignored) and the client's `stop_token_ids`; ascending, each once.
    pub stop_ids: Arc<[i32]>,
    /// How tokens are sampled; `seed` is always set, at random where the client gave none.
    pub sampling: SamplingParams,
    /// Place in the queue, under the priority policies.
    pub priority: i32,
    /// Requests share cached pages only with requests of the same salt; 0: none was asked for.
    pub salt: u64,
    /// Whose it is. Within a priority, clients take turns.
    pub client: u64,
    /// It asks whether the model computes: it is the next to be admitted, and a full queue does not refuse it.
    pub probe: bool,
    /// Embeddings in place of the prompt's tokens, one row of `hidden_size` elements each.
    pub embeds: Option<Embeds>,
    /// What its client wants of the choice of a replica.
    pub route: Route,
}

/// What a client wants of the choice of a replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// Requests with the same key go to the same replica, as long as it is there.
    pub key: Option<Arc<str>>,
    /// This replica.
    pub replica: Option<u32>,
}

/// A request whose hand has died, on its way to another replica.
#[derive(Debug)]
pub struct Orphan {
    /// The request, with what it has generated so far.
    pub request: EngineRequest,
    pub(crate) past: Past,
    /// When it came and what it takes of the queue, if it was never admitted.
    pub(crate) queued: Option<Arrival>,
    /// What is to be told with its first token, if it was admitted and has none.
    pub(crate) admission: Option<Admission>,
}

/// A request that was never admitted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// When it was submitted.
    pub(crate) at_us: u64,
    pub(crate) place: Place,
}

/// The other replicas, as an engine sees them. Called on the engine thread; must not wait for another engine.
pub trait Peers: Send {
    /// The engine's hand takes plans from now on, or is gone.
    fn up(&self, up: bool);
    /// Whether another replica's hand takes plans.
    fn others_up(&self) -> bool;
    /// Whether another replica serves, or may again: all but those that have failed. An engine asks when it has itself failed, and has said
    /// so by its status. So of several that fail at the same time, one at least sees that none is left.
    fn others_live(&self) -> bool;
    /// Takes over requests of an engine that has lost its hand; gives back those that nobody can take now.
    fn adopt(&self, orphans: Vec<Orphan>) -> Vec<Orphan>;
    /// The engine was told to end a request that it does not have: perhaps it was taken over meanwhile.
    fn abort(&self, id: RequestId);
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// One of its `stop_ids` was sampled; that token is the last output's.
    Stop {
        /// The id that ended it.
        token: i32,
    },
    /// `max_tokens` were generated, or the vector was computed.
    Length,
    /// [`crate::EngineHandle::abort`] was called, or the engine shut down.
    Abort,
    /// It cannot be served.
    Error(RequestError),
}

/// Why a request that was admitted could not be served.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The model gave logits that are not finite.
    #[error("the model produced logits that are not finite")]
    NotFinite,
    /// It was in flight, alone, when the hand died, twice.
    #[error("the request brought the model process down twice and is not tried again")]
    Poisoned,
    /// The hand is gone and does not come back.
    #[error("the model process is not available: {0}")]
    HandFailed(String),
    /// It waited too long for a place.
    #[error("the request waited {seconds} seconds for its turn and is not tried any more")]
    QueueTimeout {
        /// The limit.
        seconds: u64,
        /// Seconds after which another try may be worth while.
        retry_after: u32,
    },
}

/// A sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: i32,
    /// Natural log-probabilities when asked for: the sampled token first, then the most likely, descending.
    pub logprobs: Option<Box<[(i32, f32)]>>,
}

/// What the engine knows of a request's way to its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Microseconds between submit and first schedule.
    pub queue_us: u64,
}

/// What one step brought one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// Whose.
    pub id: RequestId,
    /// Set in the request's first output that carries a token or a vector (the request may also end without ever having one).
    pub admission: Option<Admission>,
    /// The token of this step.
    pub token: Option<SampledToken>,
    /// The vector of a pooled request, as the model made it: neither cut nor normalised.
    pub pooled: Option<Box<[f32]>>,
    /// Set exactly once, in the request's last output.
    pub finish: Option<FinishReason>,
}

/// Where outputs go, called on the engine thread once a step with everything the step brought. May block for backpressure, must not do
/// work that can wait.
pub trait OutputSink: Send {
    /// Takes a step's outputs, in any order between requests.
    fn deliver(&mut self, outputs: Vec<Output>);
}

/// Hears which blocks enter and leave a replica's prefix cache, called on the engine thread at most once a step. Must not block.
pub trait BlockObserver: Send {
    /// Takes the changes since the last call, in their order.
    fn changed(&mut self, events: Vec<BlockEvent>);
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// `max_queued_requests` are waiting, or as many as one client may have: answer 429.
    #[error("the waiting queue is full ({limit} requests, and a part of them for one client)")]
    QueueFull {
        /// The bound.
        limit: usize,
        /// Seconds after which another try may be worth while.
        retry_after: u32,
    },
    /// It is more than one step's plan can carry: answer 400.
    #[error(
        "the request does not fit into a step: with its prompt, answer, `{param}` and pages it comes to {words} words, and {limit} are the most"
    )]
    TooLarge {
        /// The parameter that takes most, the prompt left aside.
        param: &'static str,
        /// Words of the plan that writes it.
        words: u64,
        /// The most.
        limit: u64,
    },
    /// Shutting down: answer 503.
    #[error("the server is draining and takes no new requests")]
    Draining,
    /// The hand is starting for the first time, or is gone for good: answer 503.
    #[error("the model is not available: {0}")]
    Unavailable(String),
}

/// The engine's state as /health tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// The hand is loading for the first time; the text says what.
    Starting(String),
    /// Steps run.
    Ready,
    /// The hand died and is being respawned; requests wait and will be replayed.
    Recovering(String),
    /// No new requests; running ones finish.
    Draining,
    /// The hand cannot start; one line why.
    Failed(String),
}

/// The hand's facts and what follows from them, known once the engine has been ready.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Positions a request may use: the configured context length, or the whole KV pool where that is smaller and there is one.
    pub context_length: u32,
    /// Rows of the output head.
    pub vocab_size: u32,
    /// Elements of an embedding.
    pub hidden_size: u32,
    /// Their type.
    pub dtype: Dtype,
    /// Pages of the KV pool; 0: the model keeps no keys and values.
    pub page_count: u32,
    /// Tokens a page.
    pub page_size: u32,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// The device's name.
    pub device: String,
    /// Seconds the hand took to load.
    pub load_seconds: f64,
}

/// A consistent snapshot after the last step. Counters only grow, also across a respawn.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Requests with a slot.
    pub running: usize,
    /// Requests waiting for one.
    pub waiting: usize,
    /// Pages leased by requests or retired.
    pub pages_held: usize,
    /// Unreferenced pages that hold a named block.
    pub pages_cached: usize,
    /// Pages that hold nothing.
    pub pages_free: usize,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Tokens computed for prompts (cache hits not counted).
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Requests that lost their pages to others and were queued again.
    pub preemptions: u64,
    /// Steps whose results were applied.
    pub steps: u64,
    /// Microseconds the device computed.
    pub device_us: u64,
    /// Microseconds the device sat idle between steps although there was work.
    pub idle_us: u64,
    /// Times the hand died.
    pub hand_deaths: u64,
    /// Requests replayed after a death.
    pub replayed: u64,
}
