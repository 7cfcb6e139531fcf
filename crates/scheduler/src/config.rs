//! The settings of a scheduler.

use forebay_kvcache::Namer;
use serde::Serialize;

/// The order of admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// By arrival.
    Fcfs,
    /// By priority, larger first, then by arrival.
    Priority,
    /// By priority, smaller first, then by arrival.
    PriorityAscending,
}

/// The capacity that the scheduler gives out.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Rows of the device tables. Some more than `max_running`, because a slot is retired for up to
    /// [`MAX_IN_FLIGHT`] steps.
    pub slots: u32,
    /// Most requests that have a slot at a time.
    pub max_running: u32,
    /// Pages of the device; 0: the model keeps no keys and values, so that a prompt is computed
    /// whole or not at all.
    pub pages: u32,
    /// Positions a page.
    pub page_size: u32,
    /// Tokens a step (the chunked prefill size). Decode rows always all go; prefill gets what they
    /// leave, but at least one page.
    pub token_budget: u32,
    /// True if blocks are shared between requests.
    pub prefix_cache: bool,
    /// Names blocks.
    pub namer: Namer,
    /// True if somebody takes [`Scheduler::take_block_events`].
    pub block_events: bool,
    /// The order of admission.
    pub policy: Policy,
    /// Within a priority, clients take turns, and one that has nothing running need not wait for
    /// those of one that has much. Otherwise all requests are as one client's.
    pub fair: bool,
    /// Words that a plan may have when another request is admitted to it; [`STEP_WORDS`] but in
    /// tests.
    pub step_words: usize,
    /// Numbers of a vector, where the model pools: results have a size too.
    pub vector_size: u32,
    /// Most tokens that a row which samples may give; at least 1.
    pub tokens_a_row: u32,
    /// The tier of host memory, if there is one. Without pages or without the prefix cache it is of
    /// no use.
    pub host: Option<HostTier>,
    /// Requests may give up pages while they decode. It needs a host tier.
    pub sparse: Option<Sparse>,
    /// The vision tower, if the model has one.
    pub tower: Option<Tower>,
}

impl SchedulerConfig {
    /// Most positions that a request alone has room for.
    #[must_use]
    pub fn most_positions(&self) -> u32 {
        let pages = match (self.sparse, self.host) {
            (Some(_), Some(host)) => host.pages,
            _ => self.pages,
        };
        pages.saturating_mul(self.page_size)
    }
}

/// A vision tower, and what there is for what it gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tower {
    /// Its layers.
    pub layers: u32,
    /// Image pages; the largest image that requests bring fits.
    pub pages: u32,
    /// Positions of an image page.
    pub page_tokens: u32,
    /// The most work of a step, in positions times layers, and one layer at least.
    pub budget: u64,
}

/// Sparse decoding from host memory: a model that chooses few positions for each token reads the
/// others from where they are.
///
/// All pages of a request have a page of the host's tier behind them, and are saved as soon as they
/// are full. When the device's run short, a request gives up its saved pages but the last, and
/// keeps `row_pages` for single positions that are copied back as they are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sparse {
    /// Pages for the hot rows of a sparse request; at least 1.
    pub row_pages: u32,
    /// Each new position is saved by the plan that computes it, and not each page when it is full.
    /// For measurements.
    pub save_rows: bool,
}

impl Sparse {
    /// Last pages of a request that it does not give up: new positions are written there, and are
    /// not saved yet.
    pub const TAIL: u32 = 2;

    /// Pages that the device needs, for one sparse request and its growth.
    #[must_use]
    pub fn least_pages(self) -> u32 {
        self.row_pages.saturating_add(Self::TAIL + 2)
    }
}

/// The time at which a block is saved to the host tier. The names are SGLang's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SavePolicy {
    /// As soon as it is computed.
    #[default]
    WriteThrough,
    /// Blocks are saved when a second request uses them.
    WriteThroughSelective,
    /// Blocks are saved before the device needs their pages. The longest unused blocks are saved
    /// while too few pages can be given up without a loss. Enough is a tenth of the pages, or 64 if
    /// that is more.
    WriteBack,
}

/// The tier of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTier {
    /// Its pages.
    pub pages: u32,
    /// The time at which blocks are saved.
    pub policy: SavePolicy,
    /// Most copies that a plan starts; at least 1.
    pub copies_a_step: u32,
    /// Waiting requests whose blocks are brought back before their turn.
    pub prefetch: u32,
    /// A request that comes back from preemption has its blocks restored; otherwise it computes
    /// them again.
    pub restore_preempted: bool,
}

impl HostTier {
    /// The default of `prefetch`.
    pub const PREFETCH: u32 = 4;

    /// As sparse decoding needs it: what is computed is saved, and what was saved is not computed
    /// again.
    pub(crate) fn with(self, sparse: Option<Sparse>) -> Self {
        match sparse {
            None => self,
            Some(_) => Self {
                policy: SavePolicy::WriteThrough,
                prefetch: 0,
                restore_preempted: true,
                ..self
            },
        }
    }

    /// The default of `copies_a_step`: so many that saves keep up with the prefill of
    /// `token_budget` tokens a step.
    #[must_use]
    pub fn usual_copies(token_budget: u32, page_size: u32) -> u32 {
        const LEAST: u32 = 32;
        const MOST: u32 = 1 << 16;
        token_budget.div_ceil(page_size).saturating_mul(2).clamp(LEAST, MOST)
    }
}
