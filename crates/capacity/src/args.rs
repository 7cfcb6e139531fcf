//! The flags of `forebay plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use forebay_scheduler::{DecodeGap, SavePolicy};
use serde::Serialize;

use crate::images::ImageArgs;
use crate::pd::PdArgs;
use crate::sparse::SparseArgs;

/// Flags of `forebay plan`. Flags that `serve` also has have the same meaning and defaults.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Recorded traffic: one JSON object per line with timestamp (ms), input_length, output_length
    /// and hash_ids (Mooncake's format), and optionally images: objects with id, position, rows and
    /// columns.
    #[arg(long, value_name = "FILE", required_unless_present = "model")]
    pub trace: Option<PathBuf>,
    /// Device: a name that `forebay sim profiles` lists, or a TOML file. Its step times are those
    /// of all ranks of a replica together.
    #[arg(long, value_name = "NAME|FILE", required_unless_present = "model")]
    pub sim_profile: Option<String>,
    /// Objective in milliseconds, such as ttft:500, tpot:30 or e2el:20000; may be repeated.
    #[arg(long, value_name = "METRIC:MS", required_unless_present = "model", value_parser = Slo::parse)]
    pub slo: Vec<Slo>,
    /// Compute the memory that the ranks of this model need, instead of simulating a trace. The
    /// model is named as for `serve`. Its weights need not be downloaded.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["trace", "sim_profile", "slo"])]
    pub model: Option<String>,
    /// Percentile of each metric that must meet its objective.
    #[arg(long, value_name = "P", default_value_t = 99.0, value_parser = percent)]
    pub slo_percentile: f64,
    /// Share of requests that must meet all objectives, instead of a percentile of each metric.
    #[arg(long, value_name = "SHARE", conflicts_with = "slo_percentile", value_parser = share)]
    pub goodput: Option<f64>,
    /// Largest number of replicas to try.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_replicas: u32,
    /// Policy that chooses a replica for a request.
    #[arg(long, value_enum, default_value_t)]
    pub router: Router,
    /// Speed of the replay, as a multiple of the recorded speed.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    pub speed: f64,
    /// Use only this many requests, from the start of the trace.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub num_prompts: Option<u32>,
    /// Write settings and results to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub output_file: Option<PathBuf>,
    /// Largest number of simultaneously running requests on a replica.
    #[arg(long, visible_alias = "max-num-seqs", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_running_requests: u32,
    /// Largest number of tokens of a step.
    #[arg(long, visible_alias = "max-num-batched-tokens", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub chunked_prefill_size: u32,
    /// Tokens in a KV page.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub page_size: u32,
    /// Size of each replica's KV pool in tokens [default: the profile's].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_total_tokens: Option<u64>,
    /// Disable the prefix cache.
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    pub disable_radix_cache: bool,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags are documented")]
    pub shares: ShareArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags are documented")]
    pub moves: MoveArgs,
    /// Size of each replica's host tier in GB (10^9 bytes).
    #[arg(long, value_name = "GB", conflicts_with = "hicache_ratio", value_parser = from_zero)]
    pub hicache_size: Option<f64>,
    /// Size of the host tier relative to the device's pages; 0: none.
    #[arg(long, value_name = "RATIO", value_parser = from_zero)]
    pub hicache_ratio: Option<f64>,
    /// When blocks are copied to the host tier.
    #[arg(long, value_enum, default_value_t)]
    pub hicache_write_policy: WritePolicy,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags are documented")]
    pub pd: PdArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags are documented")]
    pub sparse: SparseArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags are documented")]
    pub images: ImageArgs,
    /// Number of steps that are planned before the result of the current one arrives; 0: one step
    /// at a time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=1))]
    pub lookahead: u32,
    /// Seed of the random variation of step times.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Flags of `serve` and `plan` about the division of a step's prompt tokens among prompts.
#[derive(Debug, Clone, Copy, Args)]
pub struct ShareArgs {
    /// Give a step's prompt tokens to prompts strictly in order, so that the first may take all.
    /// Without the flag, prompts with little left to compute may first get up to half of these
    /// tokens.
    #[arg(long)]
    pub disable_step_shares: bool,
    /// Target time between two tokens of running requests, in milliseconds. To meet it, steps
    /// compute fewer prompt tokens. `auto`: six times the measured time of a step without prompts.
    /// `off`: no target.
    #[arg(long, value_name = "MS|auto|off", default_value = "auto", value_parser = decode_gap)]
    pub decode_gap_ms: DecodeGap,
}

