//! The engine's clocks.

use std::time::Instant;

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// Microseconds since some fixed moment.
    fn now_us(&self) -> u64;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now_us(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}
