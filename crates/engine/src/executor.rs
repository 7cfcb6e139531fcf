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
    /// The whole rank group has ended; one line has the reason. Plans in flight get no result.
    Died(String),
    /// The whole rank group has ended, because the kernel killed a rank when memory ran out. A
    /// group with fewer pages may live longer.
    OutOfMemory(String),
}

/// Ends the current or the next [`Executor::wait`], from any thread. It is cheap if a wake-up is
/// already pending.
pub trait Wake: Send + Sync {
    /// Makes `wait` return [`Signal::Woken`] soon, or another signal that came first.
    fn wake(&self);
}

/// A rank group: takes the plans of numbered steps, gives results in order.
///
/// The ranks of a replica compute one plan together. Those of a step group have one each, and a
/// step is all of them.
///
/// At most two steps are in flight. After [`Signal::Died`] and [`Signal::OutOfMemory`] only
/// [`limit_pages`](Self::limit_pages), [`start`](Self::start) and [`stop`](Self::stop) may be
/// called.
pub trait Executor: Send {
    /// Begins to start the group; returns at once. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Limits the next group to `pages` and `host_pages` pages, fewer than the last group had. A
    /// group on a device with its own memory keeps its number of hot pages.
    fn limit_pages(&mut self, _pages: u32, _host_pages: u32) {}
    /// Makes the next group compute with another model of the same shape, as its configuration
    /// describes it. Returns the last one. Called while the group is stopped.
    fn replace_model(&mut self, model: Value) -> Value {
        model
    }
    /// Gives the plans of a step to the group, one for each member of the engine, which have its
    /// number; returns at once. The next wait reports a failure as [`Signal::Died`].
    fn submit(&mut self, plans: &[StepPlan]);
    /// Gives the masks of a member's newest plan to the group, before another plan is submitted;
    /// returns at once. Every plan with masked rows has masks.
    fn masks(&mut self, member: usize, masks: &StepMasks);
    /// Sends an order about an adapter to a member's hands, between any plans; returns at once.
    /// Only hands that have places ([`Ready::lora_bytes`]) get it.
    fn adapter(&mut self, _member: usize, _order: &AdapterOrder) {}
    /// True if the hands read payloads in the memory in which they were written. Otherwise each
    /// payload has to be [carried](Self::carry) before a plan names it. The answer is always the
    /// same.
    fn is_near(&self) -> bool {
        true
    }
    /// Makes other threads bring a payload to the memory of a member's hands; returns at once.
    /// `there` is called on any thread. It is dropped if the group ends before. A carried payload
    /// stays there until the group ends.
    fn carry(&mut self, _member: usize, _payload: &Arc<dyn Payload>, there: There) {
        there();
    }
    /// Waits for the next signal, at most `timeout_us` microseconds (`None`: without a limit).
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Asks the group to end, and waits for its end. Idempotent.
    fn stop(&mut self);
    /// Ends a group that hangs or errs, without asking it, and waits for its end. Idempotent.
    fn kill(&mut self) {
        self.stop();
    }
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
