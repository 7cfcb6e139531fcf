//! Disaggregated prefill: its flags, and its results in a plan.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use serde::Serialize;

use crate::outcome::Latency;

/// The largest number of replicas of a kind.
const MOST: u32 = 4096;

/// Counts of prefill and decode replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PdSplit {
    /// Replicas that compute prompts and first tokens.
    pub prefill: u32,
    /// Replicas that compute later tokens.
    pub decode: u32,
}

impl PdSplit {
    /// The number of all replicas.
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
    /// All splits of a number of replicas.
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
    /// both. `auto` tries splits of --max-replicas replicas, and reports the one with the highest
    /// goodput. Each replica has a host tier.
    #[arg(long, value_name = "P:D|auto")]
    pub pd: Option<PdChoice>,
    /// A decode replica serves a request alone if at most this many prompt tokens are not cached
    /// there.
    #[arg(long, value_name = "TOKENS", requires = "pd", default_value_t = 512)]
    pub pd_local_tokens: u32,
}

/// The split of simulated replicas. The first `prefill` of them compute prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    pub(crate) prefill: u32,
    pub(crate) local_tokens: u32,
}

/// The results of a split, besides those of all runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PdOutcome {
    /// The split.
    pub(crate) split: PdSplit,
    /// Requests that a decode replica went on with.
    pub(crate) handed: u64,
    /// Tokens of the blocks that were lent to decode replicas and back.
    pub(crate) lent_tokens: u64,
    /// How often prefill replicas began to hold prompts back.
    pub(crate) holds: u64,
    /// Time between the first two tokens of requests that were handed on.
    pub(crate) second_ms: Latency,
    /// The share of their time in which the prefill replicas computed.
    pub(crate) prefill_utilisation: f64,
    /// Utilisation of decode replicas.
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
