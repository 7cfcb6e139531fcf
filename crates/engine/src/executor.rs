//! The one thing the engine drives: a rank group that executes plans, real or simulated.

use std::sync::Arc;

use forebay_protocol::{Dtype, StepPlan, StepResult};

/// What a hand reports once it is ready (docs/protocol.md, `ready`).
#[derive(Debug, Clone, PartialEq)]
pub struct HandFacts {
    /// Pages of the KV pool; 0: the model keeps no keys and values, and its prompts must not be cut.
    pub page_count: u32,
    /// Rows of the output head.
    pub vocab_size: u32,
    /// Elements of an embedding.
    pub hidden_size: u32,
    /// Type of the model's activations, and so of the embeddings that it is given.
    pub dtype: Dtype,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of the KV pool.
    pub kv_bytes: u64,
    /// The device's name.
    pub device: String,
    /// Seconds from spawn to ready, as the hand counts them.
    pub load_seconds: f64,
}

/// What ends a wait.
#[derive(Debug)]
pub enum Signal {
    /// Loading has come this far.
    Progress(String),
    /// The hand takes plans from now on.
    Ready(HandFacts),
    /// The oldest plan in flight is done.
    Result(StepResult),
    /// Somebody used the waker.
    Woken,
    /// The time is up.
    TimedOut,
    /// The rank group is gone, all of it; one line why. Nothing in flight will be answered.
    Died(String),
}

/// Ends the current or the next [`Executor::wait`], from any thread. Cheap when already pending.
pub trait Wake: Send + Sync {
    /// Makes `wait` return [`Signal::Woken`] (or another signal that came first) soon.
    fn wake(&self);
}

/// A rank group: takes numbered plans, gives results in order.
///
/// At most two plans are in flight. After [`Signal::Died`] only [`start`](Self::start) and [`stop`](Self::stop) may be called.
pub trait Executor: Send {
    /// Begins to start the group; returns at once. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Hands over a plan; returns at once. A failure shows as [`Signal::Died`] from the next wait.
    fn submit(&mut self, plan: &mut StepPlan);
    /// Blocks until something happens, at most `timeout_us` microseconds (`None`: without limit).
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Ends the group as quickly as it allows and waits until it is gone. Idempotent.
    fn stop(&mut self);
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
