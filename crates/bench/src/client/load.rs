//! Lets a busy thread sleep briefly, which saves CPU time: it then finds more data per wake-up.
//!
//! A thread that reads many streams wakes for almost every chunk, and each wake-up costs as much
//! CPU time as the read. So under load the thread sleeps for [`REST`] before it waits. Chunks are
//! timed late by at most [`REST`], which is little compared with the gaps of a server under such
//! load. With `--precise` no thread ever sleeps like this.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The number of reads per second from which on a thread counts as busy.
const BUSY: f64 = 10_000.0;
/// The interval over which reads are counted.
const WINDOW: Duration = Duration::from_millis(10);
/// How long a busy thread sleeps.
const REST: Duration = Duration::from_micros(200);

#[derive(Debug, Default)]
struct Load {
    reads: u32,
    since: Option<Instant>,
    busy: bool,
}

thread_local! {
    static LOAD: RefCell<Load> = RefCell::default();
}

impl Load {
    /// Evaluates the reads at the end of a window. Returns true if the thread is busy.
    fn look(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(*self.since.get_or_insert(now));
        if elapsed >= WINDOW {
            self.busy = f64::from(self.reads) >= BUSY * elapsed.as_secs_f64();
            self.reads = 0;
            self.since = Some(now);
        }
        self.busy
    }
}

/// Counts a read of this thread. Returns true if the thread is busy.
pub(super) fn count_read() -> bool {
    LOAD.with_borrow_mut(|load| {
        load.reads = load.reads.saturating_add(1);
        load.busy
    })
}

/// Sleeps if the calling thread is busy. A thread calls this before it waits.
pub(crate) fn rest() {
    if LOAD.with_borrow_mut(|load| load.look(Instant::now())) {
        std::thread::sleep(REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_reads_in_a_window_are_busy_and_few_are_not() {
        let start = Instant::now();
        let mut load = Load::default();
        assert!(!load.look(start));
        load.reads = 100;
        assert!(!load.look(start + WINDOW / 2), "the window has not ended");
        assert!(load.look(start + WINDOW), "100 in 10 ms");
        assert!(load.look(start + WINDOW + WINDOW / 2), "busy until the next window ends");
        load.reads = 99;
        assert!(!load.look(start + 2 * WINDOW));
        load.reads = 150;
        assert!(!load.look(start + 4 * WINDOW), "150 in 20 ms");
    }
}
