//! Real or virtual time for the engine's [`Clock`].

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_engine::{Clock, SystemClock};
use tracing::warn;

/// The time in which a simulated device runs.
#[derive(Clone)]
pub enum SimClock {
    /// The system clock: steps really take the profile's time.
    Real(Arc<SystemClock>),
    /// A counter of microseconds that jumps to the next event once no thread has work before that
    /// event.
    Virtual(Arc<AtomicU64>),
}

impl SimClock {
    /// Uses the system clock.
    #[must_use]
    pub fn real() -> Self {
        Self::Real(Arc::default())
    }

    /// Uses virtual time, starting at 0.
    #[must_use]
    pub fn virtual_time() -> Self {
        Self::Virtual(Arc::default())
    }

    /// Advances virtual time to `at_us`, unless the time is later already.
    pub(crate) fn advance_to(&self, at_us: u64) {
        if let Self::Virtual(now) = self {
            now.fetch_max(at_us, Ordering::AcqRel);
        }
    }
}

impl Clock for SimClock {
    fn now_us(&self) -> u64 {
        match self {
            Self::Real(clock) => clock.now_us(),
            Self::Virtual(now) => now.load(Ordering::Acquire),
        }
    }

    fn thread_us(&self) -> u64 {
        match self {
            Self::Real(clock) => clock.thread_us(),
            Self::Virtual(_) => self.now_us(),
        }
    }
}

/// Makes the sleeps of this thread exact. By default, Linux extends a sleep by up to 50 us in order
/// to wake several threads at once. That is a tenth of a small model's step.
pub(crate) fn sleep_exactly() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
        warn!("simulated steps may take up to 50 us longer than the profile says: {error}");
    }
}
