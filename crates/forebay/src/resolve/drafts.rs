//! The draft model: where it is served, and with which others.

use anyhow::{Result, bail};
use forebay_hand::DraftModelConfig;
use forebay_text::Tokenizer;
use serde_json::Value;

use super::device::DeviceSettings;
use crate::flags::{Device, LoadFormat, ServeFlags};
use crate::model::Model;

/// The draft model of each hand; `None`: there is none.
///
/// # Errors
/// It is not served with this model or on this device, or is of another vocabulary.
pub(super) fn resolve(
    flags: &ServeFlags,
    (model, draft): (&Model, Option<&Model>),
    device: &DeviceSettings,
) -> Result<Option<DraftModelConfig>> {
    let (Some((name, tokens)), Some(draft)) = (flags.drafts.model()?, draft) else {
        return Ok(None);
    };
    let other = |model: &Model| {
        [
            (model.called.is_some(), "that transformers' code computes"),
            (model.pooling.is_some(), "that pools"),
            (model.images.is_some(), "that takes images"),
            (model.has_states(), "with recurrent layers"),
        ]
        .into_iter()
        .find_map(|(is, what)| is.then_some(what))
    };
    let lacks = [
        (device.device == Device::Sim, "a simulated device"),
        (device.arrangement.ranks > 1 || device.arrangement.step_group(), "several ranks"),
        (device.apart, "hands on other machines"),
        (flags.adapters.is_enabled(), "adapters"),
        (flags.sparse.enable_hisparse, "--enable-hisparse"),
    ];
    if let Some((_, what)) = lacks.into_iter().find(|&(wanted, _)| wanted) {
        bail!("a draft model is not served with {what}");
    }
    if let Some(what) = other(model) {
        bail!("a draft model is not served with a model {what}");
    }
    if let Some(what) = other(draft) {
        bail!("{name}: a model {what} can't draft");
    }
    if !same_tokens(model, draft)? {
        bail!("{name}: a draft model needs the tokenizer of {}, and has another one", model.name);
    }
    let mut told = draft.told();
    if flags.loading.load_format == LoadFormat::Auto {
        told["manifest"] = draft.manifest()?;
    } else {
        told["manifest"] = Value::Null;
    }
    Ok(Some(DraftModelConfig { model: told, tokens }))
}

/// True if two models have the same tokens.
fn same_tokens(model: &Model, draft: &Model) -> Result<bool> {
    let of = |model: &Model| Tokenizer::from_file(&model.tokenizer);
    let (ours, theirs) = (of(model)?, of(draft)?);
    let count = i32::try_from(ours.vocab_size()).unwrap_or(i32::MAX);
    Ok(ours.vocab_size() == theirs.vocab_size()
        && (0..count).all(|id| ours.id_to_token(id) == theirs.id_to_token(id)))
}
