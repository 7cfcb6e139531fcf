//! Real or virtual time after the engine's [`Clock`].

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_engine::{Clock, SystemClock};
use tracing::warn;

/// The time that a simulated device runs in.
#[derive(Clone)]
pub enum SimClock {
    /// The machine's clock: steps take as long as the profile's.
    Real(Arc<SystemClock>),
    /// A counter that jumps to the next event as soon as no thread has work before it.
    Virtual(Arc<AtomicU64>),
}

impl SimClock {
    /// The machine's time.
    #[must_use]
    pub fn real() -> Self {
        Self::Real(Arc::default())
    }

    /// Virtual time from 0.
    #[must_use]
    pub fn virtual_time() -> Self {
        Self::Virtual(Arc::default())
    }

    /// Moves virtual time on to `at_us` unless it is later already.
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
}

/// Ends this thread's sleeps when they are due. Left alone, Linux lets them last up to 50 us
/// longer, to wake several threads at once: a tenth of a step of a small model.
pub(crate) fn sleep_exactly() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(1)) {
        warn!("simulated steps may take up to 50 us longer than the profile says: {error}");
    }
}
