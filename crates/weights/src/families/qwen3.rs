//! Qwen3.

use super::Family;
use super::config::{Config, WindowRule};
use super::gguf::{GgufNames, dense_keys};
use super::rope::rope;
use super::shape::{Attention, QkNorm, Shape};
use crate::error::ModelError;

/// The head size, if the config does not state it.
const HEAD_DIM: u64 = 128;

pub(super) const FAMILY: Family = Family {
    title: "Qwen3",
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "qwen3",
        fits: |_| Ok(true),
        keys: dense_keys,
        rules: &[],
    }),
    rules: &[],
};

pub(super) fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = config.attention(Some(HEAD_DIM))?;
    let attention = Attention { qk_norm: QkNorm::Heads, ..attention };
    let rope = rope(config, attention.head_dim)?;
    let windows = config.windows(WindowRule::Upper)?;
    let feeds = vec![config.dense()?; windows.len()];
    config.grouped(attention, rope, windows, feeds)
}
