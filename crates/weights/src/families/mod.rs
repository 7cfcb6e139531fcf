//! The families of decoders, one file per family: its names, how its config becomes a shape, and
//! the rules for tensor names.

mod config;
mod experts;
mod gguf;
mod latent;
mod recurrence;
mod rope;
mod rules;
mod shape;
mod table;
mod unserved;

mod cohere2;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod falcon_h1;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4_moe;
mod glm4_moe_lite;
mod glm_dsa;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod granite_moe;
mod hy_v3;
mod kimi_k25;
mod kimi_linear;
mod lfm2;
mod llama;
mod llama4;
mod minimax_m2;
mod ministral3;
mod mistral;
mod mistral3;
mod mistral4;
mod mixtral;
mod modernbert;
mod nemotron_h;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_5_vl;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod qwen3_vl_moe;
mod seed_oss;
mod smollm3;
mod text;

#[cfg(test)]
mod tests;

use std::fmt;

use serde_json::{Map, Value};

pub use experts::{ExpertScores, Experts, Routing};
pub use latent::{Indexer, KeyChoice, Latent};
pub use recurrence::{Recurrence, StateNorm};
pub use rules::{RowBlocks, Rule, Take, fused_keys, fused_queries, fused_values};
pub use shape::{
    Activation, Attention, Beside, DenseFeed, FeedShape, LayerInputs, LayerShape, Mixer, Norm,
    NormPlacement, QkNorm, QueryScale, Rope, RotarySections, Scales, Shape,
};
pub use table::{families_page, not_served_page};
pub use unserved::NOT_SERVED;

pub(crate) use config::token_ids;
pub(crate) use gguf::{COMMON as COMMON_GGUF_RULES, hf_config};
pub(crate) use rules::{TensorPart, Weight, layer_of, weights_of};

use config::Config;
use gguf::GgufNames;

use crate::error::ModelError;
use crate::vector::VectorLayer;

/// All families, in the order of the documentation.
pub const ALL: [&Family; 57] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &ministral3::FAMILY,
    &mistral3::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &phi3::FAMILY,
    &smollm3::FAMILY,
    &granite::FAMILY,
    &granite_hybrid::FAMILY,
    &seed_oss::FAMILY,
    &ernie4_5::FAMILY,
    &mixtral::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &glm4_moe::FAMILY,
    &granite_moe::FAMILY,
    &granite_moe::SHARED,
    &ernie4_5_moe::FAMILY,
    &minimax_m2::FAMILY,
    &hy_v3::FAMILY,
    &gpt_oss::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
    &deepseek_v32::FAMILY,
    &glm_dsa::FAMILY,
    &glm4_moe_lite::FAMILY,
    &kimi_k25::FAMILY,
    &mistral4::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &gemma3::TOWER,
    &gemma3::EMBEDDING,
    &gemma4::FAMILY,
    &gemma4::TEXT,
    &gemma4::UNIFIED,
    &llama4::FAMILY,
    &llama4::TEXT,
    &olmo2::FAMILY,
    &olmo2::OLMO3,
    &exaone4::FAMILY,
    &cohere2::FAMILY,
    &qwen2_5_vl::FAMILY,
    &qwen3_vl::FAMILY,
    &qwen3_vl_moe::FAMILY,
    &qwen3_next::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5::TEXT,
    &qwen3_5::MOE,
    &qwen3_5::MOE_TEXT,
    &lfm2::FAMILY,
    &lfm2::MOE,
    &nemotron_h::FAMILY,
    &falcon_h1::FAMILY,
    &kimi_linear::FAMILY,
    &modernbert::FAMILY,
    &modernbert::SCORES,
];

/// A family of decoders.
pub struct Family {
    /// The family's models, for the documentation.
    pub title: &'static str,
    /// The name in `architectures` of a `config.json`.
    pub architecture: &'static str,
    /// The `model_type` in a `config.json`. If several families share it, the first of them is
    /// used.
    pub model_type: &'static str,
    /// The family's attention, for the documentation.
    pub attention: &'static str,
    /// The kinds of the family's layers, for the documentation.
    pub layers: &'static str,
    /// True if the Rust hand's CPU kernels can compute the family.
    pub compiled: bool,
    /// Converts a `config.json` to the shape.
    pub(crate) shape: fn(&Config<'_>) -> Result<Shape, ModelError>,
    /// The family's names in GGUF files; `None`: its GGUF files are not read.
    pub(crate) gguf: Option<GgufNames>,
    /// Rules for tensor names in safetensors. Names without a rule stay unchanged.
    pub(crate) rules: &'static [Rule],
}

impl Family {
    /// The architecture name of the family's GGUF files (`general.architecture`); `None`: they are
    /// not read.
    #[must_use]
    pub fn gguf_architecture(&self) -> Option<&'static str> {
        self.gguf.as_ref().map(|names| names.architecture)
    }

    /// True if this name in `architectures` belongs to the family. A checkpoint without a head has
    /// the name of the body, such as `LlamaModel`.
    fn is_named(&self, name: &str) -> bool {
        name == self.architecture
            // transformers writes some names with underscores that repositories on the hub lack.
            || name.replace('_', "") == self.architecture
            || name
                .strip_suffix("Model")
                .is_some_and(|body| self.architecture.strip_suffix("ForCausalLM") == Some(body))
    }

    /// Finds the family of a `config.json`. If it has no `architectures`, `model_type` is used.
    fn find(config: &Map<String, Value>) -> Result<&'static Self, ModelError> {
        let names = config.get("architectures").and_then(Value::as_array);
        let names: Vec<&str> = names.into_iter().flatten().filter_map(Value::as_str).collect();
        let model_type = config.get("model_type").and_then(Value::as_str);
        let by_name = |family: &&Self| names.iter().any(|name| family.is_named(name));
        let by_type = |family: &&Self| names.is_empty() && model_type == Some(family.model_type);
        let found = ALL.iter().copied().find(|it| by_name(it) || by_type(it));
        found.ok_or_else(|| match (names.first(), model_type) {
            (Some(name), _) => ModelError::unserved_architecture(name),
            (None, Some(name)) => {
                ModelError::unserved_architecture(&format!("of model_type {name}"))
            }
            (None, None) => ModelError::broken(
                "the model's config has neither 'architectures' nor 'model_type'",
            ),
        })
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.architecture == other.architecture
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.architecture)
    }
}

/// Serialises a family as the name of its architecture.
mod by_name {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{ALL, Family};

    pub(super) fn serialize<S: Serializer>(family: &Family, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(family.architecture)
    }

    pub(super) fn deserialize<'de, D>(from: D) -> Result<&'static Family, D::Error>
    where
        D: Deserializer<'de>,
    {
        let name = String::deserialize(from)?;
        let found = ALL.into_iter().find(|family| family.architecture == name);
        found.ok_or_else(|| D::Error::custom(format!("no family has the architecture {name}")))
    }
}

/// Returns the layers after pooling that compute `labels` scores; `None`: the family has no such
/// layers.
pub(crate) fn score_layers(
    config: &Map<String, Value>,
    family: &Family,
    labels: usize,
) -> Option<Result<Vec<VectorLayer>, ModelError>> {
    (*family == modernbert::SCORES).then(|| modernbert::score_layers(config, labels))
}

impl Shape {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// No family has the config's name, or the config lacks a needed value.
    pub fn from_config(config: &Map<String, Value>) -> Result<Self, ModelError> {
        let family = Family::find(config)?;
        (family.shape)(&Config { family, values: config })
    }
}
