//! Seed-OSS: Llama with biases on queries, keys and values.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys};
use super::rope::rope;
use super::rules::Rule;
use super::shape::{Attention, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;

/// The head size, if the config does not give it.
const HEAD_DIM: u64 = 128;

pub(super) const FAMILY: Family = Family {
    title: "Seed-OSS",
    architecture: "SeedOssForCausalLM",
    model_type: "seed_oss",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "seed_oss",
        fits: |_| Ok(true),
        keys,
        // Here a tensor of this name is the norm before the feed-forward part. In Gemma's files, it
        // is the norm after the attention.
        rules: &[Rule::renamed(
            "blk.#.post_attention_norm.*",
            "model.layers.#.post_attention_layernorm.*",
        )],
    }),
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = Attention {
        qkv_bias: config.flag("qkv_bias", config.flag("attention_bias", true)),
        output_bias: config.flag("attention_out_bias", false),
        ..config.attention(Some(HEAD_DIM))?
    };
    let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
    config.grouped(attention, rope, vec![None; layers], vec![config.dense()?; layers])
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = dense_keys(files)?;
    let bias = files.tensor("blk.0.attn_output.bias").is_some();
    keys.insert("attention_out_bias".into(), json!(bias));
    Ok(keys)
}
