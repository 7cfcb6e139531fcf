//! Real or virtual time behind the engine's [`Clock`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_engine::{Clock, SystemClock};

/// The time that a simulated device runs in.
#[derive(Clone)]
pub enum SimClock {
    /// The machine's clock: steps take as long as the model says.
    Real(Arc<SystemClock>),
    /// A counter that jumps to the next event as soon as nobody has anything to do before it.
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

    /// In virtual time, moves on to `at_us` unless it is later already.
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
