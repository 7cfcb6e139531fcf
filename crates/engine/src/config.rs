//! The settings of an engine.

use forebay_scheduler::{Namer, Policy, SavePolicy};

/// Everything the engine decides by; resolved, with nothing left to guess.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Most requests that run at a time.
    pub max_running: u32,
    /// Rows of the device tables; more than `max_running`, because a slot is retired before it is
    /// free.
    pub slots: u32,
    /// Positions a page.
    pub page_size: u32,
    /// Most tokens a step (chunked prefill).
    pub token_budget: u32,
    /// Share full pages between requests with the same beginning.
    pub prefix_cache: bool,
    /// Names those pages; the same for all replicas of a brain.
    pub namer: Namer,
    /// Order of the waiting queue.
    pub policy: Policy,
    /// Within a priority, clients take turns; otherwise all requests are as one client's.
    pub fair: bool,
    /// Steps planned ahead of the one that computes: 0 (serial) or 1.
    pub lookahead: u32,
    /// Most requests that wait; see [`crate::Waiting`] for what each client may have of it.
    pub max_queued: usize,
    /// Microseconds that a request may wait to be admitted for the first time; 0: as long as it
    /// takes.
    pub queue_timeout_us: u64,
    /// Positions a request may use.
    pub context_length: u32,
    /// Microseconds without a result after which the hand is taken for hung.
    pub watchdog_us: u64,
    /// Microseconds without a sign of life after which a hand that starts is taken for hung; 0: as
    /// long as it takes.
    pub load_timeout_us: u64,
    /// Failed starts in a row before a hand that once worked is given up.
    pub restart_limit: u32,
    /// Threads that fill masks beside the engine's, where a step has many of them.
    pub mask_threads: usize,
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
    /// Most copies that a plan starts.
    pub copies_a_step: u32,
    /// Waiting requests whose blocks are brought back before their turn.
    pub prefetch: u32,
    /// A preempted or replayed request has its blocks restored.
    pub restore_preempted: bool,
    /// True if the plan that computes a new position saves it, if requests may be sparse. Otherwise
    /// each page is saved when it is full.
    pub save_rows: bool,
}
