//! Mistral: Llama with a window in all layers.

use super::Family;
use super::config::{Config, WindowRule};
use super::gguf::{GgufNames, dense_keys};
use super::llama::PAIRED;
use super::rope::rope;
use super::shape::Shape;
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};

pub(super) const FAMILY: Family = Family {
    title: "Mistral",
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "llama",
        fits: |files| Ok(has_window(files) && !super::mixtral::has_experts(files)),
        keys: dense_keys,
        rules: PAIRED,
    }),
    rules: &[],
};

pub(super) fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = config.attention(None)?;
    let (rope, windows) = (rope(config, attention.head_dim)?, config.windows(WindowRule::All)?);
    let feeds = vec![config.dense()?; windows.len()];
    config.grouped(attention, rope, windows, feeds)
}

/// True if a GGUF file of the architecture `llama` is a Mistral.
pub(super) fn has_window(files: &GgufFiles) -> bool {
    files.get("attention.sliding_window").is_some_and(GgufValue::truthy)
}
