//! Resolves the settings of the model: its names and its defaults.

use anyhow::{Result, bail};
use forebay_api::GenerationDefaults;
use forebay_server::ModelFacts;
use forebay_weights::stored_weights;
use serde::Serialize;

use crate::dialect::ChatFacts;
use crate::flags::{ServeFlags, TokenizerBackend};
use crate::model::{Model, Pooling};
use crate::sampling;

/// The model as it is served.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ModelSettings {
    pub(crate) model: String,
    pub(crate) served_model_names: Vec<String>,
    #[serde(flatten)]
    pub(crate) facts: ModelFacts,
    /// The sampling parameters for requests that omit them; null: OpenAI's defaults.
    pub(crate) sampling_defaults: GenerationDefaults,
    pub(crate) tokenizer_backend: TokenizerBackend,
    /// The chat format; null: it is not known yet, or the model has no chat format.
    pub(crate) chat: Option<ChatFacts>,
    /// The output of a pooling model.
    pub(crate) pooling: Option<Pooling>,
}

impl ModelSettings {
    pub(super) fn new(flags: &ServeFlags, model: &Model) -> Self {
        let mut served_model_names = flags.http.served_model_name.clone();
        if served_model_names.is_empty() {
            served_model_names.push(model.name.clone());
            // Clients that were set up for another engine use the model's name from the command
            // line.
            let typed = flags.model_name().filter(|&typed| typed != model.name);
            served_model_names.extend(typed.map(str::to_owned));
        }
        Self {
            model: model.name.clone(),
            served_model_names,
            facts: facts(model),
            sampling_defaults: sampling::defaults(
                &model.format,
                &model.generation_config,
                flags.loading.generation_config,
            ),
            tokenizer_backend: flags.text.tokenizer_backend,
            chat: None,
            pooling: model.pooling.clone(),
        }
    }
}

/// Facts about the model's files. Some are missing if the weights are not present, as on a
/// simulated device.
fn facts(model: &Model) -> ModelFacts {
    let stored =
        Some(&model.files).filter(|files| !files.is_empty()).map(|files| stored_weights(files));
    // Ignore the error of a faulty file here: the loader of the weights reports it.
    let stored = stored.and_then(Result::ok);
    let parameters = stored.as_ref().and_then(|stored| stored.parameters);
    let weight_type = stored.map(|stored| stored.weight_type).unwrap_or_default();
    ModelFacts::new(&model.format, &model.config, parameters, &weight_type)
}

/// The largest total number of tokens of prompt and answer.
pub(super) fn context_length(flags: &ServeFlags, model: &Model) -> Result<u32> {
    let longest = model.context_length;
    let usual = model.pooling.as_ref().and_then(|pooling| pooling.max_length);
    let default = usual.unwrap_or(longest).min(longest);
    let context_length = flags.loading.context_length.unwrap_or(default);
    if context_length > longest {
        bail!("--context-length {context_length} is more than the model was made for ({longest})");
    }
    Ok(context_length)
}
