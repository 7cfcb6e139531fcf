//! Payloads: data too big for plans, in memory that the hand reads. Also decides how long they are
//! kept.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

/// Allocates payloads in memory that the hand reads (the arena).
pub trait Payloads: Send + Sync {
    /// The size of the arena in bytes.
    fn capacity(&self) -> usize;
    /// The number of reserved bytes.
    fn used(&self) -> usize;
    /// Reserves `bytes` bytes. `None`: the arena has not enough free memory now.
    fn reserve(&self, bytes: usize) -> Option<Box<dyn Payload>>;
    /// Registers `notify`, which is called whenever memory is freed. It is called on any thread and
    /// must be quick.
    fn on_freed(&self, notify: Box<dyn Fn() + Send + Sync>);
}

/// A reserved range of the arena. Dropping it frees the memory.
pub trait Payload: Debug + Send + Sync {
    /// The offset of the payload in the arena, as plans name it.
    fn offset(&self) -> u32;
    /// Writes `bytes` at byte `at` of the payload. No plan may have named the payload yet.
    ///
    /// # Errors
    /// The bytes do not fit, or the system has no memory for them.
    fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()>;
    /// Reads at most `into.len()` bytes, from byte `at` of the payload on. Returns the number of
    /// bytes; 0 is the end of the payload. Outposts use this to copy a payload to another machine.
    ///
    /// # Errors
    /// The system call fails.
    fn read(&self, at: usize, into: &mut [u8]) -> io::Result<usize>;
}

/// A callback for a payload that is copied to a hand's machine. It is called when the payload has
/// arrived in the hand's memory, and is dropped if the payload will never arrive.
pub type There = Box<dyn FnOnce() + Send>;

/// Prompt embeddings, used in place of token ids.
#[derive(Debug, Clone)]
pub struct Embeds {
    /// The payload with the vectors. Several requests may share it.
    pub payload: Arc<dyn Payload>,
    /// The arena offset of the first vector in bytes, as plans name it. It lies within the payload.
    pub offset: u32,
}

/// The payloads of live requests, and those of ended requests that a step in flight may still read.
#[derive(Debug, Default)]
pub(crate) struct Held {
    live: HashMap<u64, Vec<Arc<dyn Payload>>>,
    /// The payloads of ended requests, each with the last step that may read it, in order.
    retired: VecDeque<(u64, Vec<Arc<dyn Payload>>)>,
}

impl Held {
    pub(crate) fn hold(&mut self, request: u64, payloads: Vec<Arc<dyn Payload>>) {
        if !payloads.is_empty() {
            self.live.insert(request, payloads);
        }
    }

    /// The payloads of a request.
    pub(crate) fn of(&self, request: u64) -> &[Arc<dyn Payload>] {
        self.live.get(&request).map_or(&[], |payloads| payloads)
    }

    /// The requests with payloads, in arbitrary order.
    pub(crate) fn owners(&self) -> impl Iterator<Item = u64> {
        self.live.keys().copied()
    }

    /// Removes the payloads of a request that moves to another engine. No step in flight may read
    /// them.
    pub(crate) fn give(&mut self, request: u64) -> Vec<Arc<dyn Payload>> {
        self.live.remove(&request).unwrap_or_default()
    }

    /// Retires the payloads of a request that has ended. `last_step` is the newest planned step, if
    /// any step is in flight.
    pub(crate) fn retire(&mut self, request: u64, last_step: Option<u64>) {
        if let Some(payloads) = self.live.remove(&request)
            && let Some(step) = last_step
        {
            self.retired.push_back((step, payloads));
        }
    }

    /// Drops the payloads that only this step and earlier ones could read. The hand has returned
    /// the results of these steps.
    pub(crate) fn answered(&mut self, step: u64) {
        while self.retired.front().is_some_and(|(last, _)| *last <= step) {
            self.retired.pop_front();
        }
    }

    /// Drops retired payloads, because the dead hand reads them no more.
    pub(crate) fn hand_died(&mut self) {
        self.retired.clear();
    }
}
