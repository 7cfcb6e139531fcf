//! Starts and ends the engine thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::JoinHandle;

use crossbeam_channel::unbounded;
use parking_lot::Mutex;
use tracing::error;

use crate::clock::Clock;
use crate::config::EngineConfig;
use crate::executor::Executor;
use crate::handle::{EngineHandle, Shared, Size};
use crate::journal::Journal;
use crate::masks::MaskThreads;
use crate::member::{Carrying, Constrained, Member};
use crate::owner::Owner;
use crate::types::{BlockObserver, OutputSink, Peers, Stats, Status};
use crate::waiting::WaitingPlaces;

/// Callbacks of an engine.
pub struct Hooks {
    /// Receives every output.
    pub sink: Box<dyn OutputSink>,
    /// Receives every change of the prefix cache. `None` costs nothing.
    pub blocks: Option<Box<dyn BlockObserver>>,
    /// Access to the replicas that take over requests when the hand dies. `None`: requests wait
    /// until the hand is respawned.
    pub peers: Option<Box<dyn Peers>>,
    /// Counts submitted requests that are not admitted yet. Engines that share this counter also
    /// share its limit.
    pub queued: Arc<WaitingPlaces>,
    /// Called when the thread ends, for any reason, after the other hooks have been dropped.
    pub on_exit: Box<dyn FnOnce() + Send>,
}

impl Hooks {
    /// Creates hooks that only deliver outputs to `sink`.
    #[must_use]
    pub fn new(sink: Box<dyn OutputSink>) -> Self {
        Self { sink, blocks: None, peers: None, queued: Arc::default(), on_exit: Box::new(|| {}) }
    }
}

/// Starts engine threads.
#[derive(Debug)]
pub struct Engine;

/// A running engine thread. Dropping it stops the engine and waits until the thread has ended.
pub struct EngineThread {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Waits for the thread, which ends after [`EngineHandle::stop`] or a panic.
    pub fn join(mut self) {
        self.wait();
    }

    fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic was caught and reported inside the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.handle.stop();
        self.wait();
    }
}

impl Engine {
    /// Starts the owner thread of a replica. The thread starts the hand.
    ///
    /// # Errors
    /// The thread could not be created.
    pub fn start(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        clock: Arc<dyn Clock>,
        hooks: Hooks,
    ) -> std::io::Result<(EngineHandle, EngineThread)> {
        let (handles, thread) = Self::start_group(config, executor, clock, vec![hooks])?;
        Ok((handles[0].clone(), thread))
    }

    /// Starts the owner thread of replicas that share a rank group. The thread starts the group.
    /// The executor takes one plan per replica in each step. Returns the handles in the order of
    /// `hooks`.
    ///
    /// # Errors
    /// The thread could not be created.
    pub fn start_group(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        clock: Arc<dyn Clock>,
        hooks: Vec<Hooks>,
    ) -> std::io::Result<(Vec<EngineHandle>, EngineThread)> {
        assert!(!hooks.is_empty(), "an engine has a member");
        let threads = Arc::new(MaskThreads::start(config.mask_threads, Arc::clone(&clock))?);
        let (mut handles, mut members, mut on_exits) = (Vec::new(), Vec::new(), Vec::new());
        for Hooks { sink, blocks, peers, queued, on_exit } in hooks {
            let (orders, lane) = unbounded();
            let shared = Arc::new(Shared {
                clock: Arc::clone(&clock),
                waker: executor.waker(),
                queued,
                max_queued: config.max_queued_requests,
                page_size: config.page_size,
                fair: config.fair_queueing,
                room: AtomicU32::new(0),
                draining: AtomicBool::new(false),
                status: Mutex::new(Status::Starting("spawning".into())),
                stats: Mutex::new(Stats::default()),
                facts: Mutex::new(None),
                journal: Journal::default(),
                size: Size {
                    slots: config.slots,
                    max_running: config.max_running_requests,
                    page_size: config.page_size,
                    lookahead: config.lookahead,
                },
            });
            let handle = EngineHandle { shared, orders };
            let constrained =
                Constrained::new(Arc::clone(&threads), config.mask_share, executor.waker());
            let carrying = Carrying::new(executor.is_near());
            let listeners = (sink, blocks, peers);
            let member =
                Member::new(config.clone(), listeners, handle.clone(), lane, constrained, carrying);
            handles.push(handle);
            members.push(member);
            on_exits.push(on_exit);
        }
        let handle = handles[0].clone();
        let owned: Vec<Arc<Shared>> = handles.iter().map(|handle| handle.shared.clone()).collect();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let owner = Owner::new(config, executor, clock, members);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| owner.run())) {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied())
                    .unwrap_or("no message");
                error!("the engine thread panicked: {text}");
                for shared in owned {
                    *shared.status.lock() =
                        Status::Failed(format!("the engine thread panicked: {text}"));
                }
            }
            on_exits.into_iter().for_each(|on_exit| on_exit());
        })?;
        Ok((handles, EngineThread { handle, thread: Some(thread) }))
    }
}
