//! The owner thread of a replica, or of all replicas of a step group. It handles intake, lookahead,
//! the hand's death, replay and terminal events.
//!
//! | thread | owns | blocks on |
//! |---|---|---|
//! | engine (one per rank group) | schedulers, executor, plan buffers | [`Executor::wait`]: the hand's socket and the waker, nothing else |
//! | any | an [`EngineHandle`] | never |
//!
//! All orders reach the thread through one channel, so an abort can't overtake its submit. At most
//! `max_queued_requests` requests wait in the channel; more are refused with
//! [`SubmitError::QueueFull`]. Aborts have no bound, because they matter most under overload. The
//! thread calls [`OutputSink::deliver`] once per step.
//!
//! A step group's thread has one member (a replica) per rank. Members share only the step number
//! and the rank group. An ordinary thread has one member. Each member has its own [`EngineHandle`].
//!
//! With other replicas ([`Peers`]), a thread that loses its hand gives its requests to them, and
//! does not wait for the respawn.
//!
//! Images ([`Picture`]) stay files until the scheduler needs their patches. Then another thread
//! writes the patches into memory that the hand reads.
//!
//! Payloads ([`Payload`]) are too big for plans. Before its request is submitted, a payload is
//! written into memory that the hand reads. The thread keeps the payload until the request has
//! ended and no step in flight can read it. If the hand is on another machine
//! ([`Executor::is_near`]), other threads copy payloads there. A request is not scheduled until its
//! payloads have arrived.
//!
//! The thread reads time only from its [`Clock`]. So tests and planning run in virtual time.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::mpsc::{Sender, channel};
//!
//! use forebay_engine::{
//!     Engine, EngineConfig, EngineRequest, Hooks, Output, OutputSink, Request, Status,
//! };
//! use forebay_sim::{SimClock, SimConfig, SimExecutor};
//!
//! struct Sink(Sender<Output>);
//!
//! impl OutputSink for Sink {
//!     fn deliver(&mut self, outputs: Vec<Output>) {
//!         outputs.into_iter().for_each(|output| self.0.send(output).expect("somebody listens"));
//!     }
//! }
//!
//! let clock = SimClock::virtual_time();
//! let (executor, _control) = SimExecutor::new(SimConfig { clock: clock.clone(), ..SimConfig::default() });
//! let config = EngineConfig { context_length: 256, ..EngineConfig::default() };
//! let (sender, outputs) = channel();
//! let hooks = Hooks::new(Box::new(Sink(sender)));
//! let (handle, _thread) = Engine::start(config, Box::new(executor), Arc::new(clock), hooks)?;
//! while handle.status() != Status::Ready {
//!     std::thread::yield_now();
//! }
//!
//! let prompt = [1, 2, 3].into();
//! let request = Request { id: 7, prompt, max_tokens: 2, ..Request::default() };
//! handle.submit(EngineRequest { request, ..EngineRequest::default() }).expect("room");
//! let given: Vec<Output> = outputs.iter().take(2).collect();
//! assert!(given.iter().all(|output| output.token.is_some()));
//! assert!(given[1].finish.is_some());
//! # Ok::<(), std::io::Error>(())
//! ```

mod clock;
mod config;
mod constraint;
mod executor;
mod handle;
mod journal;
mod masks;
mod member;
mod owner;
mod payload;
mod picture;
mod recovery;
mod thread;
mod tier;
mod types;
mod waiting;

pub use clock::{Clock, SystemClock};
pub use config::{
    DraftConfig, EngineConfig, HostConfig, ImageConfig, Preemption, SaveUnit, as_seconds,
};
pub use constraint::{Allowed, Constraint, ConstraintError};
pub use executor::{Executor, Signal, Wake};
pub use forebay_protocol::{
    AdapterOrder, Dtype, Grid, PAGE_NOTE_BYTES, Pooling, PromptLogprobs, Ready, STATE_COUNT_BYTES,
    STATE_NOTE_BYTES, SlotSpec,
};
pub use forebay_scheduler::{
    BlockEvent, BlockHash, DecodeGap, DraftCounts, DraftMatch, DraftSource, DraftStats, FairQueue,
    History, HostStats, HostTier, ImageId, ImageStats, Loan, Lookup, Namer, Past, Phase, Place,
    PlaceStats, PlannedStep, Policy, PromptImage, PromptTail, Proposer, QueuedRequest, Request,
    RequestView, SavePolicy, SharedHistory, SharedText, StateCache, StateStats,
    Stats as SchedulerStats,
};
pub use handle::{EngineHandle, Size};
pub use journal::{EventKind, Journal, KEPT_MOMENTS, KEPT_STEPS, Moment, Notes, Since, StepNote};
pub use member::MOST_VIEWS;
pub use payload::{Embeds, Payload, Payloads, There};
pub use picture::{Picture, PictureError, Placed, Placement};
pub use thread::{Engine, EngineThread, Hooks};
pub use tier::TierMemory;
pub use types::{
    Admission, BlockObserver, EngineRequest, Entrant, Facts, FinishReason, HandStats, LoanReply,
    Orphan, Output, OutputSink, PauseMode, PauseReply, Peers, PredictedTokens, Preference, Reload,
    ReloadReply, RequestError, RequestId, SampledToken, Stats, Status, SubmitError,
};
pub use waiting::WaitingPlaces;
