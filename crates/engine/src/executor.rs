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
/// At most two plans are in flight. After [`Signal::Died`] only [`start`](Self::start) and
/// [`stop`](Self::stop) may be called.
pub trait Executor: Send {
    /// Begins to start the group; returns at once. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Hands over a plan; returns at once. A failure shows as [`Signal::Died`] from the next wait.
    fn submit(&mut self, plan: &StepPlan);
    /// Hands over the masks of the plan that was submitted last, before another plan is; returns at
    /// once. Every plan with masked rows gets them.
    fn masks(&mut self, masks: &StepMasks);
    /// True if the hand reads payloads in the memory in which they were written. Otherwise each has
    /// to be [carried](Self::carry) before a plan names it.
    fn is_near(&self) -> bool {
        true
    }
    /// Has a payload brought to where the hand reads it, by other threads; returns at once. `there`
    /// is called on any thread, and dropped where the group ends before. What was carried to a
    /// group is there until it ends.
    fn carry(&mut self, _payload: &Arc<dyn Payload>, there: There) {
        there();
    }
    /// Blocks until something happens, at most `timeout_us` microseconds (`None`: without limit).
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Ends the group as quickly as it allows and waits until it is gone. Idempotent.
    fn stop(&mut self);
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
