//! Disaggregated prefill.

use anyhow::{Result, bail};
use forebay_capacity::WritePolicy;
use forebay_replicas::PdConfig;

use crate::flags::{Device, ServeFlags};
use crate::model::Model;

/// The roles of the replicas; `None`: each does everything.
pub(super) fn config(flags: &ServeFlags) -> Option<PdConfig> {
    let usual = PdConfig::default().local_tokens;
    let local_tokens = flags.replicas.pd.pd_local_tokens.unwrap_or(usual);
    flags.replicas.pd.pd.map(|split| PdConfig { prefill: split.prefill, local_tokens })
}

/// Refuses models whose state can't be lent to another replica.
///
/// # Errors
/// One line for the user.
pub(super) fn check(flags: &ServeFlags, model: &Model, device: Device) -> Result<()> {
    if flags.replicas.pd.pd.is_none() {
        return Ok(());
    }
    let ranks = &flags.replicas.ranks;
    let experts = ranks.enable_dp_attention
        || ranks.enable_expert_parallel
        || ranks.ep_size.is_some_and(|size| size > 1);
    let policy = flags.tiers.hicache_write_policy;
    let refused = [
        (model.pooling.is_some(), "a model that pools generates nothing"),
        (flags.sparse.enable_hisparse, "--enable-hisparse has host pages of its own"),
        (experts, "--enable-dp-attention and experts by rank: ranks lend no pages yet"),
        (ranks.tp_size > 1, "--tp-size: ranks lend no pages yet"),
        (flags.replicas.elsewhere().is_some(), "the hands have to be on this machine"),
        (
            policy.is_some_and(|policy| policy != WritePolicy::WriteThrough),
            "--hicache-write-policy has to be write_through: what is not saved is not lent",
        ),
        (flags.schedule.disable_radix_cache, "--disable-radix-cache leaves no blocks to lend"),
        (device == Device::Cuda, "on --device cuda nobody has tried it yet: it is for CPUs"),
    ];
    match refused.into_iter().find(|(given, _)| *given) {
        Some((_, why)) => bail!("--pd: {why}"),
        None => Ok(()),
    }
}
