//! Resolves drafts from text, and the drafts that the hand computes with a draft model or head:
//! where they are supported, and with which other features.

use std::path::Path;

use anyhow::{Context, Result, bail};
use forebay_engine::DraftConfig;
use forebay_hand::DraftModelConfig;
use forebay_text::Tokenizer;
use forebay_weights::{DraftHead, ModelShape};
use serde_json::Value;

use super::device::DeviceSettings;
use crate::flags::{Device, Hand, HandDrafts, LoadFormat, ServeFlags};
use crate::hands::Chosen;
use crate::model::{Model, Source, fetch, fetch_part};

/// A source of drafts that the hand runs beside the model.
#[derive(Debug)]
pub(crate) enum Drafter {
    /// A draft model.
    Model(Box<Model>),
    /// A draft head, as the hand's configuration describes it.
    Head(Value),
}

impl Drafter {
    /// Finds the source of the drafts that the hand computes; `None`: it computes none. Without
    /// `weights`, no files need to be present.
    pub(crate) fn find(
        flags: &ServeFlags,
        python: &Path,
        model: &Model,
        weights: bool,
    ) -> Result<Option<Self>> {
        let Some((named, _)) = flags.drafts.of_hand()? else { return Ok(None) };
        let source =
            Source { revision: None, embedding: false, text_alone: true, ..flags.source() };
        if let HandDrafts::Model(name) = named {
            let draft = fetch(python, name, source, weights, Hand::Torch)?;
            return Ok(Some(Self::Model(Box::new(draft))));
        }
        if let Some(why) = other_kind(model) {
            bail!("draft heads are not supported for a model {why}");
        }
        let target = model.shape.as_ref().and_then(ModelShape::decoder);
        let Some(target) = target else { bail!("draft heads need a decoder model") };
        let head = match named {
            HandDrafts::Eagle3(name) => {
                let folder = fetch_part(python, name, source, weights)?;
                let head = DraftHead::eagle3(&folder, target, weights);
                head.with_context(|| format!("the head {name} is not available"))?
            }
            _ if model.format != "safetensors" => {
                bail!(
                    "an MTP layer can only be read from safetensors, and {} has another format",
                    model.name
                )
            }
            _ => {
                let files = if weights { &model.files[..] } else { &[] };
                let head = DraftHead::mtp(&model.config, files, target);
                head.with_context(|| format!("{} has no usable MTP layer", model.name))?
            }
        };
        Ok(Some(Self::Head(head.told())))
    }
}

/// The settings of drafts from text; `None`: they are off.
///
/// # Errors
/// Another feature excludes them, or a flag sets a parameter of drafts that are off.
pub(super) fn from_text(
    flags: &ServeFlags,
    model: &Model,
    device: &DeviceSettings,
    choice: &Chosen,
) -> Result<Option<DraftConfig>> {
    let excluded = [
        (flags.sparse.enable_hisparse, "--enable-hisparse: sparse rows have one position"),
        (device.arrangement.step_group(), "--enable-dp-attention: the ranks of a step plan alone"),
    ];
    let excluded = excluded.into_iter().find(|&(wanted, _)| wanted);
    let verifies = model.images.is_none() && !model.has_states();
    // Drafts are on by default only where measurements showed that they cost nothing: with these
    // hands and models.
    let usual = choice.hand == "rust" && !device.apart && verifies && excluded.is_none();
    let drafts = flags.drafts.engine(usual)?;
    if let (Some((_, why)), true) = (excluded, drafts.is_some()) {
        bail!("{why}, so speculation has to be off");
    }
    Ok(drafts.filter(|_| model.pooling.is_none()))
}

/// The settings of the drafts that the hand computes; `None`: it computes none.
///
/// # Errors
/// The model or the device does not support them, or their vocabulary differs.
pub(super) fn resolve(
    flags: &ServeFlags,
    (model, drafter): (&Model, Option<&Drafter>),
    device: &DeviceSettings,
) -> Result<Option<DraftModelConfig>> {
    let (Some((_, tokens)), Some(drafter)) = (flags.drafts.of_hand()?, drafter) else {
        return Ok(None);
    };
    let what = match drafter {
        Drafter::Model(_) => "a draft model is",
        Drafter::Head(_) => "draft heads are",
    };
    let lacks = [
        (device.device == Device::Sim, "a simulated device"),
        (device.arrangement.ranks > 1 || device.arrangement.step_group(), "several ranks"),
        (device.apart, "hands on other machines"),
        (flags.adapters.is_enabled(), "adapters"),
        (flags.sparse.enable_hisparse, "--enable-hisparse"),
    ];
    if let Some((_, other)) = lacks.into_iter().find(|&(wanted, _)| wanted) {
        bail!("{what} not served with {other}");
    }
    if let Some(why) = other_kind(model) {
        bail!("{what} not served with a model {why}");
    }
    let told = match drafter {
        Drafter::Head(told) => told.clone(),
        Drafter::Model(draft) => of_model(flags, model, draft)?,
    };
    Ok(Some(DraftModelConfig { model: told, tokens }))
}

/// The hand's configuration for a draft model.
fn of_model(flags: &ServeFlags, model: &Model, draft: &Model) -> Result<Value> {
    let name = &draft.name;
    if let Some(why) = other_kind(draft) {
        bail!("{name}: a model {why} can't draft");
    }
    if !same_tokens(model, draft)? {
        bail!("{name}: a draft model needs the tokenizer of {}, and has another one", model.name);
    }
    let mut told = draft.told();
    told["manifest"] = match flags.loading.load_format {
        LoadFormat::Auto => draft.manifest()?,
        LoadFormat::Dummy => Value::Null,
    };
    Ok(told)
}

/// Why this kind of model can't use drafts that the hand computes, or be a draft model; `None`: it
/// can.
fn other_kind(model: &Model) -> Option<&'static str> {
    [
        (model.called.is_some(), "that transformers' code computes"),
        (model.pooling.is_some(), "that pools"),
        (model.images.is_some(), "that takes images"),
        (model.has_states(), "with recurrent layers"),
    ]
    .into_iter()
    .find_map(|(is, what)| is.then_some(what))
}

/// True if two models have the same vocabulary.
fn same_tokens(model: &Model, draft: &Model) -> Result<bool> {
    let of = |model: &Model| Tokenizer::from_file(&model.tokenizer);
    let (ours, theirs) = (of(model)?, of(draft)?);
    let count = i32::try_from(ours.vocab_size()).unwrap_or(i32::MAX);
    Ok(ours.vocab_size() == theirs.vocab_size()
        && (0..count).all(|id| ours.id_to_token(id) == theirs.id_to_token(id)))
}
