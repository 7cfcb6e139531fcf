//! A scheduler's reports: events, statistics, and reasons for refusing a result.

use derive_more::AddAssign;
use forebay_kvcache::ImageId;
use forebay_protocol::PromptLogprobs;
use serde::Serialize;
use thiserror::Error;

/// The reason for which a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// One of the request's stop ids was sampled. The last [`Event::Token`] reports it too.
    Stop {
        /// The stop id.
        token: i32,
    },
    /// The request reached its limit of tokens, or its vector or prompt log-probabilities are done.
    Length,
    /// The request's logits were not finite.
    NotFinite,
    /// The request's adapter could not be loaded.
    NoAdapter {
        /// The hand's reason, such as [`forebay_protocol::PLACE_FAILED_FILES`].
        error: i32,
    },
}

/// An event of a request. [`Event::Finished`] is a request's last event, and comes once. Aborted
/// requests end without it, and so do poisoned ones ([`crate::Scheduler::reset`]).
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The request got a slot and pages.
    Admitted {
        /// The request's id.
        id: u64,
        /// Prompt tokens found in the prefix cache at the first admission; 0 at later admissions.
        cached_tokens: u32,
        /// True if the request was admitted before. The positions that it lost are then recomputed.
        replayed: bool,
        /// True if the request waits for blocks from the host tier, and has no row until they
        /// arrive. [`Event::Arrived`] reports their arrival, unless the request is preempted.
        restoring: bool,
    },
    /// The request's blocks are on the device.
    Arrived {
        /// The request's id.
        id: u64,
    },
    /// Positions of the request's prompt were computed.
    Prefilled {
        /// The request's id.
        id: u64,
        /// The number of these positions.
        tokens: u32,
    },
    /// A token was sampled.
    Token {
        /// The request's id.
        id: u64,
        /// The index of the token among the generated ones, from 1.
        nth: u32,
        /// The token.
        token: i32,
        /// The log-probabilities, if requested: natural logarithms, the sampled token first, then
        /// the most likely tokens in descending order.
        logprobs: Option<Box<[(i32, f32)]>>,
    },
    /// Drafts from the request's predicted answer were verified. Events of the accepted tokens
    /// follow.
    Predicted {
        /// The request's id.
        id: u64,
        /// The number of drafts that became tokens of the request.
        accepted: u32,
        /// The number of all other drafts. Drafts that the hand accepted after the request's end
        /// count here too.
        rejected: u32,
    },
    /// Log-probabilities of the next tokens of the prompt, in order. All come before the first
    /// [`Event::Token`].
    PromptLogprobs {
        /// The request's id.
        id: u64,
        /// The log-probabilities, with the requested number of entries for each token. The prompt's
        /// own token is the first entry.
        logprobs: PromptLogprobs,
    },
    /// The request's vector was computed.
    Pooled {
        /// The request's id.
        id: u64,
        /// The model's raw vector: not cut, not normalised.
        vector: Box<[f32]>,
    },
    /// The request ended.
    Finished {
        /// The request's id.
        id: u64,
        /// The reason.
        reason: Finish,
    },
    /// The request needs an image that is not on the device. The caller has to put its patches into
    /// the arena. The event comes only once, even if other requests need the image too.
    ImageWanted {
        /// The request's id.
        id: u64,
        /// The index of the image among the request's images.
        index: usize,
        /// The image.
        image: ImageId,
    },
    /// The hand has read the patches of an image.
    ImageRead {
        /// The arena offset of the patches. Another image's patches may be there already.
        patches: u32,
    },
    /// The request has generated the one token that it was to generate here, and its blocks are
    /// saved as far as possible. The caller passes it to another scheduler
    /// ([`crate::Scheduler::hand_on`]).
    Left {
        /// The request's id.
        id: u64,
    },
    /// The request lost its slot and pages, and waits again. A more important request or a suspect
    /// needed them, or a block did not come back from the host tier.
    Preempted {
        /// The request's id.
        id: u64,
    },
}

