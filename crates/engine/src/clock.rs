//! The engine's clocks.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// Microseconds since an arbitrary fixed moment.
    fn now_us(&self) -> u64;

    /// CPU time of the calling thread, in microseconds. It does not advance while the thread waits
    /// or is preempted. In virtual time it equals [`Self::now_us`].
    fn thread_us(&self) -> u64 {
        self.now_us()
    }
}

/// The system's monotonic clock.
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

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_thread_that_sleeps_takes_no_cpu_time() {
        let clock = SystemClock::default();
        let (now, used) = (clock.now_us(), clock.thread_us());
        sleep(Duration::from_millis(50));
        assert!(clock.now_us() - now >= 50_000);
        assert!(clock.thread_us() - used < 25_000);
        let used = clock.thread_us();
        while clock.thread_us() == used {}
    }
}
