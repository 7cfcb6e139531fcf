//! The engine's executor: a rank group that executes plans, real or simulated.

use std::sync::Arc;

use forebay_protocol::{AdapterOrder, Ready, StepMasks, StepPlan, StepResult};
use serde_json::Value;

use crate::payload::{Payload, There};

/// The end of a wait.
#[derive(Debug)]
pub enum Signal {
    /// A loading hand has made progress; the text names the part.
    Progress(String),
    /// The hand takes plans from now on.
    Ready(Box<Ready>),
    /// The oldest step in flight is done: a result for each plan that [`Executor::submit`] took.
    Result(Vec<StepResult>),
    /// The waker was used.
    Woken,
    /// The time is over.
    TimedOut,
    /// The whole rank group has ended, for this reason (one line). Plans in flight get no result.
    Died(String),
    /// The whole rank group has ended, because the operating system killed a rank when memory ran
    /// out. A group with fewer pages may fit.
    OutOfMemory(String),
}

/// Ends the current or the next [`Executor::wait`], from any thread. Cheap if a wake-up is already
/// pending.
pub trait Wake: Send + Sync {
    /// Makes `wait` return [`Signal::Woken`] soon, or another signal first.
    fn wake(&self);
}

/// A rank group: takes the plans of numbered steps, gives results in order.
///
/// The ranks of a replica compute one plan together. The ranks of a step group have a plan each,
/// and a step consists of all these plans.
///
/// At most two steps are in flight. After [`Signal::Died`] and [`Signal::OutOfMemory`] only
/// [`limit_pages`](Self::limit_pages), [`start`](Self::start) and [`stop`](Self::stop) may be
/// called.
pub trait Executor: Send {
    /// Starts the group without waiting for it. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Limits the next group to `pages` and `host_pages` pages, fewer than the last group had. On a
    /// device with its own memory the number of hot pages stays.
    fn limit_pages(&mut self, _pages: u32, _host_pages: u32) {}
    /// Replaces the model in the configuration of the next group by another one of the same shape.
    /// Returns the old one. Called while the group is stopped.
    fn replace_model(&mut self, model: Value) -> Value {
        model
    }
    /// Gives the plans of a step to the group, one for each member of the engine, all with the
    /// step's number. Returns at once. The next wait reports a failure as [`Signal::Died`].
    fn submit(&mut self, plans: &[StepPlan]);
    /// Gives the masks of a member's newest plan to the group, before another plan is submitted;
    /// returns at once. Every plan with masked rows has masks.
    fn masks(&mut self, member: usize, masks: &StepMasks);
    /// Sends an adapter order to a member's hands, at any time between plans; returns at once. Only
    /// hands with places ([`Ready::lora_bytes`]) get it.
    fn adapter(&mut self, _member: usize, _order: &AdapterOrder) {}
    /// True if the hands read payloads in the memory in which they were written. Otherwise each
    /// payload has to be [carried](Self::carry) before a plan names it. The answer never changes.
    fn is_near(&self) -> bool {
        true
    }
    /// Makes other threads copy a payload to the memory of a member's hands; returns at once.
    /// `there` is called afterwards, on any thread, or dropped if the group ends first. A carried
    /// payload stays there until the group ends.
    fn carry(&mut self, _member: usize, _payload: &Arc<dyn Payload>, there: There) {
        there();
    }
    /// Waits for the next signal, at most `timeout_us` microseconds (`None`: without a limit).
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Asks the group to end, and waits for its end. Idempotent.
    fn stop(&mut self);
    /// Ends a group that hangs or fails, without asking it, and waits for its end. Idempotent.
    fn kill(&mut self) {
        self.stop();
    }
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
