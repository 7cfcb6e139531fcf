//! Sparse decoding from host memory, resolved.

use anyhow::{Result, bail};
use forebay_capacity::{KvSave, KvSaveOrder, WritePolicy, hot_row_tokens};
use forebay_sim::Profile;
use serde::Serialize;

use crate::flags::{Device, Preemption, ServeFlags};
use crate::model::Model;

/// Settings of requests that go on while most of their pages are in host memory only.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Sparse {
    /// Positions that a sparse request keeps on the device; 0: twice the model's top-k.
    pub(crate) hot_buffer_tokens: u32,
    /// The model's top-k, as the user states it.
    pub(crate) top_k: Option<u32>,
    pub(crate) kv_save: KvSave,
    pub(crate) kv_save_order: KvSaveOrder,
}

impl Sparse {
    pub(crate) fn resolve(flags: &ServeFlags, model: &Model) -> Result<Option<Self>> {
        let sparse = &flags.sparse;
        if !sparse.enable_hisparse {
            if let Some(given) = sparse.given() {
                bail!("{given} is for sparse decoding from host memory: add --enable-hisparse");
            }
            return Ok(None);
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
        Ok(Some(Self {
            hot_buffer_tokens: sparse.hot_buffer_tokens.or(config.device_buffer_size).unwrap_or(0),
            top_k: config.top_k,
            kv_save: sparse.kv_save.unwrap_or_default(),
            kv_save_order: sparse.kv_save_order.unwrap_or_default(),
        }))
    }

    /// Positions that a sparse slot of a simulated device keeps, in whole pages.
    ///
    /// # Errors
    /// The profile's model chooses no positions, another number of them, or more than are kept.
    pub(crate) fn hot_row_tokens(&self, profile: &Profile, page_size: u32) -> Result<u32> {
        let (name, top_k) = (&profile.name, profile.sparse.top_k);
        if let Some(other) = self.top_k.filter(|&other| top_k > 0 && other != top_k) {
            bail!(
                "--hisparse-config: top_k is {other}, but the model of profile {name} chooses {top_k}"
            );
        }
        let wanted = Some(self.hot_buffer_tokens).filter(|&tokens| tokens > 0);
        hot_row_tokens(profile, wanted, page_size)
    }
}

fn has_indexer(model: &Model) -> bool {
    let number = |name| model.config.get(name).and_then(serde_json::Value::as_u64);
    number("index_topk").is_some_and(|top_k| top_k > 0)
}
