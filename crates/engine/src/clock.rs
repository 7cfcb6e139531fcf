//! The engine's clocks.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// Microseconds since some fixed moment.
    fn now_us(&self) -> u64;

    /// Microseconds for which this thread has computed. While others have its core, the clock runs
    /// on and this does not. Virtual clocks make no difference.
    fn thread_us(&self) -> u64 {
        self.now_us()
    }
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

    fn thread_us(&self) -> u64 {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1_000
    }
}
