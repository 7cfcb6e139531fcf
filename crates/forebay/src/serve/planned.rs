//! A model on this machine, with everything decided before it starts.

use std::path::Path;

use anyhow::Result;
use forebay_server::ServerConfig;
use tracing::{info, warn};

use crate::flags::{Device, Hand, LoadFormat, ServeFlags};
use crate::model::{Model, Source, fetch};
use crate::resolve::Resolved;

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
    let draft = flags.drafts.model()?.map(|(name, _)| {
        let source = Source { revision: None, embedding: false, ..flags.source() };
        fetch(python, name, source, weights, Hand::Torch)
    });
    let draft = draft.transpose()?;
    let resolved = Resolved::new(flags, (&model, draft.as_ref()), access)?;
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