/// The reason for which a result was not applied. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// A result arrived while no step was in flight.
    #[error("result of step {step}, but no step is in flight")]
    NothingInFlight {
        /// The result's step.
        step: u64,
    },
    /// The result belongs to another step than the oldest in flight. Results come in plan order.
    #[error("result of step {got}, but step {expected} is the oldest in flight")]
    WrongStep {
        /// The oldest step in flight.
        expected: u64,
        /// The result's step.
        got: u64,
    },
    /// A result reports the end of a copy that is not under way.
    #[error("result of step {step}: copy {ticket} ended, but it is not under way")]
    Copy {
        /// The step.
        step: u64,
        /// The ticket in the result.
        ticket: u32,
    },
    /// A result reports the end of an adapter load that is not under way.
    #[error("result of step {step}: place write {ticket} ended, but it is not under way")]
    Place {
        /// The step.
        step: u64,
        /// The ticket in the result.
        ticket: u32,
    },
    /// The length of a column does not fit the plan's rows.
    #[error(
        "result of step {step}: column {column} has {got} entries, the plan asks for {expected}"
    )]
    Column {
        /// The step.
        step: u64,
        /// The column's name in the protocol.
        column: &'static str,
        /// The number of entries that the plan requires.
        expected: usize,
        /// The number of entries in the result.
        got: usize,
    },
}

/// Statistics of a scheduler. Counters only grow, also across [`crate::Scheduler::reset`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct Stats {
    /// Requests with a slot.
    pub running: usize,
    /// Live requests without a slot.
    pub waiting: usize,
    /// Pages leased by requests, or retired and not yet returned.
    pub pages_held: usize,
    /// Unreferenced pages that hold a named block.
    pub pages_cached: usize,
    /// Pages without content.
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
    /// The number of times that a request lost its pages to another.
    pub preemptions: u64,
    /// Tokens that were computed again because their request lost its pages and no tier had them.
    pub recomputed_tokens: u64,
    /// The number of applied results of plans that had rows.
    pub steps: u64,
    /// Statistics of drafts.
    pub drafts: DraftStats,
    /// Statistics of the host tier.
    pub host: HostStats,
    /// Statistics of sparse decoding.
    pub sparse: SparseStats,
    /// Statistics of images.
    pub images: ImageStats,
    /// Statistics of recurrent states.
    pub states: StateStats,
    /// Statistics of the window part of pages.
    pub windows: WindowStats,
    /// Gauges of the places for adapters.
    pub places: PlaceStats,
}

/// Statistics of kept recurrent states; all 0 for a model without any. Page counts are gauges. All
/// other fields are counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct StateStats {
    /// State pages.
    pub pages: usize,
    /// State pages leased by requests or copies, or retired and not yet returned.
    pub pages_held: usize,
    /// Unreferenced state pages with a kept state.
    pub pages_cached: usize,
    /// Tokens of prompts that were looked up, at first admissions.
    pub query_tokens: u64,
    /// Tokens of prompts that a kept state covered, at first admissions.
    pub hit_tokens: u64,
    /// Tokens of prompts whose keys and values were cached, and that were computed again because no
    /// state was kept after them, at first admissions.
    pub missed_tokens: u64,
    /// States that were loaded into a slot.
    pub loads: u64,
    /// States that were saved to a page.
    pub saves: u64,
    /// Kept states that were evicted.
    pub evictions: u64,
    /// States that were not saved, because every page was held.
    pub saves_refused: u64,
    /// State pages of the host tier.
    pub host_pages: usize,
    /// State pages of the host tier that hold a kept state, or that copies use.
    pub host_pages_used: usize,
    /// States that reached the host tier.
    pub copied: u64,
    /// States that came back from the host tier.
    pub restored: u64,
}

/// Statistics of the window part of pages; all 0 without one. Page counts are gauges. All other
/// fields are counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct WindowStats {
    /// Pages of the window part.
    pub pages: usize,
    /// The number of pages that requests lease.
    pub pages_held: usize,
    /// The number of pages that hold a named block without a lease.
    pub pages_cached: usize,
    /// Pages that running requests freed, because their window had passed them.
    pub passed: u64,
    /// Tokens of prompts whose blocks were cached in the main part, and that were computed again
    /// because the window part lacked pages, at first admissions.
    pub missed_tokens: u64,
}

