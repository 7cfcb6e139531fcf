//! Resolves the host tier of each replica: how the engine uses it, and its size for the hand.

use anyhow::{Result, bail};
use forebay_capacity::KvSave;
use forebay_engine::{HostConfig, HostTier, Preemption, SaveUnit};
use forebay_hand::HandConfig;
use forebay_sim::Profile;

use super::sparse;
use crate::flags::{Preemption as PreemptionFlag, ServeFlags, TierFlags};
use crate::model::{Model, Pooling};

/// The default ratio, the same as SGLang's.
const RATIO: f64 = 2.0;

/// The size of the host tier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum HostSize {
    /// The size in bytes.
    Bytes(u64),
    /// The number of host pages for each page of the device.
    Ratio(f64),
}

impl HostSize {
    /// Reads the size from the hand's configuration; `None`: there is no host tier.
    pub(crate) fn from_hand(hand: &HandConfig) -> Option<Self> {
        hand.host_bytes.map(Self::Bytes).or(hand.host_ratio.map(Self::Ratio))
    }

    fn from_flags(flags: &TierFlags, ratio: Option<f64>, replicas: u32) -> Self {
        let shared =
            flags.kv_offloading_size.map(|gib| gib * f64::from(1 << 30) / f64::from(replicas));
        match flags.hicache_size.map(|gb| gb * 1e9).or(shared) {
            Some(bytes) => Self::Bytes(bytes as u64),
            None => Self::Ratio(flags.hicache_ratio.or(ratio).unwrap_or(RATIO)),
        }
    }

    /// Returns how many host pages and host state pages there are. `device`: how many KV pages and
    /// state pages the device has.
    ///
    /// # Errors
    /// The profile does not contain the size of a page, or a number is invalid.
    pub(crate) fn pages(
        self,
        profile: &Profile,
        device: [u32; 2],
        page_size: u32,
    ) -> Result<[u32; 2]> {
        let ratio = match self {
            Self::Ratio(ratio) => ratio,
            Self::Bytes(_) if profile.page_bytes(page_size, false).all() == 0 => bail!(
                "profile {} does not say what a token's keys and values take (kv.main_bytes_token): use --hicache-ratio",
                profile.name
            ),
            Self::Bytes(bytes) => profile.host_ratio(bytes, device, page_size),
        };
        let counts = device.map(|pages| (ratio * f64::from(pages)).min(f64::from(i32::MAX)) as u32);
        let [pages, state_pages] = counts;
        if pages == 0 || device[1] > 0 && state_pages == 0 {
            bail!("the host tier holds no page");
        }
        Ok(counts)
    }
}

/// The engine's settings for the host tier, with steps of `step` tokens; `None`: there is no host
/// tier.
///
/// # Errors
/// Flags exclude each other, or the model has no KV cache.
pub(super) fn engine(
    flags: &ServeFlags,
    model: &Model,
    step: u32,
    page_size: u32,
) -> Result<Option<HostConfig>> {
    let tiers = &flags.tiers;
    sparse::check(flags, model)?;
    let is_sparse = flags.sparse.enable_hisparse;
    if !tiers.on() && !is_sparse {
        if let Some(given) = tiers.given() {
            bail!("{given} is for a host tier: add --enable-hierarchical-cache");
        }
        return Ok(None);
    }
    if flags.schedule.disable_radix_cache {
        bail!(
            "a host tier keeps blocks of the prefix cache: it goes without --disable-radix-cache"
        );
    }
    if model.pooling.as_ref().is_some_and(Pooling::whole_prompts) {
        bail!("this model keeps no keys and values, so a host tier has nothing to hold");
    }
    if model.pooling.as_ref().is_some_and(Pooling::counts_all) {
        bail!(
            "a host tier keeps blocks of the prefix cache, and this model's vectors are means of states that all have to be computed"
        );
    }
    if model.has_states() && model.called.is_some() {
        bail!(
            "transformers' code computes {}, and keeps its recurrent states in a form that no host tier has",
            model.name
        );
    }
    if model.has_states() && flags.states.disable_state_cache {
        bail!(
            "a host tier needs the state cache: without cached states no request can continue from a cached block. Leave out --disable-state-cache"
        );
    }
    if is_sparse && flags.sim.sim_tokens_a_row.is_some_and(|tokens| tokens > 1) {
        bail!(
            "--sim-tokens-a-row does not go with --enable-hisparse: a sparse row gives one token"
        );
    }
    let usual = HostConfig {
        kv_copy_pages_per_step: HostTier::usual_copies(step, page_size),
        ..HostConfig::default()
    };
    Ok(Some(HostConfig {
        hicache_write_policy: tiers.hicache_write_policy.unwrap_or_default().into(),
        hicache_prefetch_requests: tiers
            .hicache_prefetch_requests
            .unwrap_or(usual.hicache_prefetch_requests),
        kv_copy_pages_per_step: tiers
            .kv_copy_pages_per_step
            .unwrap_or(usual.kv_copy_pages_per_step),
        preemption: match tiers.preemption.unwrap_or_default() {
            PreemptionFlag::Restore => Preemption::Restore,
            PreemptionFlag::Recompute => Preemption::Recompute,
        },
        kv_save: match flags.sparse.kv_save.unwrap_or_default() {
            KvSave::Page => SaveUnit::Page,
            KvSave::Token => SaveUnit::Token,
        },
    }))
}

/// The host tier in a hand's configuration. `on`: there is a host tier.
pub(super) fn hand(flags: &ServeFlags, on: bool) -> HandConfig {
    let (tiers, sparse) = (&flags.tiers, &flags.sparse);
    let numbers = sparse.hisparse_config.clone().unwrap_or_default();
    let replicas = flags.replicas.ranks.dp_size;
    let size = on.then(|| HostSize::from_flags(tiers, numbers.host_to_device_ratio, replicas));
    let rows = sparse.hot_buffer_tokens.or(numbers.device_buffer_size).unwrap_or(0);
    HandConfig {
        host_bytes: if let Some(HostSize::Bytes(bytes)) = size { Some(bytes) } else { None },
        host_ratio: if let Some(HostSize::Ratio(ratio)) = size { Some(ratio) } else { None },
        // With sparse decoding, the device has a page of index keys for each host page. So the host
        // tier can't be reduced to what fits.
        host_fits: on && !tiers.names_size() && !sparse.enable_hisparse,
        copy_gbps: tiers.debug_kv_copy_gbps,
        kv_checksum: tiers.debug_kv_checksum,
        hot_row_tokens: sparse.enable_hisparse.then_some(rows),
        sparse_top_k: numbers.top_k,
        kv_save_order: sparse.kv_save_order.unwrap_or_default().name().to_owned(),
        ..HandConfig::default()
    }
}
