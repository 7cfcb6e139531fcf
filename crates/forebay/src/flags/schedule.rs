//! Flags about running and waiting requests, and the order of the queue.

use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_capacity::ShareArgs;
use forebay_engine::{EngineConfig, Policy};

use super::duration::seconds;

#[derive(Debug, Args)]
#[command(next_help_heading = "Scheduling")]
pub(crate) struct ScheduleFlags {
    /// Largest number of simultaneously running requests.
    #[arg(long, visible_alias = "max-num-seqs", default_value_t = EngineConfig::default().max_running_requests, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) max_running_requests: u32,
    /// Largest number of waiting requests; further requests are answered 429. While other clients
    /// wait, one client gets at most half. A further quarter is reserved for clients with few
    /// waiting requests.
    #[arg(long, default_value_t = EngineConfig::default().max_queued_requests)]
    pub(crate) max_queued_requests: usize,
    /// Seconds that a request may wait in the queue before it is answered 503 `queue_timeout`; 0:
    /// no limit.
    #[arg(long, default_value = "0", value_parser = seconds)]
    pub(crate) queue_timeout: Duration,
    /// Serve requests in order of arrival, whichever client sent them.
    #[arg(long)]
    pub(crate) disable_fair_queueing: bool,
    #[command(flatten)]
    pub(crate) shares: ShareArgs,
    /// Time that background work (batches, `Priority: u=7`) may add to the steps of other requests,
    /// in percent of their time. 0: it runs only while there are no other requests. 100: unlimited.
    #[arg(long, value_name = "PERCENT", default_value_t = EngineConfig::default().background_share, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) background_share: u32,
    /// Largest absolute value of `priority` that clients may set; requests with a larger value are
    /// answered 400 [default: any].
    #[arg(long, value_name = "PRIORITY", value_parser = clap::value_parser!(u32).range(..=1 << 31))]
    pub(crate) max_client_priority: Option<u32>,
    /// Largest number of tokens of a step. Longer prompts are computed in chunks, in the same steps
    /// as running requests [default: 2048 on CUDA, otherwise 1024].
    #[arg(long, visible_alias = "max-num-batched-tokens", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunked_prefill_size: Option<u32>,
    /// Tokens in a KV page [default: 64 for latent attention on CUDA, otherwise 16].
    #[arg(long, visible_alias = "block-size", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) page_size: Option<u32>,
    /// Share of the device's free memory for weights, KV pages and, on CUDA, temporary memory of
    /// steps. Replicas on a CPU divide this share. [default: 0.9 on CUDA, otherwise 0.3, or 0.6 if
    /// a control group limits the memory]
    #[arg(long, visible_alias = "gpu-memory-utilization", value_parser = fraction)]
    pub(crate) mem_fraction_static: Option<f64>,
    /// Size of the KV pool in tokens, instead of a share of memory.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) max_total_tokens: Option<u64>,
    /// Disable the prefix cache.
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    pub(crate) disable_radix_cache: bool,
    /// Order of the waiting queue.
    #[arg(long, visible_alias = "scheduling-policy", value_enum, default_value_t)]
    pub(crate) schedule_policy: SchedulePolicy,
    /// With the priority policy, serve smaller numbers first, as in vLLM.
    #[arg(long)]
    pub(crate) schedule_low_priority_values_first: bool,
    /// Number of steps that are planned before the result of the current one arrives; 0: one step
    /// at a time.
    #[arg(long, default_value_t = EngineConfig::default().lookahead, value_parser = clap::value_parser!(u32).range(0..=1))]
    pub(crate) lookahead: u32,
}

impl ScheduleFlags {
    /// The engine's settings from these flags. All other settings come from `usual`, the device's
    /// defaults.
    pub(crate) fn engine(&self, usual: EngineConfig) -> EngineConfig {
        EngineConfig {
            max_running_requests: self.max_running_requests,
            slots: EngineConfig::usual_slots(self.max_running_requests),
            max_queued_requests: self.max_queued_requests,
            queue_timeout: self.queue_timeout,
            fair_queueing: !self.disable_fair_queueing,
            step_shares: !self.shares.disable_step_shares,
            decode_gap_ms: self.shares.decode_gap_ms,
            background_share: self.background_share,
            chunked_prefill_size: self.chunked_prefill_size.unwrap_or(usual.chunked_prefill_size),
            page_size: self.page_size.unwrap_or(usual.page_size),
            prefix_cache: !self.disable_radix_cache,
            schedule_policy: match self.schedule_policy {
                SchedulePolicy::Fcfs => Policy::Fcfs,
                SchedulePolicy::Priority if self.schedule_low_priority_values_first => {
                    Policy::PriorityAscending
                }
                SchedulePolicy::Priority => Policy::Priority,
            },
            lookahead: self.lookahead,
            ..usual
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SchedulePolicy {
    #[default]
    Fcfs,
    Priority,
}

pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("expected a number above 0 and at most 1".into()),
    }
}