/// Flags of `serve`, `plan` and `route` about moving queued requests.
#[derive(Debug, Clone, Copy, Args)]
pub struct MoveArgs {
    /// Do not move queued requests between replicas. Without the flag a request moves, at most
    /// twice, if this halves the work that precedes its first token.
    #[arg(long)]
    pub disable_queue_moves: bool,
}

/// The policy that chooses a replica for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Router {
    /// Each replica in turn.
    #[default]
    RoundRobin,
    /// The replica with the fewest requests, waiting or running.
    LeastLoaded,
    /// The replica whose cached tokens save the most work, if the saved work outweighs the prompts
    /// and requests that are already at that replica. Otherwise the replica with the fewest
    /// requests.
    PrefixAware,
}

/// When blocks are copied to the host tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum WritePolicy {
    /// Blocks are copied as soon as they are computed.
    #[default]
    WriteThrough,
    /// Blocks are copied at their second use.
    WriteThroughSelective,
    /// Blocks are copied shortly before the device needs their pages.
    WriteBack,
}

impl From<WritePolicy> for SavePolicy {
    fn from(policy: WritePolicy) -> Self {
        match policy {
            WritePolicy::WriteThrough => Self::WriteThrough,
            WritePolicy::WriteThroughSelective => Self::WriteThroughSelective,
            WritePolicy::WriteBack => Self::WriteBack,
        }
    }
}

/// A latency metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SloMetric {
    /// Time from the arrival to the first token.
    Ttft,
    /// Mean time per token after the first.
    Tpot,
    /// Time from the arrival to the last token.
    E2el,
}

/// An objective: a latency metric and its limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Slo {
    /// The metric.
    pub metric: SloMetric,
    /// The limit in milliseconds.
    pub limit_ms: f64,
}

impl Slo {
    /// Parses an objective such as `ttft:500`.
    fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected ttft:MS, tpot:MS or e2el:MS";
        let (metric, limit) = text.split_once(':').ok_or(expected)?;
        let metric = match metric {
            "ttft" => SloMetric::Ttft,
            "tpot" => SloMetric::Tpot,
            "e2el" => SloMetric::E2el,
            _ => return Err(expected.to_owned()),
        };
        Ok(Self { metric, limit_ms: positive(limit)? })
    }
}

/// The goal that the planned number of replicas has to reach.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Goal {
    pub(crate) slos: Vec<Slo>,
    /// The percentile of each metric that must meet its limit, if `goodput` is `None`.
    pub(crate) percentile: f64,
    /// The share of requests that must meet all limits, in place of a percentile.
    pub(crate) goodput: Option<f64>,
}

impl PlanArgs {
    /// The goal that the planned number of replicas has to reach.
    pub(crate) fn goal(&self) -> Goal {
        let (slos, percentile) = (self.slo.clone(), self.slo_percentile);
        Goal { slos, percentile, goodput: self.goodput }
    }
}

fn number(text: &str, fits: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|&value| fits(value)).ok_or_else(|| expected.to_owned())
}

/// Parses the value of `--decode-gap-ms`.
fn decode_gap(text: &str) -> Result<DecodeGap, String> {
    let expected = "expected milliseconds above 0, auto or off";
    match text {
        "auto" => Ok(DecodeGap::Auto),
        "off" => Ok(DecodeGap::Off),
        _ => number(text, |ms| ms > 0.0 && ms <= 1e6, expected)
            .map(|ms| DecodeGap::Micros((1000.0 * ms).ceil() as u32)),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value.is_finite(), "expected a number above 0")
}

pub(super) fn from_zero(text: &str) -> Result<f64, String> {
    number(text, |value| (0.0..=1e6).contains(&value), "expected a number from 0 on")
}

fn percent(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value <= 100.0, "expected a percentile up to 100")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value <= 1.0, "expected a share, such as 0.99")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_are_read_or_refused() {
        let slo = Slo::parse("tpot:12.5").expect("an objective");
        assert_eq!(slo, Slo { metric: SloMetric::Tpot, limit_ms: 12.5 });
        for wrong in ["ttft", "ttft:", "ttft:-1", "ttft:0", "ttft:inf", "itl:5", "500"] {
            assert!(Slo::parse(wrong).is_err(), "{wrong}");
        }
    }
}
