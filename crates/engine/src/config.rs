//! The settings of an engine.

use forebay_scheduler::{Namer, Policy, SavePolicy};

/// The settings of an engine, with everything resolved.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The largest number of requests that run at a time.
    pub max_running: u32,
    /// Rows of the device tables; more than `max_running`, because a slot is retired before it is
    /// free.
    pub slots: u32,
    /// Positions of a page.
    pub page_size: u32,
    /// The largest number of tokens of a step (chunked prefill).
    pub token_budget: u32,
    /// True if requests with the same beginning share full pages.
    pub prefix_cache: bool,
    /// The source of block names; the same for all replicas of a brain.
    pub namer: Namer,
    /// The order of the waiting queue.
    pub policy: Policy,
    /// True if clients take turns within a priority. Otherwise all requests count as one client's.
    pub fair: bool,
    /// Steps planned ahead of the one that computes: 0 (serial) or 1.
    pub lookahead: u32,
    /// The largest number of requests that wait; see [`crate::Waiting`] for each client's share.
    pub max_queued: usize,
    /// Microseconds that a request may wait for its first admission; 0: without a limit.
    pub queue_timeout_us: u64,
    /// The largest number of positions of a request.
    pub context_length: u32,
    /// Microseconds without a result after which the hand counts as hung.
    pub watchdog_us: u64,
    /// Microseconds without a sign of life after which a starting hand counts as hung; 0: without a
    /// limit.
    pub load_timeout_us: u64,
    /// The number of failed starts in a row after which a hand that once worked is given up.
    pub restart_limit: u32,
    /// The number of threads that fill masks beside the engine's. Without any, a step waits for all
    /// of its masks, whatever they take.
    pub mask_threads: usize,
    /// The part of a step's time, in percent, for which it waits for masks at most. It is 2 to 20
    /// milliseconds. A row whose mask is not ready then sits the step out.
    pub mask_share: u32,
    /// The use of the host tier, if the hand has one.
    pub host: Option<HostConfig>,
    /// The largest number of positions times layers of images that a step computes, if the hand has
    /// a vision tower.
    pub image_budget: u64,
}

/// The use of the tier of host memory. The hand tells its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// The time at which blocks are saved.
    pub policy: SavePolicy,
    /// The largest number of copies that a plan starts.
    pub copies_a_step: u32,
    /// The number of waiting requests whose blocks are brought back before their turn.
    pub prefetch: u32,
    /// True if a preempted or replayed request has its blocks restored.
    pub restore_preempted: bool,
    /// True if the plan that computes a position also saves it, where requests may be sparse.
    /// Otherwise a page is saved when it is full.
    pub save_rows: bool,
}
