//! Flags about prefill apart from decode.

use std::str::FromStr;

use anyhow::{Result, bail};
use clap::Args;

use super::ServeFlags;

#[derive(Debug, Args)]
pub(crate) struct PdFlags {
    /// Disaggregated prefill: P replicas compute prompts and the first token, and D replicas
    /// continue. It sets --dp-size to P + D and turns the host tier on, which carries the KV. For
    /// hands on this machine.
    #[arg(long, value_name = "P:D")]
    pub(crate) pd: Option<PdSplit>,
    /// Uncached prompt tokens up to which a decode replica serves a request alone [default: 512].
    #[arg(long, value_name = "TOKENS", requires = "pd")]
    pub(crate) pd_local_tokens: Option<u32>,
}

/// The numbers of prefill and decode replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PdSplit {
    pub(crate) prefill: u32,
    pub(crate) decode: u32,
}

impl FromStr for PdSplit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts =
            text.split_once(':').and_then(|(p, d)| Some((p.parse().ok()?, d.parse().ok()?)));
        match parts {
            Some((prefill @ 1..=128, decode @ 1..=128)) => Ok(Self { prefill, decode }),
            _ => Err("expected two numbers from 1 to 128, such as 1:2"),
        }
    }
}

impl ServeFlags {
    /// Sets the flags that --pd stands for.
    ///
    /// # Errors
    /// --dp-size says something else.
    pub(crate) fn settle_pd(&mut self) -> Result<()> {
        let Some(PdSplit { prefill, decode }) = self.replicas.pd.pd else { return Ok(()) };
        let (replicas, sum) = (&mut self.replicas.ranks.dp_size, prefill + decode);
        if *replicas != 1 && *replicas != sum {
            bail!(
                "--pd {prefill}:{decode} is {sum} replicas, and --dp-size says {replicas}: leave it off"
            );
        }
        *replicas = sum;
        if self.tiers.kv_offloading_size.is_none() {
            self.tiers.enable_hierarchical_cache = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_is_two_numbers() {
        assert_eq!("1:2".parse(), Ok(PdSplit { prefill: 1, decode: 2 }));
        for wrong in ["", "2", "0:1", "1:0", "1:2:3", "a:b", "129:1"] {
            assert!(wrong.parse::<PdSplit>().is_err(), "{wrong}");
        }
    }
}
