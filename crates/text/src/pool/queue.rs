//! The queue of inputs, and the order in which the text threads take them.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::work::{Job, Long};
use crate::error::TextError;

/// The maximum estimated number of tokens of a batch. A batch takes a few milliseconds at most.
const BATCH_TOKENS: usize = 2048;

/// The queue, with three lanes. Whole inputs are taken in order of arrival. Long inputs that were
/// cut alternate piece by piece. Long pieces that could not be cut run on a separate thread.
#[derive(Debug)]
pub(super) struct Queue {
    lanes: Mutex<Lanes>,
    ready: Condvar,
    /// Signals work to the thread for long pieces.
    long_ready: Condvar,
    limit: usize,
    threads: usize,
    batch_inputs: Option<NonZeroUsize>,
}

#[derive(Debug, Default)]
struct Lanes {
    waiting: VecDeque<Job>,
    /// The estimated number of tokens in `waiting`.
    tokens: usize,
    /// Inputs that were cut, each with the index of its next piece.
    long: VecDeque<(Arc<Long>, usize)>,
    /// Inputs whose next piece is a long one, each with the index of that piece.
    long_pieces: VecDeque<(Arc<Long>, usize)>,
    closed: bool,
}

/// The next work for a thread.
#[derive(Debug)]
pub(super) enum Task {
    Batch(Vec<Job>),
    Piece(Arc<Long>, usize),
}

impl Queue {
    /// Creates a queue for `limit` waiting inputs and `threads` threads. Each thread takes at most
    /// `batch_inputs` inputs at a time.
    pub(super) fn new(limit: usize, threads: usize, batch_inputs: Option<NonZeroUsize>) -> Self {
        let lanes = Mutex::new(Lanes::default());
        let (ready, long_ready) = (Condvar::new(), Condvar::new());
        Self { lanes, ready, long_ready, limit, threads, batch_inputs }
    }

    /// Appends an input.
    ///
    /// # Errors
    /// The queue is full or closed.
    pub(super) fn push(&self, job: Job) -> Result<(), TextError> {
        {
            let mut lanes = self.lanes.lock();
            if lanes.closed {
                return Err(TextError::Closed);
            }
            if lanes.waiting.len() >= self.limit {
                return Err(TextError::Busy);
            }
            lanes.tokens += job.tokens;
            lanes.waiting.push_back(job);
        }
        self.ready.notify_one();
        Ok(())
    }

    /// Makes the pieces of an input available to all threads.
    pub(super) fn push_long(&self, long: Arc<Long>) {
        self.put(&mut self.lanes.lock(), long, 0);
        self.ready.notify_all();
    }

    /// Puts an input into the lane for its next piece.
    fn put(&self, lanes: &mut Lanes, long: Arc<Long>, piece: usize) {
        if long.is_long(piece) {
            lanes.long_pieces.push_back((long, piece));
            self.long_ready.notify_one();
        } else {
            lanes.long.push_back((long, piece));
        }
    }

    /// Removes the pieces of an input that no thread has taken.
    pub(super) fn forget(&self, long: &Arc<Long>) {
        let mut lanes = self.lanes.lock();
        lanes.long.retain(|(other, _)| !Arc::ptr_eq(other, long));
        lanes.long_pieces.retain(|(other, _)| !Arc::ptr_eq(other, long));
    }

    /// Waits for a long piece, of the oldest input first; `None` once the queue is closed.
    pub(super) fn take_long(&self) -> Option<(Arc<Long>, usize)> {
        let mut lanes = self.lanes.lock();
        loop {
            if lanes.closed {
                return None;
            }
            if let Some((long, piece)) = lanes.long_pieces.pop_front() {
                if piece + 1 < long.pieces() {
                    self.put(&mut lanes, Arc::clone(&long), piece + 1);
                    self.ready.notify_one();
                }
                return Some((long, piece));
            }
            self.long_ready.wait(&mut lanes);
        }
    }

    /// Waits for work; `None` once the queue is closed and empty. If there are both batches and
    /// pieces, a thread gets them alternately: `after_batch` is true if its last work was a batch.
    pub(super) fn take(&self, after_batch: bool) -> Option<Task> {
        let mut lanes = self.lanes.lock();
        loop {
            let piece = |lanes: &mut Lanes| self.piece(lanes);
            let batch = |lanes: &mut Lanes| lanes.batch(self.threads, self.batch_inputs);
            let task = if after_batch {
                piece(&mut lanes).or_else(|| batch(&mut lanes))
            } else {
                batch(&mut lanes).or_else(|| piece(&mut lanes))
            };
            if task.is_some() || lanes.closed {
                return task;
            }
            self.ready.wait(&mut lanes);
        }
    }

    /// Closes the queue to new work. Threads finish the queued work, except long pieces, and end.
    pub(super) fn close(&self) {
        self.lanes.lock().closed = true;
        self.ready.notify_all();
        self.long_ready.notify_all();
    }

    fn piece(&self, lanes: &mut Lanes) -> Option<Task> {
        let (long, piece) = lanes.long.pop_front()?;
        if piece + 1 < long.pieces() {
            self.put(lanes, Arc::clone(&long), piece + 1);
        }
        Some(Task::Piece(long, piece))
    }

    /// Closes the queue, and drops the queued work.
    pub(super) fn abandon(&self) {
        let mut lanes = self.lanes.lock();
        *lanes = Lanes { closed: true, ..Lanes::default() };
        drop(lanes);
        self.ready.notify_all();
        self.long_ready.notify_all();
    }

    /// Returns the number of waiting inputs.
    pub(super) fn waiting(&self) -> usize {
        self.lanes.lock().waiting.len()
    }
}

impl Lanes {
    /// Takes one thread's share of the waiting inputs, which leaves some for the other threads.
    fn batch(&mut self, threads: usize, inputs: Option<NonZeroUsize>) -> Option<Task> {
        let share = self.tokens.div_ceil(threads).min(BATCH_TOKENS);
        let most = inputs.map_or(usize::MAX, NonZeroUsize::get);
        let mut batch = Vec::new();
        let mut tokens = 0;
        while batch.len() < most
            && let Some(next) = self.waiting.front()
            && (tokens == 0 || tokens + next.tokens <= share)
            && let Some(job) = self.waiting.pop_front()
        {
            tokens += job.tokens;
            batch.push(job);
        }
        self.tokens -= tokens;
        (!batch.is_empty()).then_some(Task::Batch(batch))
    }
}
