//! Qwen2 and Qwen2.5.

use super::Family;
use super::config::{Config, WindowRule};
use super::gguf::{GgufNames, dense_keys};
use super::rope::rope;
use super::shape::{Attention, Shape};
use crate::error::ModelError;

pub(super) const FAMILY: Family = Family {
    title: "Qwen2, Qwen2.5",
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "qwen2",
        fits: |_| Ok(true),
        keys: dense_keys,
        rules: &[],
    }),
    rules: &[],
};

pub(super) fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    // Queries, keys and values always have biases. The config does not mention them.
    let attention = Attention {
        qkv_bias: config.flag("qkv_bias", true),
        output_bias: false,
        ..config.attention(None)?
    };
    let rope = rope(config, attention.head_dim)?;
    let windows = config.windows(WindowRule::Upper)?;
    let feeds = vec![config.dense()?; windows.len()];
    config.grouped(attention, rope, windows, feeds)
}
