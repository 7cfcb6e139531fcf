//! A scheduler's reports: events, numbers, and reasons for refusing a result.

use derive_more::AddAssign;
use forebay_kvcache::ImageId;
use forebay_protocol::PromptLogprobs;
use serde::Serialize;
use thiserror::Error;

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// One of its stop ids was sampled. It is also the last [`Event::Token`].
    Stop {
        /// The id.
        token: i32,
    },
    /// The request has all the tokens it may have, or its vector.
    Length,
    /// The request's logits were not finite.
    NotFinite,
}

/// The events of requests. [`Event::Finished`] is the last of each, and comes once; an aborted or
/// poisoned request has none.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The request got a slot and pages.
    Admitted {
        /// The request's id.
        id: u64,
        /// Prompt tokens found in the prefix cache, told at the first admission; 0 at later ones.
        cached_tokens: u32,
        /// True if the request was admitted before, and computes again the positions that it lost.
        replayed: bool,
        /// True if the request has no row before blocks have come back from the host tier.
        /// [`Event::Arrived`] tells when they have, unless the request is preempted.
        restoring: bool,
    },
    /// The request's blocks are on the device.
    Arrived {
        /// The request's id.
        id: u64,
    },
    /// Positions of its prompt were computed.
    Prefilled {
        /// The request's id.
        id: u64,
        /// The number of tokens.
        tokens: u32,
    },
    /// A token was sampled.
    Token {
        /// The request's id.
        id: u64,
        /// The number of the token among the generated ones, from 1.
        nth: u32,
        /// The token.
        token: i32,
        /// The log-probabilities, if asked for: the sampled token first, then the most likely,
        /// descending; natural logarithms.
        logprobs: Option<Box<[(i32, f32)]>>,
    },
    /// More of its prompt's tokens have log-probabilities, in their order. All have come when the
    /// first [`Event::Token`] does.
    PromptLogprobs {
        /// The request's id.
        id: u64,
        /// The log-probabilities, as many entries a token as were asked for, the token first.
        logprobs: PromptLogprobs,
    },
    /// The request's vector was computed.
    Pooled {
        /// The request's id.
        id: u64,
        /// The vector as the model made it, neither cut nor normalised.
        vector: Box<[f32]>,
    },
    /// The request ended.
    Finished {
        /// The request's id.
        id: u64,
        /// Why.
        reason: Finish,
    },
    /// The request needs an image that is nowhere: its patches have to be put into the arena.
    /// Others may need the image too, and this event comes only once.
    ImageWanted {
        /// The request's id.
        id: u64,
        /// The number of the image among the request's.
        index: usize,
        /// The image.
        image: ImageId,
    },
    /// The hand has read the patches of an image.
    ImageRead {
        /// The place of the patches in the arena. A later image may already be at that place.
        patches: u32,
    },
    /// The request lost its slot and pages, and waits again. A more important request or a suspect
    /// needed them, or a block did not come back from the host tier.
    Preempted {
        /// The request's id.
        id: u64,
    },
}

/// Why a result was not applied. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// A result came without a plan.
    #[error("result of step {step}, but no step is in flight")]
    NothingInFlight {
        /// The result's step.
        step: u64,
    },
    /// Results come in plan order.
    #[error("result of step {got}, but step {expected} is the oldest in flight")]
    WrongStep {
        /// The oldest step in flight.
        expected: u64,
        /// The result's step.
        got: u64,
    },
    /// A copy ended that is not under way.
    #[error("result of step {step}: copy {ticket} ended, but it is not under way")]
    Copy {
        /// The step.
        step: u64,
        /// The ticket that it names.
        ticket: i32,
    },
    /// A column does not fit the plan's rows.
    #[error(
        "result of step {step}: column {column} has {got} entries, the plan asks for {expected}"
    )]
    Column {
        /// The step.
        step: u64,
        /// The column's name in the protocol.
        column: &'static str,
        /// Entries that the plan asks for.
        expected: usize,
        /// Entries it has.
        got: usize,
    },
}

