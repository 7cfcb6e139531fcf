//! Decoders from repositories that also contain a tower, served without the tower.

use serde_json::{Map, Value, json};

use super::config::Config;
use super::mistral4;
use super::rules::Rule;

/// Rules for repositories whose tower is not read: they remove the decoder's prefixes and skip the
/// tower's tensors.
pub(super) const RULES: &[Rule] = &[
    Rule::spare("vision_tower.**"),
    Rule::spare("model.vision_tower.**"),
    Rule::spare("multi_modal_projector.**"),
    Rule::spare("model.multi_modal_projector.**"),
    Rule::spare("mm_projector.**"),
    Rule::spare("model.mm_projector.**"),
    Rule::renamed("language_model.model.**", "model.**"),
    Rule::renamed("model.language_model.**", "model.**"),
    Rule::renamed("language_model.lm_head.*", "lm_head.*"),
    mistral4::STACKS[0],
    mistral4::STACKS[1],
    mistral4::STACKS[2],
];

/// Returns the decoder's nested config, with two values from the outer config: the quantisation,
/// and whether the head is tied. Older configs are not nested.
pub(super) fn text_config(config: &Config<'_>) -> Map<String, Value> {
    let text = config.get("text_config").and_then(Value::as_object).cloned().unwrap_or_default();
    let mut flat: Map<String, Value> = config.values.clone();
    flat.retain(|key, _| !matches!(key.as_str(), "text_config" | "vision_config"));
    let of_whole = flat.get("tie_word_embeddings").cloned();
    flat.extend(text.into_iter().filter(|(_, value)| !value.is_null()));
    if let Some(tied) = of_whole.filter(|tied| !tied.is_null()) {
        flat.insert("tie_word_embeddings".into(), json!(tied));
    }
    flat
}