/// Gauges of adapter places; all 0 without places.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct PlaceStats {
    /// Places that hold an adapter which some request uses.
    pub used: usize,
    /// Places that hold an unused adapter.
    pub unused: usize,
    /// Places into which an adapter is being loaded.
    pub coming: usize,
    /// Places without an adapter.
    pub empty: usize,
    /// Requests that wait for a place.
    pub waiting: usize,
}

/// Statistics of drafts. All fields are counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct DraftStats {
    /// Rows that had drafts.
    pub rows: u64,
    /// Drafts that were verified.
    pub drafted: u64,
    /// Drafts that were accepted.
    pub accepted: u64,
    /// Drafts from the texts of other requests that were verified.
    pub shared_drafted: u64,
    /// Drafts from the texts of other requests that were accepted.
    pub shared_accepted: u64,
    /// Accepted drafts by their position in the row.
    pub accepted_at: DraftCounts,
}

/// Counts by a draft's position in its row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts(pub [u64; Self::PLACES]);

impl DraftCounts {
    /// The number of positions. Drafts at later positions are not counted here.
    pub const PLACES: usize = 16;

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut u64> {
        self.0.iter_mut()
    }
}

impl std::ops::AddAssign for DraftCounts {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
    }
}

/// Statistics of images; all 0 if the model takes none. Counts of pages and of waiting images are
/// gauges. All other fields are counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct ImageStats {
    /// Image pages.
    pub pages: usize,
    /// The number of pages that requests lease.
    pub pages_held: usize,
    /// The number of pages that hold an image without a lease.
    pub pages_cached: usize,
    /// Images that a request needs, and that are not on image pages yet.
    pub waiting: usize,
    /// Images of admitted requests whose positions were all in the prefix cache.
    pub in_prefix: u64,
    /// Images of admitted requests that were already on image pages.
    pub in_pages: u64,
    /// Images whose patches were requested.
    pub wanted: u64,
    /// Images that went through the tower.
    pub encoded: u64,
    /// Work of the tower, in positions times layers.
    pub position_layers: u64,
}

/// Statistics of sparse decoding. Counts of requests are gauges. All other fields are counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct SparseStats {
    /// The number of sparse requests.
    pub requests: usize,
    /// The number of times that a running request became sparse.
    pub conversions: u64,
    /// The number of pages that running requests dropped.
    pub pages_dropped: u64,
    /// Positions that sparse requests chose, summed over rows and layers.
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

/// Statistics of the host tier; all 0 without one. Counts of pages and of copies in flight are
/// gauges. All other fields are counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct HostStats {
    /// The number of pages of the host tier.
    pub pages: usize,
    /// The number of pages that hold a named block, or that copies use.
    pub pages_used: usize,
    /// Positions of all pages of the host tier.
    pub tokens: usize,
    /// Positions of the used pages.
    pub tokens_used: usize,
    /// Positions of the blocks that came back from the host tier.
    pub tokens_restored: u64,
    /// Pages that other replicas may read.
    pub lent_pages: usize,
    /// Copies under way.
    pub copies_outstanding: usize,
    /// Requests that wait for blocks to come back.
    pub arriving: usize,
    /// Blocks that reached the host tier.
    pub blocks_saved: u64,
    /// Blocks that came back from the host tier.
    pub blocks_restored: u64,
    /// Copies that failed in the hand.
    pub copies_failed: u64,
    /// The number of blocks that the device dropped and the host tier did not have.
    pub dropped_unsaved: u64,
    /// Blocks that were not saved because copies leased every host page.
    pub saves_refused: u64,
    /// Admissions whose blocks were in the host tier, but were computed again because restoring
    /// them would have been slower.
    pub restores_declined: u64,
    /// Admissions whose blocks were restored from the host tier rather than computed again.
    pub restores_chosen: u64,
    /// Microseconds that saves took.
    pub save_us: u64,
    /// Microseconds that restores took.
    pub restore_us: u64,
}
