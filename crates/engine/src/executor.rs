//! The one thing the engine drives: a rank group that executes plans, real or simulated.

use std::sync::Arc;

use forebay_protocol::{Ready, StepMasks, StepPlan, StepResult};

use crate::payload::{Payload, There};

/// The end of a wait.
#[derive(Debug)]
pub enum Signal {
    /// Loading has come this far.
    Progress(String),
    /// The hand takes plans from now on.
    Ready(Ready),
    /// The oldest step in flight is done: a result for each plan that [`Executor::submit`] took.
    Result(Vec<StepResult>),
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

/// A rank group: takes the plans of numbered steps, gives results in order.
///
/// The ranks of a replica compute one plan together. Those of a step group have one each, and a
/// step is all of them.
///
/// At most two steps are in flight. After [`Signal::Died`] only [`start`](Self::start) and
/// [`stop`](Self::stop) may be called.
pub trait Executor: Send {
    /// Begins to start the group; returns at once. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Hands over the plans of a step, one for each member of the engine, which have its number;
    /// returns at once. A failure shows as [`Signal::Died`] from the next wait.
    fn submit(&mut self, plans: &[StepPlan]);
    /// Hands over the masks of the plan that was submitted last for a member, before another plan
    /// is; returns at once. Every plan with masked rows gets them.
    fn masks(&mut self, member: usize, masks: &StepMasks);
    /// True if the hands read payloads in the memory in which they were written. Otherwise each has
    /// to be [carried](Self::carry) before a plan names it. The answer is always the same.
    fn is_near(&self) -> bool {
        true
    }
    /// Has a payload brought to where a member's hands read it, by other threads; returns at once.
    /// `there` is called on any thread, and dropped where the group ends before. What was carried
    /// to a group is there until it ends.
    fn carry(&mut self, _member: usize, _payload: &Arc<dyn Payload>, there: There) {
        there();
    }
    /// Blocks until something happens, at most `timeout_us` microseconds (`None`: without limit).
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Ends the group as quickly as it allows and waits until it is gone. Idempotent.
    fn stop(&mut self);
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
