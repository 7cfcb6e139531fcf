//! A model on this machine, with everything decided before it starts.

use std::path::Path;

use anyhow::Result;
use forebay_server::ServerConfig;
use tracing::{info, warn};

use crate::flags::{Device, LoadFormat, ServeFlags};
use crate::model::{Model, fetch};
use crate::resolve::{Drafter, Resolved};

/// Fetches a model, and resolves the settings for it.
pub(super) fn find(
    flags: &ServeFlags,
    name: &str,
    python: &Path,
    access: ServerConfig,
) -> Result<(Model, Resolved)> {
    let simulated = flags.run.device == Device::Sim;
    let weights = !simulated && flags.loading.load_format != LoadFormat::Dummy;
    let model = fetch(python, name, flags.source(), weights, flags.run.hand)?;
    let drafter = Drafter::find(flags, python, &model, weights)?;
    let resolved = Resolved::new(flags, (&model, drafter.as_ref()), access)?;
    let (hand, context_length) = (&resolved.hand, resolved.engine.context_length);
    info!(
        model = %resolved.model.model,
        device = %hand.device,
        hand = resolved.choice.hand,
        context_length,
        dtype = %hand.dtype,
        "resolved"
    );
    let idle_flags = flags.without_effect_on_sim();
    if simulated && !idle_flags.is_empty() {
        warn!("without effect on a simulated device: {}", idle_flags.join(", "));
    }
    Ok((model, resolved))
}
