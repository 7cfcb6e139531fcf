//! A model on this machine, with all settings that are decided before it starts.

use std::path::Path;

use anyhow::Result;
use forebay_server::ServerConfig;
use tracing::{info, warn};

use crate::flags::{Device, Hand, LoadFormat, ServeFlags};
use crate::model::{Model, Source, fetch};
use crate::python;
use crate::resolve::{Drafter, Resolved};

/// Fetches a model, and resolves the settings for it. If its images need the PyTorch hand, which is
/// not installed, the model is served for text only.
pub(super) fn find(
    flags: &ServeFlags,
    name: &str,
    python: &Path,
    access: ServerConfig,
) -> Result<(Model, Resolved)> {
    let (mut model, mut resolved) = find_from(flags, name, python, access.clone(), flags.source())?;
    if let Some(why) = why_no_images(flags, &model, &resolved, python) {
        let source = Source { text_alone: true, ..flags.source() };
        let (text, of_text) = find_from(flags, name, python, access, source)?;
        if of_text.choice.hand == "rust" {
            warn!("images are off, and the Rust hand serves the model's text: {why:#}");
            (model, resolved) = (text, of_text);
        }
    }
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
    let simulated = flags.run.device == Device::Sim;
    if simulated && !idle_flags.is_empty() {
        warn!("without effect on a simulated device: {}", idle_flags.join(", "));
    }
    Ok((model, resolved))
}

fn find_from(
    flags: &ServeFlags,
    name: &str,
    python: &Path,
    access: ServerConfig,
    source: Source<'_>,
) -> Result<(Model, Resolved)> {
    let simulated = flags.run.device == Device::Sim;
    let weights = !simulated && flags.loading.load_format != LoadFormat::Dummy;
    let model = fetch(python, name, source, weights, flags.run.hand)?;
    let drafter = Drafter::find(flags, python, &model, weights)?;
    let resolved = Resolved::new(flags, (&model, drafter.as_ref()), access)?;
    Ok((model, resolved))
}

/// The reason why a model's images can't be computed here; `None` if they can be computed, or if a
/// flag requires them.
fn why_no_images(
    flags: &ServeFlags,
    model: &Model,
    resolved: &Resolved,
    python: &Path,
) -> Option<anyhow::Error> {
    let is_asked = flags.run.hand != Hand::Auto
        || flags.images.given().is_some()
        || flags.replicas.elsewhere().is_some();
    if is_asked || model.images.is_none() || resolved.choice.hand != "torch" {
        return None;
    }
    python::check(python).err()
}
