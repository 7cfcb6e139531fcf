//! Resolves the settings of adapters.

use anyhow::{Result, bail};
use forebay_hand::PlaceConfig;

use super::device::DeviceSettings;
use crate::flags::{Device, ServeFlags};
use crate::model::Model;

/// The adapter settings of each hand; `None`: no adapters are served.
///
/// # Errors
/// Adapters are not served with this model or on this device.
pub(super) fn resolve(
    flags: &ServeFlags,
    model: &Model,
    device: &DeviceSettings,
) -> Result<Option<PlaceConfig>> {
    let adapters = &flags.adapters;
    if !adapters.is_enabled() {
        return Ok(None);
    }
    let lacks = [
        (device.device == Device::Sim, "a simulated device"),
        (device.arrangement.step_group(), "--enable-dp-attention"),
        (device.arrangement.expert_parallel, "--ep-size, whole experts by rank"),
        (device.apart, "hands on other machines"),
        (model.pooling.is_some(), "a model that pools"),
        (model.called.is_some(), "a model that transformers' code computes"),
        (
            model.images.is_some(),
            "a model that takes images (--limit-images 0 serves its text alone)",
        ),
        (model.is_latent(), "a model with latent attention"),
        (flags.sparse.enable_hisparse, "--enable-hisparse"),
    ];
    if let Some((_, what)) = lacks.into_iter().find(|&(wanted, _)| wanted) {
        bail!("--enable-lora: adapters are not served with {what}; leave it off");
    }
    Ok(Some(PlaceConfig {
        places: adapters.max_loras,
        rank: adapters.max_lora_rank,
        kept: adapters.max_cpu_loras,
    }))
}
