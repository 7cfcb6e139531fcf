//! Where a rank runs: as a child of this process, or at a [`Site`].

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_engine::{Payload, There};
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::process::{Exit, RankProcess};

/// How long to wait between the exit order and SIGTERM, and between that and SIGKILL.
const PATIENCE: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];

/// A site's instructions for a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankOrder {
    /// Variables of the hand.
    pub env: Vec<(String, String)>,
    /// Bytes of the shared memory that the hand maps. [Carried](Distant::carry) payloads have the
    /// same offsets in it.
    pub arena_bytes: u32,
}

/// The executor's ends of a rank that runs elsewhere: its socket and its handle. The socket never
/// blocks, and ends when the rank ends.
pub type Remote = (UnixStream, Box<dyn Distant>);

/// Runs rank groups elsewhere, and connects them to sockets here.
pub trait Site: Send + Sync {
    /// Starts all ranks of a group and returns at once, with rank 0 first. Until the ranks run, the
    /// site itself writes `progress` frames to the sockets.
    ///
    /// # Errors
    /// The system refuses a socket.
    fn spawn(&self, group: Vec<RankOrder>) -> io::Result<Vec<Remote>>;
}

/// A rank that runs elsewhere. Dropping it ends the rank.
pub trait Distant: Send {
    /// Kills the rank, without waiting for its end.
    fn doom(&self);
    /// Waits for the rank's end, at most `limit`.
    fn ended_within(&self, limit: Duration) -> bool;
    /// Starts bringing a payload to the shared memory that the rank maps, at the same offset.
    /// `there` is called afterwards, or dropped if the rank ends first. Returns at once.
    fn carry(&self, payload: &Arc<dyn Payload>, there: There);
    /// Ends the rank. Returns a description of its end, if it is known soon.
    fn bury(self: Box<Self>) -> Exit;
}

/// Splits one callback into `count` parts: the last part that is called runs it.
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

/// A rank that was started.
pub(crate) enum Process {
    /// A child of this process.
    Here(RankProcess),
    /// Somewhere else.
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

    /// True if it has ended on this machine while memory ran out.
    pub(crate) fn starved(&self) -> bool {
        matches!(self, Self::Here(process) if process.starved())
    }

    fn ended_within(&self, limit: Duration) -> bool {
        match self {
            Self::Here(process) => process.ended_within(limit),
            Self::There(distant) => distant.ended_within(limit),
        }
    }

    /// Ends ranks that have been ordered to exit, all together: waits a little, then sends SIGTERM,
    /// then SIGKILL.
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
                    // It is killed where it runs once its connection is gone. A rank that still
                    // waits for a place can't receive an order.
                    Self::There(distant) => distant.doom(),
                }
            }
        }
        // Processes that a leader started may outlive it, and are killed when it is dropped.
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
