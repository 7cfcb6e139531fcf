//! The owner thread of a replica, or of the replicas of a step group: intake, lookahead, death and
//! replay, terminal events.
//!
//! | thread | owns | blocks on |
//! |---|---|---|
//! | engine (one a rank group) | schedulers, executor, plan buffers | [`Executor::wait`]: the hand's socket and the waker, nothing else |
//! | any | an [`EngineHandle`] | never |
//!
//! One lane leads into the thread, so that an abort can't overtake its submit. Requests in it are
//! bounded by `max_queued` (refused with [`SubmitError::QueueFull`] at the door); aborts are not,
//! because they matter most under the overload that would drop them. Out of the thread goes one
//! [`OutputSink::deliver`] a step.
//!
//! A step group's thread has a member for each rank: replicas that share a step's number and a
//! rank group, and nothing else. An ordinary thread has one. Each has its own [`EngineHandle`].
//!
//! Where there are other replicas ([`Peers`]), a thread that loses its hand gives its requests to
//! them instead of waiting for the respawn.
//!
//! Images ([`Picture`]) stay files until the scheduler says that one is needed. Then another thread
//! puts its patches into that memory.
//!
//! Payloads ([`Payload`]) are too big for plans. They lie in memory that the hand reads, and are
//! there before their request is submitted. The thread keeps them until the request has ended and
//! no step in flight can read them.
//!
//! The thread reads no clock but the [`Clock`] it is given, so that tests and planning run in
//! virtual time.

mod clock;
mod config;
mod constraint;
mod executor;
mod handle;
mod journal;
mod member;
mod owner;
mod payload;
mod picture;
mod recovery;
mod thread;
mod types;
mod waiting;

pub use clock::{Clock, SystemClock};
pub use config::{EngineConfig, HostConfig};
pub use constraint::{Allowed, Broken, Constraint};
pub use executor::{Executor, Signal, Wake};
pub use forebay_protocol::{Dtype, Grid, Pooling, PromptLogprobs, Ready, SlotSpec};
pub use forebay_scheduler::{
    BlockEvent, BlockHash, HostStats, HostTier, ImageId, ImageStats, Namer, Past, Phase, Place,
    Planned, Policy, PromptImage, PromptTail, Request, RequestView, SavePolicy,
    Stats as SchedulerStats,
};
pub use handle::{EngineHandle, Size};
pub use journal::{Journal, KEPT_MOMENTS, KEPT_STEPS, Moment, Notes, Since, StepNote, What};
pub use member::MOST_VIEWS;
pub use payload::{Embeds, Payload, Payloads};
pub use picture::{Picture, PictureError, Placed, Placement};
pub use thread::{Engine, EngineThread, Hooks};
pub use types::{
    Admission, BlockObserver, EngineRequest, Facts, FinishReason, HandStats, Orphan, Output,
    OutputSink, Peers, Preference, RequestError, RequestId, SampledToken, Stats, Status,
    SubmitError,
};
pub use waiting::Waiting;
