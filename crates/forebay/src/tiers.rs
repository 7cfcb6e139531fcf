//! The host tier, resolved.

use anyhow::{Result, bail};
use forebay_capacity::{KvSave, WritePolicy};
use forebay_engine::{HostConfig, HostTier as Usual};
use forebay_sim::Profile;
use serde::Serialize;

use crate::flags::{Preemption, ServeFlags, TierFlags};
use crate::model::{Model, Pooling};
use crate::sparse::Sparse;

/// The ratio that SGLang takes.
const RATIO: f64 = 2.0;

/// The host tier of each replica.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HostTier {
    /// The size of the host tier, in bytes or in pages for each page of the device.
    #[serde(flatten)]
    pub(crate) size: HostSize,
    pub(crate) write_policy: WritePolicy,
    pub(crate) prefetch_requests: u32,
    pub(crate) copy_pages_per_step: u32,
    pub(crate) preemption: Preemption,
    pub(crate) debug_copy_gbps: Option<f64>,
    pub(crate) debug_checksum: bool,
    /// Requests may give up pages while they decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sparse: Option<Sparse>,
}

/// The size of the host tier.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HostSize {
    /// The size in bytes.
    Bytes(u64),
    /// The size in pages for each page of the device.
    Ratio(f64),
}

impl HostSize {
    fn of(flags: &TierFlags, ratio: Option<f64>, replicas: u32) -> Self {
        let shared =
            flags.kv_offloading_size.map(|gib| gib * f64::from(1 << 30) / f64::from(replicas));
        match flags.hicache_size.map(|gb| gb * 1e9).or(shared) {
            Some(bytes) => Self::Bytes(bytes as u64),
            None => Self::Ratio(flags.hicache_ratio.or(ratio).unwrap_or(RATIO)),
        }
    }

    /// The number of host pages, for a device with `pages` pages and this profile.
    ///
    /// # Errors
    /// The profile has no bytes of a page, or the number is invalid.
    pub(crate) fn pages(self, profile: &Profile, pages: u32, page_size: u32) -> Result<u32> {
        let count = match self {
            Self::Ratio(ratio) => ratio * f64::from(pages),
            Self::Bytes(bytes) => match profile.page_bytes(page_size, false).all() {
                0 => bail!(
                    "profile {} does not say what a token's keys and values take (kv.main_bytes_token): use --hicache-ratio",
                    profile.name
                ),
                page => (bytes / page) as f64,
            },
        };
        if count < 1.0 {
            bail!("the host tier holds no page");
        }
        Ok(count.min(f64::from(i32::MAX)) as u32)
    }
}

impl HostTier {
    /// `step` is the most tokens of one, `page_size` those of a page.
    pub(crate) fn resolve(
        flags: &ServeFlags,
        model: &Model,
        step: u32,
        page_size: u32,
    ) -> Result<Option<Self>> {
        let tiers = &flags.tiers;
        let sparse = Sparse::resolve(flags, model)?;
        if !tiers.on() && sparse.is_none() {
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
        if sparse.is_some() && flags.sim.sim_tokens_a_row.is_some_and(|tokens| tokens > 1) {
            bail!(
                "--sim-tokens-a-row does not go with --enable-hisparse: a sparse row gives one token"
            );
        }
        let usual = Usual::usual_copies(step, page_size);
        Ok(Some(Self {
            size: HostSize::of(tiers, flags.sparse.host_ratio(), flags.replicas.ranks.dp_size),
            sparse,
            write_policy: tiers.hicache_write_policy.unwrap_or_default(),
            prefetch_requests: tiers.hicache_prefetch_requests.unwrap_or(Usual::PREFETCH),
            copy_pages_per_step: tiers.kv_copy_pages_per_step.unwrap_or(usual),
            preemption: tiers.preemption.unwrap_or_default(),
            debug_copy_gbps: tiers.debug_kv_copy_gbps,
            debug_checksum: tiers.debug_kv_checksum,
        }))
    }

    /// The part that decides in the brain.
    pub(crate) fn engine(&self) -> HostConfig {
        HostConfig {
            policy: self.write_policy.into(),
            copies_a_step: self.copy_pages_per_step,
            prefetch: self.prefetch_requests,
            save_rows: self.sparse.is_some_and(|sparse| sparse.kv_save == KvSave::Token),
            restore_preempted: self.preemption == Preemption::Restore,
        }
    }
}
