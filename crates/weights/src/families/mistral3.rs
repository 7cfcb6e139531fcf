//! Mistral Small 3, Devstral, Ministral 3 and Mistral Small 4 in repositories with a vision tower,
//! whose weights are not read.

use serde_json::Value;

use super::Family;
use super::config::Config;
use super::shape::Shape;
use super::text::{RULES, text_config};
use super::{ministral3, mistral, mistral4};
use crate::error::ModelError;

pub(super) const FAMILY: Family = Family {
    title: "Mistral Small 3 and 4, Ministral 3 (text)",
    architecture: "Mistral3ForConditionalGeneration",
    model_type: "mistral3",
    attention: "grouped-query; Small 4: latent",
    layers: "dense; Small 4: experts",
    compiled: true,
    shape,
    gguf: None,
    rules: RULES,
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let text = config.get("text_config").and_then(|text| text.get("model_type"));
    let kind = text.and_then(Value::as_str).unwrap_or("mistral");
    let values = text_config(config);
    let config = &Config { values: &values, ..*config };
    match kind {
        "mistral" => mistral::shape(config),
        "ministral3" => ministral3::shape(config),
        "mistral4" => mistral4::shape(config),
        other => Err(ModelError::unserved_part(&format!(
            "text of the model_type {other} in {}: try --model-impl transformers",
            FAMILY.architecture
        ))),
    }
}
