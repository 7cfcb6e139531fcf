//! Flags about disaggregated prefill.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use forebay_api::BackendUrl;
use forebay_capacity::PdSplit;

use super::ServeFlags;
use super::duration::seconds;

/// The part of requests that a server computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lowercase")]
pub(crate) enum DisaggregationMode {
    /// Whole requests, without other servers.
    #[default]
    Null,
    /// Prompts, on behalf of servers with `decode`.
    Prefill,
    /// Whole requests; servers with `prefill` may compute their prompts.
    Decode,
}

#[derive(Debug, Args)]
pub(crate) struct PdFlags {
    /// Disaggregated prefill: P replicas compute prompts and the first token, and D replicas
    /// continue. It sets --dp-size to P + D, and turns on the host tier, which transfers the KV
    /// cache. Only for hands on this machine.
    #[arg(long, value_name = "P:D", value_parser = served)]
    pub(crate) pd: Option<PdSplit>,
    /// Number of uncached prompt tokens up to which a decode replica, or a server with
    /// --disaggregation-mode `decode`, computes a request alone [default: 512].
    #[arg(long, value_name = "TOKENS")]
    pub(crate) pd_local_tokens: Option<u32>,
    /// Disaggregated prefill with several servers, on one machine or on several. All need the same
    /// --cache-secret-file. Both `prefill` and `decode` turn on the host tier, which transfers the
    /// KV cache.
    #[arg(long, value_enum, default_value_t, value_name = "MODE", conflicts_with = "pd")]
    pub(crate) disaggregation_mode: DisaggregationMode,
    /// Servers with --disaggregation-mode `prefill` to which a server with `decode` sends prompts.
    /// A router with this server's --router-key may name another.
    #[arg(long, value_name = "URL,...", value_delimiter = ',', value_parser = BackendUrl::parse)]
    pub(crate) pd_prefill_servers: Vec<BackendUrl>,
    /// Longest time in seconds that a server with --disaggregation-mode `decode` waits for the
    /// blocks of a prompt. After that the server computes the prompt itself [default: 60].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) pd_timeout: Option<Duration>,
}

impl PdFlags {
    /// True if this server divides the computation of requests with other servers.
    pub(crate) fn apart(&self) -> bool {
        self.disaggregation_mode != DisaggregationMode::Null
    }
}

/// The largest number of prefill or decode replicas of a server.
const MOST: u32 = 128;

/// Parses the value of --pd of a server.
fn served(text: &str) -> Result<PdSplit, String> {
    match text.parse::<PdSplit>() {
        Ok(split) if split.prefill.max(split.decode) <= MOST => Ok(split),
        _ => Err(format!("expected two numbers from 1 to {MOST}, such as 1:2")),
    }
}

impl ServeFlags {
    /// Sets the flags that --pd and --disaggregation-mode imply.
    ///
    /// # Errors
    /// Flags contradict each other, or are for a mode that is not given.
    pub(crate) fn settle_pd(&mut self) -> Result<()> {
        let pd = &self.replicas.pd;
        let decodes = pd.disaggregation_mode == DisaggregationMode::Decode;
        let of_decode = [
            ("--pd-prefill-servers", !pd.pd_prefill_servers.is_empty()),
            ("--pd-timeout", pd.pd_timeout.is_some()),
            ("--pd-local-tokens", pd.pd_local_tokens.is_some() && pd.pd.is_none()),
        ];
        if let Some((flag, _)) = of_decode.iter().find(|(_, given)| *given && !decodes) {
            bail!("{flag} is for --disaggregation-mode decode");
        }
        if pd.apart() && self.tiers.kv_offloading_size.is_none() {
            self.tiers.enable_hierarchical_cache = true;
        }
        let Some(split) = pd.pd else { return Ok(()) };
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
