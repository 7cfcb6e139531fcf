//! The settings of an engine.

use std::time::Duration;

use forebay_scheduler::{DecodeGap, HostTier, Namer, Policy, SavePolicy, StateCache};
use serde::{Serialize, Serializer};

/// The settings of an engine, all resolved. A field that comes from a flag has the flag's name.
#[derive(Debug, Clone, Serialize)]
pub struct EngineConfig {
    /// The largest number of requests that run at a time.
    pub max_running_requests: u32,
    /// Rows of the device tables; more than `max_running_requests`, because slots are retired
    /// before they are free.
    pub slots: u32,
    /// Positions of a page.
    pub page_size: u32,
    /// The largest number of tokens of a step.
    pub chunked_prefill_size: u32,
    /// True if requests with the same beginning share full pages.
    pub prefix_cache: bool,
    /// The source of block names; the same for all replicas of a brain.
    #[serde(skip)]
    pub namer: Namer,
    /// The order of the waiting queue.
    pub schedule_policy: Policy,
    /// True if clients take turns within a priority. Otherwise all requests count as one client's.
    pub fair_queueing: bool,
    /// True if prompts with little left to compute may pass longer ones in a step.
    pub step_shares: bool,
    /// The target gap between two tokens of a running request. It bounds the prompt tokens of a
    /// step.
    pub decode_gap_ms: DecodeGap,
    /// The share of foreground step time, in percent, that background rows may add; 100: unbounded.
    pub background_share: u32,
    /// Settings of speculative decoding, if it is on.
    #[serde(flatten)]
    pub drafts: Option<DraftConfig>,
    /// Steps planned ahead of the one that computes: 0 (serial) or 1.
    pub lookahead: u32,
    /// The largest number of requests that wait; see [`crate::WaitingPlaces`] for each client's
    /// share.
    pub max_queued_requests: usize,
    /// The time that a request may wait for its first admission; 0: without a limit.
    #[serde(serialize_with = "as_seconds")]
    pub queue_timeout: Duration,
    /// The largest number of positions of a request.
    pub context_length: u32,
    /// The time without a result after which the hand counts as hung.
    #[serde(serialize_with = "as_seconds")]
    pub watchdog_timeout: Duration,
    /// The time without progress after which a starting hand counts as hung; 0: no limit.
    #[serde(serialize_with = "as_seconds")]
    pub load_timeout: Duration,
    /// The number of failed starts in a row after which a hand that once worked is given up.
    pub hand_restarts: u32,
    /// The number of threads that fill masks in addition to the engine's. With 0, a step waits for
    /// all of its masks, however long they take.
    pub mask_threads: usize,
    /// The share of a step's time, in percent, that it waits for masks at most, bounded to 2 to 20
    /// milliseconds. Then a row without its mask sits the step out.
    pub mask_share: u32,
    /// The use of the host tier, if the hand has one.
    pub host_tier: Option<HostConfig>,
    /// The images of a step, if the model takes any.
    #[serde(flatten)]
    pub images: Option<ImageConfig>,
    /// Tokens from one kept recurrent state of a request to the next; 0: states are kept only at
    /// the ends of prompts, answers and cached prefixes.
    pub state_interval: u32,
    /// True if the model has recurrent layers. A hand need not report it.
    #[serde(skip)]
    pub is_recurrent: bool,
    /// Places for adapters; 0: there are none.
    #[serde(rename = "max_loras")]
    pub places: u32,
}

impl EngineConfig {
    /// The default of `slots`. A slot is free only after the last step in flight that named it.
    /// Without spare slots, the successors of requests that end together would wait for a step.
    #[must_use]
    pub fn usual_slots(max_running_requests: u32) -> u32 {
        max_running_requests + max_running_requests.div_ceil(2)
    }
}

