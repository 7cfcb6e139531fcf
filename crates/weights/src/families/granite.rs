//! Granite 3 and 4.1: Llama with factors on embeddings, attention scores, residuals and logits.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys, shortest};
use super::llama::PAIRED;
use super::rope::rope;
use super::shape::{Attention, Scales, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};

pub(super) const FAMILY: Family = Family {
    title: "Granite 3, 4.1",
    architecture: "GraniteForCausalLM",
    model_type: "granite",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "granite", fits: |_| Ok(true), keys, rules: PAIRED }),
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = attention(config)?;
    let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
    let feeds = vec![config.dense()?; layers];
    let shape = config.grouped(attention, rope, vec![None; layers], feeds)?;
    Ok(Shape { scales: scales(config)?, ..shape })
}

/// Reads attention with the factor on scores that the config states.
pub(super) fn attention(config: &Config<'_>) -> Result<Attention, ModelError> {
    let scale = Some(config.real("attention_multiplier", 1.0)?);
    Ok(Attention { scale, ..config.attention(None)? })
}

pub(super) fn scales(config: &Config<'_>) -> Result<Scales, ModelError> {
    Ok(Scales {
        embeddings: config.real("embedding_multiplier", 1.0)?,
        inputs: config.real("embedding_multiplier", 1.0)?,
        residuals: config.real("residual_multiplier", 1.0)?,
        // The config's value is a divisor.
        logits: 1.0 / config.real("logits_scaling", 1.0)?,
        logit_cap: None,
    })
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = dense_keys(files)?;
    keys.extend(scale_keys(files, &keys));
    Ok(keys)
}

/// Returns the config keys of the factors. If the file does not state the factor on scores, it is
/// the usual `head_dim` to the power of -1/2.
pub(super) fn scale_keys(files: &GgufFiles, keys: &Map<String, Value>) -> Map<String, Value> {
    let head_dim = keys.get("head_dim").and_then(Value::as_f64).unwrap_or(1.0);
    let number = |key: &str, usual: f64| {
        let found = files.get(key).and_then(GgufValue::as_f64).filter(|&it| it != 0.0);
        json!(found.map_or(usual, shortest))
    };
    let found = json!({
        "attention_multiplier": number("attention.scale", head_dim.powf(-0.5)),
        "embedding_multiplier": number("embedding_scale", 1.0),
        "residual_multiplier": number("residual_scale", 1.0),
        "logits_scaling": number("logit_scale", 1.0),
    });
    found.as_object().cloned().unwrap_or_default()
}
