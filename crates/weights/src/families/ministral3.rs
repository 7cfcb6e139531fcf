//! The text part of Ministral 3: Mistral with a factor on queries that grows with position.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys};
use super::llama::PAIRED;
use super::rope::query_scale;
use super::shape::{Mixer, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};

pub(super) const FAMILY: Family = Family {
    title: "Ministral 3",
    architecture: "Ministral3ForCausalLM",
    model_type: "ministral3",
    attention: "grouped-query, queries that grow with their position",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "mistral3", fits: |_| Ok(true), keys, rules: PAIRED }),
    rules: &[],
};

pub(super) fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let mut shape = super::mistral::shape(config)?;
    let scale = query_scale(config)?;
    for mixer in &mut shape.mixers {
        if let Mixer::Attention(attention) = mixer {
            attention.query_scale = scale;
        }
    }
    Ok(shape)
}

/// Returns the config keys of a GGUF file. `hf_config` moves `llama_4_scaling_beta` to the RoPE
/// parameters.
fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = dense_keys(files)?;
    let beta = files.get("attention.temperature_scale").and_then(GgufValue::as_f64);
    let beta = beta.filter(|&beta| beta != 0.0).map(super::gguf::shortest);
    keys.insert("llama_4_scaling_beta".into(), json!(beta));
    Ok(keys)
}