impl Default for EngineConfig {
    /// The defaults of the flags, for a processor with one core.
    fn default() -> Self {
        let max_running_requests = 256;
        Self {
            max_running_requests,
            slots: Self::usual_slots(max_running_requests),
            page_size: 16,
            chunked_prefill_size: 1024,
            prefix_cache: true,
            namer: Namer::open(),
            schedule_policy: Policy::Fcfs,
            fair_queueing: true,
            step_shares: true,
            decode_gap_ms: DecodeGap::default(),
            background_share: 5,
            drafts: None,
            lookahead: 1,
            max_queued_requests: 4096,
            queue_timeout: Duration::ZERO,
            context_length: 4096,
            watchdog_timeout: Duration::from_secs(300),
            load_timeout: Duration::from_secs(600),
            hand_restarts: 3,
            mask_threads: 1,
            mask_share: 10,
            host_tier: None,
            images: None,
            state_interval: StateCache::INTERVAL,
            is_recurrent: false,
            places: 0,
        }
    }
}

/// Drafts: expected tokens that a step verifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DraftConfig {
    /// The largest number of drafts of a row.
    pub speculative_num_draft_tokens: u32,
    /// True if every draft is verified, even if its time does not pay off. The switch exists for
    /// measurements.
    pub speculative_unpriced: bool,
}

impl Default for DraftConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self { speculative_num_draft_tokens: 8, speculative_unpriced: false }
    }
}

/// Settings of the tier of host memory. The hand reports its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HostConfig {
    /// The time at which blocks are saved.
    pub hicache_write_policy: SavePolicy,
    /// The largest number of copies that a plan starts.
    pub kv_copy_pages_per_step: u32,
    /// The number of waiting requests whose blocks are restored ahead of their turn.
    pub hicache_prefetch_requests: u32,
    /// How a preempted or replayed request gets its keys and values back.
    pub preemption: Preemption,
    /// The saves of requests that may be sparse.
    pub kv_save: SaveUnit,
}

impl Default for HostConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        let EngineConfig { chunked_prefill_size, page_size, .. } = EngineConfig::default();
        Self {
            hicache_write_policy: SavePolicy::default(),
            kv_copy_pages_per_step: HostTier::usual_copies(chunked_prefill_size, page_size),
            hicache_prefetch_requests: HostTier::PREFETCH,
            preemption: Preemption::default(),
            kv_save: SaveUnit::default(),
        }
    }
}

/// How a preempted or replayed request gets its keys and values back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Preemption {
    /// Copy KV from the host tier.
    #[default]
    Restore,
    /// Compute KV again.
    Recompute,
}

/// The unit of saves when requests may be sparse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveUnit {
    /// A page is saved when it is full.
    #[default]
    Page,
    /// The plan that computes a position also saves it.
    Token,
}

/// The images that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ImageConfig {
    /// The largest tower work of a step, in patches times layers.
    pub image_budget: u64,
    /// Patches of a position.
    #[serde(skip)]
    pub patches: u64,
    /// True if no row of a prompt may end within an image, as [`Tower`](forebay_scheduler::Tower)
    /// has it.
    #[serde(skip)]
    pub whole: bool,
}

impl ImageConfig {
    /// The largest tower work of a step, in positions times layers.
    pub(crate) fn position_layers(self) -> u64 {
        (self.image_budget / self.patches.max(1)).max(1)
    }
}

impl Default for ImageConfig {
    /// About a quarter of an image of 1200x1200 in a tower of 27 layers.
    fn default() -> Self {
        Self { image_budget: 40_000, patches: 1, whole: false }
    }
}

/// Writes a time as seconds, as in flags.
///
/// # Errors
/// Those of the serializer.
pub fn as_seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// Microseconds, in which the engine's clock counts.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_of_patches_is_one_of_positions() {
        let images = |image_budget, patches| ImageConfig { image_budget, patches, whole: false };
        assert_eq!(images(40_000, 4).position_layers(), 10_000);
        assert_eq!(images(3, 4).position_layers(), 1, "one layer at least");
        assert_eq!(images(0, 0).position_layers(), 1);
    }

    #[test]
    fn long_times_have_no_end() {
        assert_eq!(micros(Duration::from_micros(1500)), 1500);
        assert_eq!(micros(Duration::from_secs(1 << 60)), u64::MAX);
    }
}
