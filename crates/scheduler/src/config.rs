//! The settings of a scheduler.

use forebay_kvcache::Namer;
use serde::{Serialize, Serializer};

/// The order of admission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The order of arrival.
    #[default]
    Fcfs,
    /// The order of priority, larger first, then of arrival.
    Priority,
    /// The order of priority, smaller first, then of arrival.
    PriorityAscending,
}

/// The target gap between two tokens of a running request, which bounds the prompts in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DecodeGap {
    /// No target: prompts take the rest of a step's token budget.
    Off,
    /// A multiple of the measured time of a decode-only step.
    #[default]
    Auto,
    /// A target in microseconds.
    Micros(u32),
}

impl Serialize for DecodeGap {
    /// Writes the form of the flag: `off`, `auto`, or milliseconds.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_str("off"),
            Self::Auto => serializer.serialize_str("auto"),
            Self::Micros(us) => serializer.serialize_f64(f64::from(*us) / 1000.0),
        }
    }
}

/// The capacity and the policies of a scheduler.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// The number of slots in the device tables. It should exceed `max_running`, because a slot
    /// stays retired for up to [`crate::MAX_IN_FLIGHT`] steps.
    pub slots: u32,
    /// The largest number of requests that have a slot at the same time.
    pub max_running: u32,
    /// Pages of the device. 0: the model keeps no keys and values, so each prompt is computed in
    /// one row.
    pub pages: u32,
    /// The number of positions per page.
    pub page_size: u32,
    /// Token budget of a step: `--max-num-batched-tokens`, or `--chunked-prefill-size`. Decode rows
    /// always run. Prefill gets the rest of the budget, but at least one page.
    pub token_budget: u32,
    /// True if blocks are shared between requests.
    pub prefix_cache: bool,
    /// The source of block names.
    pub namer: Namer,
    /// True if block events are collected for [`crate::Scheduler::take_block_events`].
    pub block_events: bool,
    /// The order of admission.
    pub policy: Policy,
    /// True if clients take turns within a priority. A client with less than an even share of the
    /// running requests then need not wait for the requests of a client with more. Otherwise all
    /// requests count as one client's.
    pub fair: bool,
    /// True if prompts with little left to compute may pass longer ones in a step. Otherwise the
    /// prompt that is first in turn takes all prompt tokens of the step.
    pub step_shares: bool,
    /// The bound on prompt tokens in steps with running requests.
    pub decode_gap: DecodeGap,
    /// The share of foreground step time, in percent, that background rows may add; 100: unbounded.
    pub background_share: u32,
    /// The size in words up to which a plan may admit a further request; [`crate::STEP_WORDS`],
    /// except in tests.
    pub step_words: usize,
    /// The number of elements of a pooled vector; 0: the model does not pool. The size of results
    /// depends on it.
    pub vector_size: u32,
    /// The largest number of tokens that a sampling row may return; at least 1.
    pub tokens_a_row: u32,
    /// Drafts in decode rows; `None`: there are none. It has no effect with sparse decoding, or if
    /// the hand itself returns several tokens per row.
    pub drafts: Option<Drafts>,
    /// The tier of host memory, if there is one. It needs pages and the prefix cache, and has no
    /// effect without them.
    pub host: Option<HostTier>,
    /// Sparse decoding, if requests may give up pages while they decode. It needs a host tier.
    pub sparse: Option<Sparse>,
    /// The vision tower, if the model has one.
    pub tower: Option<Tower>,
    /// The cache of recurrent states, if the model has recurrent layers. Such a model has no
    /// drafts, no sparse decoding, and one token per row.
    pub states: Option<StateCache>,
    /// The separate page pool of sliding-window layers, if they have one. It cannot be combined
    /// with a host tier, recurrent layers or sparse decoding.
    pub windows: Option<WindowPart>,
    /// The number of places for adapters; 0: no request has an adapter.
    pub places: u32,
}

impl SchedulerConfig {
    /// The largest number of positions that a request can have when it runs alone.
    #[must_use]
    pub fn most_positions(&self) -> u32 {
        let pages = match (self.sparse, self.host) {
            (Some(_), Some(host)) => host.pages,
            _ => self.pages,
        };
        pages.saturating_mul(self.page_size)
    }
}

/// The settings of drafts in decode rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drafts {
    /// The largest number of drafts per row; at least 1.
    pub most: u32,
    /// True if a step has drafts only where their measured time pays off. Otherwise it has as many
    /// as fit.
    pub priced: bool,
}

/// The separate page pool of sliding-window layers. A request frees a page when the request's
/// window has passed the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowPart {
    /// The number of pages. They suffice for a request that runs alone: there are at least
    /// [`forebay_protocol::least_window_pages`], or as many as in the main part.
    pub pages: u32,
    /// The number of positions that a query attends to, including its own; at least 1.
    pub window: u32,
}

