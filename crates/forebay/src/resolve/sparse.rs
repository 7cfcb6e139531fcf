//! Resolves the settings of sparse decoding from host memory.

use anyhow::{Result, bail};
use forebay_capacity::{WritePolicy, hot_row_tokens as hot_row_tokens_of};
use forebay_hand::HandConfig;
use forebay_sim::Profile;

use crate::flags::{Device, Preemption, ServeFlags};
use crate::model::Model;

/// Checks the flags of sparse decoding.
///
/// # Errors
/// The model attends to all positions, or flags exclude each other.
pub(super) fn check(flags: &ServeFlags, model: &Model) -> Result<()> {
    let sparse = &flags.sparse;
    if !sparse.enable_hisparse {
        if let Some(given) = sparse.given() {
            bail!("{given} is for sparse decoding from host memory: add --enable-hisparse");
        }
        return Ok(());
    }
    let config = sparse.hisparse_config.clone().unwrap_or_default();
    if flags.run.device != Device::Sim && !has_indexer(model) {
        bail!(
            "--enable-hisparse is for models that choose positions by an index (DeepSeek V3.2, GLM-5), and {} reads all of them",
            model.name
        );
    }
    let tiers = &flags.tiers;
    let write_through = WritePolicy::WriteThrough;
    let refused = [
        (
            "--hicache-write-policy",
            tiers.hicache_write_policy.is_some_and(|policy| policy != write_through),
            "a page is saved as soon as it is full",
        ),
        (
            "--preemption recompute",
            tiers.preemption == Some(Preemption::Recompute),
            "what was saved is not computed again",
        ),
        (
            "--hicache-prefetch-requests",
            tiers.hicache_prefetch_requests.is_some_and(|count| count > 0),
            "prompts are brought back when it is their turn",
        ),
        (
            "--hot-buffer-tokens",
            sparse.hot_buffer_tokens.is_some() && config.device_buffer_size.is_some(),
            "--hisparse-config has device_buffer_size, which is the same",
        ),
        (
            "--hicache-ratio",
            tiers.hicache_ratio.is_some() && config.host_to_device_ratio.is_some(),
            "--hisparse-config has host_to_device_ratio, which is the same",
        ),
    ];
    if let Some((flag, _, why)) = refused.iter().find(|(_, given, _)| *given) {
        bail!("{flag} does not go with --enable-hisparse: {why}");
    }
    Ok(())
}

/// The number of positions that a sparse slot of a simulated device keeps, in whole pages; 0: no
/// slot ever becomes sparse.
///
/// # Errors
/// The profile's model does not use sparse attention, or selects more positions than are kept.
pub(crate) fn hot_row_tokens(hand: &HandConfig, profile: &Profile) -> Result<u32> {
    let Some(wanted) = hand.hot_row_tokens else { return Ok(0) };
    let (name, top_k) = (&profile.name, profile.sparse.top_k);
    if let Some(other) = hand.sparse_top_k.filter(|&other| top_k > 0 && other != top_k) {
        bail!(
            "--hisparse-config: top_k is {other}, but the model of profile {name} chooses {top_k}"
        );
    }
    hot_row_tokens_of(profile, Some(wanted).filter(|&tokens| tokens > 0), hand.page_size)
}

fn has_indexer(model: &Model) -> bool {
    model.shape.as_ref().is_some_and(|shape| shape.indexer().is_some())
}
