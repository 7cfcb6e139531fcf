//! Flags about disaggregated prefill.

use anyhow::{Result, bail};
use clap::Args;
use forebay_capacity::PdSplit;

use super::ServeFlags;

#[derive(Debug, Args)]
pub(crate) struct PdFlags {
    /// Disaggregated prefill: P replicas compute prompts and the first token, and D replicas
    /// continue. It sets --dp-size to P + D and turns the host tier on, which carries the KV. For
    /// hands on this machine.
    #[arg(long, value_name = "P:D", value_parser = served)]
    pub(crate) pd: Option<PdSplit>,
    /// Uncached prompt tokens up to which a decode replica serves a request alone [default: 512].
    #[arg(long, value_name = "TOKENS", requires = "pd")]
    pub(crate) pd_local_tokens: Option<u32>,
}

/// The largest number of replicas of a kind that a server has.
const MOST: u32 = 128;

/// Reads --pd of a server.
fn served(text: &str) -> Result<PdSplit, String> {
    match text.parse::<PdSplit>() {
        Ok(split) if split.prefill.max(split.decode) <= MOST => Ok(split),
        _ => Err(format!("expected two numbers from 1 to {MOST}, such as 1:2")),
    }
}

impl ServeFlags {
    /// Sets the flags that --pd stands for.
    ///
    /// # Errors
    /// --dp-size contradicts it.
    pub(crate) fn settle_pd(&mut self) -> Result<()> {
        let Some(split) = self.replicas.pd.pd else { return Ok(()) };
        let (replicas, sum) = (&mut self.replicas.ranks.dp_size, split.replicas());
        if *replicas != 1 && *replicas != sum {
            bail!("--pd {split} is {sum} replicas, and --dp-size says {replicas}: leave it off");
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
    fn a_server_has_so_many_replicas_of_a_kind() {
        assert_eq!(served("1:128"), Ok(PdSplit { prefill: 1, decode: 128 }));
        for wrong in ["0:1", "129:1", "1:129", "auto"] {
            assert!(served(wrong).is_err(), "{wrong}");
        }
    }
}
