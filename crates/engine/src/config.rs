//! The settings of an engine.

use std::time::Duration;

use forebay_scheduler::{DecodeGap, HostTier, Namer, Policy, SavePolicy, StateCache};
use serde::{Serialize, Serializer};

/// The settings of an engine, with all defaults resolved. A field that is set by a flag has the
/// flag's name.
#[derive(Debug, Clone, Serialize)]
pub struct EngineConfig {
    /// The largest number of requests that run at a time.
    pub max_running_requests: u32,
    /// The number of slots in the device tables. There are more than `max_running_requests`,
    /// because slots are retired before they are free.
    pub slots: u32,
    /// Positions per page.
    pub page_size: u32,
    /// The largest number of tokens per step.
    pub chunked_prefill_size: u32,
    /// True if requests with a common prefix share its full pages.
    pub prefix_cache: bool,
    /// Computes the names of blocks. All replicas of a brain use the same namer.
    #[serde(skip)]
    pub namer: Namer,
    /// The order of the waiting queue.
    pub schedule_policy: Policy,
    /// True if clients take turns within a priority. If false, all requests count as those of one
    /// client.
    pub fair_queueing: bool,
    /// True if prompts with little left to compute may overtake longer ones in a step.
    pub step_shares: bool,
    /// The target time between two tokens of a running request. It limits the prompt tokens of a
    /// step.
    pub decode_gap_ms: DecodeGap,
    /// The time that background rows may add to a step, in percent of its foreground time; 100: no
    /// limit.
    pub background_share: u32,
    /// Settings of speculative decoding, if it is on.
    #[serde(flatten)]
    pub drafts: Option<DraftConfig>,
    /// The number of steps planned ahead of the one that is being computed; 0 (serial) or 1.
    pub lookahead: u32,
    /// The largest number of requests that wait; see [`crate::WaitingPlaces`] for each client's
    /// share.
    pub max_queued_requests: usize,
    /// The longest time that a request may wait for its first admission; 0: no limit.
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
    /// The number of consecutive failed starts after which a hand that once worked is given up.
    pub hand_restarts: u32,
    /// The number of threads that compute masks in addition to the engine thread. With 0, a step
    /// waits for all of its masks, however long they take.
    pub mask_threads: usize,
    /// The longest wait for masks, in percent of a step's time, limited to the range of 2 to 20
    /// milliseconds. After that, a row whose mask is not ready sits the step out.
    pub mask_share: u32,
    /// Settings of the host tier, if the hand has one.
    pub host_tier: Option<HostConfig>,
    /// Limits on the images of a step, if the model accepts images.
    #[serde(flatten)]
    pub images: Option<ImageConfig>,
    /// The number of tokens between two recurrent states that are kept for a request. With 0,
    /// states are kept only at the ends of prompts, answers and cached prefixes.
    pub state_interval: u32,
    /// True if the model has recurrent layers. Not every hand reports this.
    #[serde(skip)]
    pub is_recurrent: bool,
    /// The number of places for adapters in the hand's memory; 0: adapters are off.
    #[serde(rename = "max_loras")]
    pub places: u32,
}

impl EngineConfig {
    /// The default of `slots`. A slot is free only after the last step in flight that named it. So
    /// without spare slots, the requests that follow finished ones would wait for a step.
    #[must_use]
    pub fn usual_slots(max_running_requests: u32) -> u32 {
        max_running_requests + max_running_requests.div_ceil(2)
    }
}

impl Default for EngineConfig {
    /// The defaults of the flags, for a CPU with one core.
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

/// Settings of drafts: predicted tokens that a step verifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DraftConfig {
    /// The largest number of drafts per row.
    pub speculative_num_draft_tokens: u32,
    /// True if every draft is verified, even if verifying it takes more time than it saves. Used
    /// for measurements.
    pub speculative_unpriced: bool,
}

impl Default for DraftConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self { speculative_num_draft_tokens: 8, speculative_unpriced: false }
    }
}

/// Settings of the host tier. The hand reports the size of the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HostConfig {
    /// The policy that decides when blocks are saved.
    pub hicache_write_policy: SavePolicy,
    /// The largest number of copies that a plan starts.
    pub kv_copy_pages_per_step: u32,
    /// The number of waiting requests whose blocks are restored before their admission.
    pub hicache_prefetch_requests: u32,
    /// How a preempted or replayed request gets its KV cache back.
    pub preemption: Preemption,
    /// The unit in which requests that may be sparse save their KV cache.
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

/// How a preempted or replayed request gets its KV cache back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Preemption {
    /// Copy the KV cache from the host tier.
    #[default]
    Restore,
    /// Compute the KV cache again.
    Recompute,
}

/// The unit of saves if requests may be sparse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveUnit {
    /// A page is saved when it is full.
    #[default]
    Page,
    /// The plan that computes a position also saves it.
    Token,
}

/// Limits on the images that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ImageConfig {
    /// The largest work of the vision tower per step, in patches times layers.
    pub image_budget: u64,
    /// Patches per position.
    #[serde(skip)]
    pub patches: u64,
    /// True if a row of a prompt must not end within an image, as in
    /// [`Tower`](forebay_scheduler::Tower).
    #[serde(skip)]
    pub whole: bool,
}

impl ImageConfig {
    /// The largest work of the vision tower per step, in positions times layers.
    pub(crate) fn position_layers(self) -> u64 {
        (self.image_budget / self.patches.max(1)).max(1)
    }
}

impl Default for ImageConfig {
    /// The default budget is about a quarter of a 1200x1200 image, for a tower of 27 layers.
    fn default() -> Self {
        Self { image_budget: 40_000, patches: 1, whole: false }
    }
}

/// Serialises a time in seconds, the unit of the flags.
///
/// # Errors
/// The errors of the serializer.
pub fn as_seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// Converts a time to microseconds, the unit of the engine's clock.
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
