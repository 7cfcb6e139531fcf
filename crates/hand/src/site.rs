//! Where a rank runs: as a child process, or at a [`Site`].

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_engine::{Payload, There};
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::process::{Exit, RankProcess};

/// How long to wait after the exit order before SIGTERM, and then before SIGKILL.
const PATIENCE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];

/// The description of a rank that a site has to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankOrder {
    /// The hand's environment variables.
    pub env: Vec<(String, String)>,
    /// The size in bytes of the shared memory that the hand maps. [Carried](Distant::carry)
    /// payloads have the same offsets in it.
    pub arena_bytes: u32,
}

/// A rank that runs elsewhere, as the executor uses it: a socket and a handle. The socket never
/// blocks, and is closed when the rank ends.
pub type Remote = (UnixStream, Box<dyn Distant>);

/// Runs rank groups elsewhere, and connects them to sockets of this process.
pub trait Site: Send + Sync {
    /// Starts all ranks of a group. Returns their sockets and handles immediately, with rank 0
    /// first. Until the ranks run, the site writes `progress` frames to the sockets.
    ///
    /// # Errors
    /// The operating system refuses a socket.
    fn spawn(&self, group: Vec<RankOrder>) -> io::Result<Vec<Remote>>;
}

/// A rank that runs elsewhere. Dropping it ends the rank.
pub trait Distant: Send {
    /// Kills the rank, without waiting for its end.
    fn doom(&self);
    /// Waits until the rank has ended, for at most `limit`. Returns true if it has ended.
    fn ended_within(&self, limit: Duration) -> bool;
    /// Starts copying a payload to the same offset of the shared memory that the rank maps, and
    /// returns at once. `there` is called after the copy, or dropped if the rank ends before.
    fn carry(&self, payload: &Arc<dyn Payload>, there: There);
    /// Ends the rank. Returns how it ended, if that is known soon.
    fn bury(self: Box<Self>) -> Exit;
}

/// Splits `there` into `count` callbacks. The last of them to be called runs `there`.
pub(crate) fn last_of(count: usize, there: There) -> impl Iterator<Item = There> {
    let (left, there) = (AtomicUsize::new(count), Mutex::new(Some(there)));
    let shared = Arc::new((left, there));
    std::iter::repeat_n(shared, count).map(|shared| {
        let one: There = Box::new(move || {
            let (left, there) = &*shared;
            if left.fetch_sub(1, Ordering::AcqRel) == 1
                && let Some(there) = there.lock().take()
            {
                there();
            }
        });
        one
    })
}

/// A rank that has been started.
pub(crate) enum Process {
    /// A child process of this process.
    Here(RankProcess),
    /// A rank at a site.
    There(Box<dyn Distant>),
}

impl Process {
    pub(crate) fn doom(&self) {
        match self {
            Self::Here(process) => process.doom(),
            Self::There(distant) => distant.doom(),
        }
    }

    pub(crate) fn bury(self) -> Exit {
        match self {
            Self::Here(process) => process.bury(),
            Self::There(distant) => distant.bury(),
        }
    }

    /// True if the rank ran on this machine, and has exited while memory ran out.
    pub(crate) fn starved(&self) -> bool {
        matches!(self, Self::Here(process) if process.starved())
    }

    fn ended_within(&self, limit: Duration) -> bool {
        match self {
            Self::Here(process) => process.ended_within(limit),
            Self::There(distant) => distant.ended_within(limit),
        }
    }

    /// Ends all ranks at the same time. They must have been ordered to exit. Waits a little, sends
    /// SIGTERM, waits again, and sends SIGKILL.
    pub(crate) fn end(processes: Vec<Self>) {
        for (patience, signal) in PATIENCE.into_iter().zip([Signal::TERM, Signal::KILL]) {
            let deadline = Instant::now() + patience;
            for process in &processes {
                process.ended_within(deadline.saturating_duration_since(Instant::now()));
            }
            let left = processes.iter().filter(|process| !process.ended_within(Duration::ZERO));
            for process in left {
                match process {
                    Self::Here(process) => process.signal(signal),
                    // The site kills the rank when its connection closes. A rank that is not
                    // started yet can't receive an order.
                    Self::There(distant) => distant.doom(),
                }
            }
        }
        // Processes that a leader started may outlive it. They are killed when the leader's handle
        // is dropped.
        processes.iter().for_each(Self::doom);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_several_does_it() {
        let done = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&done);
        let there: There = Box::new(move || _ = seen.fetch_add(1, Ordering::SeqCst));
        let mut all: Vec<There> = last_of(3, there).collect();
        let last = all.pop().expect("three");
        all.into_iter().for_each(|one| one());
        assert_eq!(done.load(Ordering::SeqCst), 0);
        last();
        assert_eq!(done.load(Ordering::SeqCst), 1);
    }
}
