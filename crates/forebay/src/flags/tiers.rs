//! Flags about the host tier, by the names of SGLang and vLLM.

use clap::{Args, ValueEnum};
use forebay_capacity::WritePolicy;

#[derive(Debug, Args)]
#[command(next_help_heading = "Host memory tier")]
pub(crate) struct TierFlags {
    /// Keep KV pages in host memory too: pages that the device drops are copied back instead of
    /// computed again.
    #[arg(long, visible_alias = "enable-hicache")]
    pub(crate) enable_hierarchical_cache: bool,
    /// Size of the host tier relative to the device's KV pages and state pages [default: 2, or what
    /// fits].
    #[arg(long, value_name = "RATIO", conflicts_with = "hicache_size", value_parser = ratio)]
    pub(crate) hicache_ratio: Option<f64>,
    /// Size of each replica's host tier in GB (10^9 bytes), instead of a ratio. KV pages and state
    /// pages divide it as they divide the device's memory.
    #[arg(long, value_name = "GB", value_parser = positive)]
    pub(crate) hicache_size: Option<f64>,
    /// When blocks are copied to the host tier [default: write_through].
    #[arg(long, value_enum)]
    pub(crate) hicache_write_policy: Option<WritePolicy>,
    /// Number of waiting requests whose blocks are copied back before the requests run; 0: none
    /// [default: 4].
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(..=1024))]
    pub(crate) hicache_prefetch_requests: Option<u32>,
    /// Size of the host tier in GiB for all replicas together, as in vLLM.
    #[arg(long, value_name = "GIB", conflicts_with_all = ["hicache_ratio", "hicache_size"], value_parser = positive)]
    pub(crate) kv_offloading_size: Option<f64>,
    /// Backend that copies KV pages to the host tier; only `native` exists.
    #[arg(long, value_enum, requires = "kv_offloading_size")]
    pub(crate) kv_offloading_backend: Option<Backend>,
    /// Largest number of pages that a step starts to copy [default: twice the pages of a step's
    /// prefill, at least 32].
    #[arg(long, value_name = "PAGES", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) kv_copy_pages_per_step: Option<u32>,
    /// How a preempted or replayed request regains its KV cache. `restore`: copied from the host
    /// tier. `recompute`: computed again [default: restore].
    #[arg(long, value_enum)]
    pub(crate) preemption: Option<Preemption>,
    /// For tests: limit copies to this speed in each direction, in GB per second.
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    pub(crate) debug_kv_copy_gbps: Option<f64>,
    /// For tests: record a checksum of each page that is copied to the host tier, and check it when
    /// the page is copied back.
    #[arg(long)]
    pub(crate) debug_kv_checksum: bool,
}

/// The backend that copies KV pages to the host tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    Native,
}

/// How a request regains the KV cache that it lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preemption {
    #[default]
    Restore,
    Recompute,
}

impl TierFlags {
    /// True if the host tier is on.
    pub(crate) fn on(&self) -> bool {
        self.enable_hierarchical_cache || self.kv_offloading_size.is_some()
    }

    /// True if a flag gives the size of the host tier.
    pub(crate) fn names_size(&self) -> bool {
        self.hicache_ratio.is_some()
            || self.hicache_size.is_some()
            || self.kv_offloading_size.is_some()
    }

    /// The first given flag that needs the host tier.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--hicache-ratio", self.hicache_ratio.is_some()),
            ("--hicache-size", self.hicache_size.is_some()),
            ("--hicache-write-policy", self.hicache_write_policy.is_some()),
            ("--hicache-prefetch-requests", self.hicache_prefetch_requests.is_some()),
            ("--kv-copy-pages-per-step", self.kv_copy_pages_per_step.is_some()),
            ("--preemption", self.preemption.is_some()),
            ("--debug-kv-copy-gbps", self.debug_kv_copy_gbps.is_some()),
            ("--debug-kv-checksum", self.debug_kv_checksum),
        ];
        flags.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1e6 => Ok(value),
        _ => Err("expected a number above 0".into()),
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1000.0 => Ok(value),
        _ => Err("expected a number above 0 and at most 1000".into()),
    }
}