/// Numbers to show. Counters only grow, also across [`Scheduler::reset`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct Stats {
    /// Requests with a slot.
    pub running: usize,
    /// Live requests without.
    pub waiting: usize,
    /// Pages leased by requests, or retired and not yet returned.
    pub pages_held: usize,
    /// Unreferenced pages that hold a named block.
    pub pages_cached: usize,
    /// Pages that hold nothing.
    pub pages_free: usize,
    /// Prompt tokens looked up in the prefix cache at first admissions.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache, in hot pages.
    pub prefix_hits: u64,
    /// Prompt tokens found in the host tier, at first admissions.
    pub host_hits: u64,
    /// Prompt tokens computed, cache hits not counted.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Times a request lost its pages to another.
    pub preemptions: u64,
    /// Tokens that requests which had lost their pages computed again, because no tier had them.
    pub recomputed_tokens: u64,
    /// Results applied of plans that had rows.
    pub steps: u64,
    /// The host tier.
    pub host: HostStats,
    /// Sparse decoding.
    pub sparse: SparseStats,
    /// Images.
    pub images: ImageStats,
}

/// Numbers of images; all 0 where the model sees none. Counts of pages and of waiting images are of
/// the moment, the others only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct ImageStats {
    /// Image pages.
    pub pages: usize,
    /// The number of pages that requests lease.
    pub pages_held: usize,
    /// The number of pages that hold an image without a lease.
    pub pages_cached: usize,
    /// Images that somebody needs and that are on no page.
    pub waiting: usize,
    /// Images of admitted requests all of whose positions were found in the prefix cache.
    pub in_prefix: u64,
    /// Images of admitted requests that were found on image pages.
    pub in_pages: u64,
    /// Images whose patches were asked for.
    pub wanted: u64,
    /// Images that went through the tower.
    pub encoded: u64,
    /// Work of the tower, in positions times layers.
    pub position_layers: u64,
}

/// Numbers of sparse decoding. Those of requests are of the moment, the others only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct SparseStats {
    /// Requests that are sparse.
    pub requests: usize,
    /// Times that a request became sparse while it ran.
    pub conversions: u64,
    /// The number of pages that running requests dropped.
    pub pages_dropped: u64,
    /// Positions that sparse requests chose, over rows and layers.
    pub selected: u64,
    /// The number of chosen positions that were on pages of the device.
    pub on_pages: u64,
    /// The number of chosen positions that were in hot rows.
    pub in_rows: u64,
    /// The number of chosen positions that were copied from the host's memory.
    pub missed: u64,
    /// Microseconds that rows waited for copies.
    pub waited_us: u64,
}

/// Numbers of the host tier; all 0 without one. Counts of pages and of copies under way are of the
/// moment, the others only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct HostStats {
    /// The number of pages of the host tier.
    pub pages: usize,
    /// The number of pages that hold a named block, or that copies use.
    pub pages_used: usize,
    /// Positions that it has room for.
    pub tokens: usize,
    /// Positions of the pages that are used.
    pub tokens_used: usize,
    /// Positions of the blocks that came back from it.
    pub tokens_restored: u64,
    /// Copies under way.
    pub copies_outstanding: usize,
    /// Requests that wait for blocks to come back.
    pub arriving: usize,
    /// Blocks that reached the host tier.
    pub blocks_saved: u64,
    /// Blocks that came back from it.
    pub blocks_restored: u64,
    /// Copies that the hand could not do.
    pub copies_failed: u64,
    /// The number of blocks that the device dropped and the host tier did not have.
    pub dropped_unsaved: u64,
    /// Blocks that were not saved because copies used every host page.
    pub saves_refused: u64,
    /// Times that blocks were found in the host tier and computed all the same, because that was
    /// sooner done.
    pub restores_declined: u64,
    /// Times that blocks were found in the host tier and restored.
    pub restores_chosen: u64,
    /// Microseconds that saves took.
    pub save_us: u64,
    /// Microseconds that restores took.
    pub restore_us: u64,
}
