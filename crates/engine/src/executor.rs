//! The interface of an executor: a rank group that executes plans, real or simulated.

use std::sync::Arc;

use forebay_protocol::{AdapterOrder, Ready, StepMasks, StepPlan, StepResult};
use serde_json::Value;

use crate::payload::{Payload, There};

/// The reason why [`Executor::wait`] returned.
#[derive(Debug)]
pub enum Signal {
    /// A loading hand has made progress; the text names the stage.
    Progress(String),
    /// The hand takes plans from now on.
    Ready(Box<Ready>),
    /// The oldest step in flight is done. There is one result per plan that [`Executor::submit`]
    /// took.
    Result(Vec<StepResult>),
    /// The [waker](Executor::waker) was used.
    Woken,
    /// The timeout has passed.
    TimedOut,
    /// The whole rank group has ended, for this reason (one line). Plans in flight get no result.
    Died(String),
    /// The whole rank group has ended, because the operating system killed a rank when memory ran
    /// out. A group with fewer pages may fit into memory.
    OutOfMemory(String),
}

/// Makes the current or the next [`Executor::wait`] return, from any thread. Cheap if a wake-up is
/// already pending.
pub trait Wake: Send + Sync {
    /// Makes `wait` return soon, with [`Signal::Woken`] or another signal.
    fn wake(&self);
}

/// A rank group. It takes the plans of numbered steps, and returns results in the same order.
///
/// The ranks of a replica compute one plan together. In a step group each rank has its own plan,
/// and a step consists of all these plans.
///
/// At most two steps are in flight. After [`Signal::Died`] and [`Signal::OutOfMemory`] only
/// [`limit_pages`](Self::limit_pages), [`start`](Self::start) and [`stop`](Self::stop) may be
/// called.
pub trait Executor: Send {
    /// Starts the group without waiting for it. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Limits the next group to `pages` and `host_pages` pages, fewer than the last group had. If
    /// the device has its own memory, the number of hot pages does not change.
    fn limit_pages(&mut self, _pages: u32, _host_pages: u32) {}
    /// Replaces the model in the configuration of the next group by another one of the same shape.
    /// Returns the previous model. Must be called while the group is stopped.
    fn replace_model(&mut self, model: Value) -> Value {
        model
    }
    /// Submits the plans of a step, one per member of the engine, all with the same step number.
    /// Returns at once. A failure is reported by the next wait as [`Signal::Died`].
    fn submit(&mut self, plans: &[StepPlan]);
    /// Submits the masks of a member's newest plan. Must be called for every plan with masked rows,
    /// before another plan is submitted. Returns at once.
    fn masks(&mut self, member: usize, masks: &StepMasks);
    /// Sends an adapter order to a member's hands, at any time between plans. Returns at once. Only
    /// hands with places for adapters ([`Ready::lora_bytes`]) get it.
    fn adapter(&mut self, _member: usize, _order: &AdapterOrder) {}
    /// True if the hands read payloads in the memory in which they were written. Otherwise each
    /// payload has to be [carried](Self::carry) before a plan names it. The value never changes.
    fn is_near(&self) -> bool {
        true
    }
    /// Makes other threads copy a payload to the memory of a member's hands; returns at once.
    /// `there` is called afterwards, on any thread, or dropped if the group ends first. A carried
    /// payload stays in that memory until the group ends.
    fn carry(&mut self, _member: usize, _payload: &Arc<dyn Payload>, there: There) {
        there();
    }
    /// Waits for the next signal, at most `timeout_us` microseconds; `None` means no limit.
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Requests the group to end, and waits until it has ended. Idempotent.
    fn stop(&mut self);
    /// Kills a group that hangs or fails, and waits until it has ended. Idempotent.
    fn kill(&mut self) {
        self.stop();
    }
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
