//! Disaggregated prefill in a plan: its flags, and its results.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use serde::Serialize;

use crate::outcome::Latency;

/// The largest number of prefill or decode replicas.
const MOST: u32 = 4096;

/// The numbers of prefill and decode replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PdSplit {
    /// The number of replicas that compute prompts and first tokens.
    pub prefill: u32,
    /// The number of replicas that compute all further tokens.
    pub decode: u32,
}

impl PdSplit {
    /// The total number of replicas.
    #[must_use]
    pub fn replicas(self) -> u32 {
        self.prefill + self.decode
    }
}

impl FromStr for PdSplit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts =
            text.split_once(':').and_then(|(p, d)| Some((p.parse().ok()?, d.parse().ok()?)));
        match parts {
            Some((prefill @ 1..=MOST, decode @ 1..=MOST)) => Ok(Self { prefill, decode }),
            _ => Err("expected two numbers from 1 on, such as 1:2"),
        }
    }
}

impl fmt::Display for PdSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.prefill, self.decode)
    }
}

/// The splits that a plan tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PdChoice {
    /// Splits of `--max-replicas` replicas, chosen by a search.
    Auto,
    /// A single split.
    Split(PdSplit),
}

impl FromStr for PdChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Split).map_err(|_| "expected auto, or a split such as 1:2"),
        }
    }
}

/// Flags of `plan` about disaggregated prefill.
#[derive(Debug, Clone, Copy, Args)]
pub struct PdArgs {
    /// Disaggregated prefill: compare P prefill and D decode replicas with P + D replicas that do
    /// both. `auto` tries splits of --max-replicas replicas, and reports the split with the highest
    /// goodput. Each replica has a host tier.
    #[arg(long, value_name = "P:D|auto")]
    pub pd: Option<PdChoice>,
    /// Number of uncached prompt tokens up to which a decode replica computes a request alone.
    #[arg(long, value_name = "TOKENS", requires = "pd", default_value_t = 512)]
    pub pd_local_tokens: u32,
}

/// The split of simulated replicas. The first `prefill` replicas compute prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    pub(crate) prefill: u32,
    pub(crate) local_tokens: u32,
}

/// The results of a split, besides the results that every run has.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PdOutcome {
    /// The split.
    pub(crate) split: PdSplit,
    /// The number of requests that were handed on to a decode replica.
    pub(crate) handed: u64,
    /// The number of tokens in the blocks that replicas lent each other.
    pub(crate) lent_tokens: u64,
    /// How often prefill replicas started to hold prompts.
    pub(crate) holds: u64,
    /// Time between the first and second token of requests that were handed on.
    pub(crate) second_ms: Latency,
    /// The share of the time in which the prefill replicas computed.
    pub(crate) prefill_utilisation: f64,
    /// The share of the time in which the decode replicas computed.
    pub(crate) decode_utilisation: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_is_two_numbers() {
        assert_eq!("1:2".parse(), Ok(PdSplit { prefill: 1, decode: 2 }));
        for wrong in ["", "2", "0:1", "1:0", "1:2:3", "a:b", "4097:1", "auto"] {
            assert!(wrong.parse::<PdSplit>().is_err(), "{wrong}");
        }
        assert_eq!("auto".parse(), Ok(PdChoice::Auto));
        let split = PdSplit { prefill: 16, decode: 48 };
        assert_eq!("16:48".parse(), Ok(PdChoice::Split(split)));
        assert_eq!((split.to_string(), split.replicas()), ("16:48".into(), 64));
        assert!("none".parse::<PdChoice>().is_err());
    }
}
