//! The engine's executor: a rank group that executes plans, real or simulated.

use std::sync::Arc;

use forebay_protocol::{Ready, StepMasks, StepPlan, StepResult};

use crate::payload::{Payload, There};

/// The end of a wait.
#[derive(Debug)]
pub enum Signal {
    /// A loading hand has made progress; the text names the part.
    Progress(String),
    /// The hand takes plans from now on.
    Ready(Ready),
    /// The oldest plan in flight is done.
    Result(StepResult),
    /// The waker was used.
    Woken,
    /// The time is over.
    TimedOut,
    /// The whole rank group has ended; one line has the reason. Plans in flight get no result.
    Died(String),
}

/// Ends the current or the next [`Executor::wait`], from any thread. It is cheap if a wake-up is
/// already pending.
pub trait Wake: Send + Sync {
    /// Makes `wait` return [`Signal::Woken`] soon, or another signal that came first.
    fn wake(&self);
}

/// A rank group: takes numbered plans, gives results in order.
///
/// At most two plans are in flight. After [`Signal::Died`] only [`start`](Self::start) and
/// [`stop`](Self::stop) may be called.
pub trait Executor: Send {
    /// Begins to start the group; returns at once. [`Signal::Ready`] or [`Signal::Died`] follows.
    fn start(&mut self);
    /// Gives a plan to the group; returns at once. The next wait reports a failure as
    /// [`Signal::Died`].
    fn submit(&mut self, plan: &StepPlan);
    /// Gives the masks of the newest plan to the group, before another plan is submitted; returns
    /// at once. Every plan with masked rows has masks.
    fn masks(&mut self, masks: &StepMasks);
    /// True if the hand reads payloads in the memory in which they were written. Otherwise each
    /// payload has to be [carried](Self::carry) before a plan names it.
    fn is_near(&self) -> bool {
        true
    }
    /// Has other threads bring a payload to the memory of the hand; returns at once. `there` is
    /// called on any thread. It is dropped if the group ends before. A carried payload stays there
    /// until the group ends.
    fn carry(&mut self, _payload: &Arc<dyn Payload>, there: There) {
        there();
    }
    /// Waits for the next signal, at most `timeout_us` microseconds (`None`: without a limit).
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal;
    /// Ends the group as quickly as it allows, and waits for its end. Idempotent.
    fn stop(&mut self);
    /// The waker of [`wait`](Self::wait).
    fn waker(&self) -> Arc<dyn Wake>;
}