/// The cache of recurrent states. A request can continue from a cached prefix only at a position
/// whose state was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateCache {
    /// State pages on the device; 0: requests share no blocks.
    pub pages: u32,
    /// The number of positions from one kept state of a request to the next, rounded up to whole
    /// pages. 0: states are kept only at the ends of prompts, answers and cached prefixes.
    pub interval: u32,
    /// State pages of the host tier, if there is one.
    pub host_pages: u32,
    /// The cost of copying a state to or from the host, in blocks; at least 1.
    pub weight: u32,
}

impl StateCache {
    /// The default of `interval`.
    pub const INTERVAL: u32 = 4096;

    /// The `weight` of a state of `state_bytes` bytes; 1 if the bytes of a page are not known.
    #[must_use]
    pub fn weight_of(state_bytes: u64, page_bytes: u64) -> u32 {
        let pages = state_bytes.checked_div(page_bytes).unwrap_or(1);
        u32::try_from(pages).unwrap_or(u32::MAX).max(1)
    }
}

/// A vision tower, and the memory for its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tower {
    /// The number of layers of the tower.
    pub layers: u32,
    /// Image pages. The largest image of a request fits into them.
    pub pages: u32,
    /// The number of positions per image page.
    pub page_tokens: u32,
    /// The largest amount of tower work per step, in positions times layers. A step computes at
    /// least one layer.
    pub budget: u64,
    /// True if attention within an image is bidirectional. Then no row ends within an image: a row
    /// that begins at an image takes all of it, even beyond the token budget.
    pub whole: bool,
}

/// Sparse decoding from host memory, for a model that reads only a few chosen positions for each
/// token. Positions that are not on the device are read from host memory.
///
/// Each page of a request has a corresponding host page, and is saved as soon as it is full. If hot
/// pages run short, a request gives up its saved pages except the last ones. It keeps `row_pages`
/// pages for single positions, which are copied back when they are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sparse {
    /// Pages for the hot rows of a sparse request; at least 1.
    pub row_pages: u32,
    /// True if the plan that computes a position also saves it. Otherwise a page is saved when it
    /// is full. The switch exists for measurements.
    pub save_rows: bool,
}

impl Sparse {
    /// The number of trailing pages that a request never gives up: new positions are written there,
    /// and are not saved yet.
    pub const TAIL: u32 = 2;

    /// The number of hot pages that a sparse request needs to run and grow.
    #[must_use]
    pub fn least_pages(self) -> u32 {
        self.row_pages.saturating_add(Self::TAIL + 2)
    }
}

/// The page counts of a hand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages of the device.
    pub pages: u32,
    /// Pages of the host tier; 0 without one.
    pub host_pages: u32,
    /// State pages of the device, if the model has recurrent layers.
    pub state_pages: u32,
    /// State pages of the host tier.
    pub host_state_pages: u32,
    /// Pages of the window part; 0: all layers share one pool.
    pub window_pages: u32,
}

/// The time at which a block is saved to the host tier. The names are SGLang's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SavePolicy {
    /// Blocks are saved as soon as they are computed.
    #[default]
    WriteThrough,
    /// Blocks are saved when a second request uses them.
    WriteThroughSelective,
    /// Blocks are saved shortly before the device needs their pages, the least recently used first.
    /// Saving goes on until a tenth of the pages, or 64 if that is more, can be dropped without
    /// loss.
    WriteBack,
}

/// The tier of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTier {
    /// The number of pages of the host tier.
    pub pages: u32,
    /// The time at which blocks are saved.
    pub policy: SavePolicy,
    /// The largest number of copies that a plan starts; at least 1.
    pub copies_a_step: u32,
    /// The number of waiting requests whose blocks are restored ahead of their turn.
    pub prefetch: u32,
    /// True if a request that comes back from preemption has its blocks restored. Otherwise it
    /// computes them again.
    pub restore_preempted: bool,
}

impl HostTier {
    /// The default of `prefetch`.
    pub const PREFETCH: u32 = 4;

    /// Returns the tier with the settings that sparse decoding requires: computed blocks are saved,
    /// and saved ones are not computed again.
    pub(crate) fn for_sparse(self) -> Self {
        Self { policy: SavePolicy::WriteThrough, prefetch: 0, restore_preempted: true, ..self }
    }

    /// The default of `copies_a_step`. It lets saves keep up with a prefill of `token_budget`
    /// tokens per step.
    #[must_use]
    pub fn usual_copies(token_budget: u32, page_size: u32) -> u32 {
        const LEAST: u32 = 32;
        const MOST: u32 = 1 << 16;
        token_budget.div_ceil(page_size).saturating_mul(2).clamp(LEAST, MOST)
    }
}
