//! ERNIE 4.5: Llama with a rotary embedding that rotates neighbouring elements.

use serde_json::{Map, Value};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys};
use super::llama::PAIRED;
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::Shape;
use crate::error::ModelError;

pub(super) const FAMILY: Family = Family {
    title: "ERNIE 4.5",
    architecture: "Ernie4_5ForCausalLM",
    model_type: "ernie4_5",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "ernie4_5",
        fits: |_| Ok(true),
        keys: dense_keys,
        rules: PAIRED,
    }),
    rules: NEIGHBOURS,
};

/// Reorders the rows of queries and keys, so that RoPE on halves of a head rotates the same pairs.
pub(super) const NEIGHBOURS: &[Rule] = &[
    Rule::new(
        "model.layers.#.self_attn.q_proj.*",
        "model.layers.#.self_attn.q_proj.*",
        Take::ALL.pairs(|it| it.heads),
    ),
    Rule::new(
        "model.layers.#.self_attn.k_proj.*",
        "model.layers.#.self_attn.k_proj.*",
        Take::ALL.pairs(|it| it.kv_heads),
    ),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = with_biases(config);
    let config = &Config { values: &values, ..*config };
    let attention = config.attention(None)?;
    let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
    config.grouped(attention, rope, vec![None; layers], vec![config.dense()?; layers])
}

/// Returns the config's values with `use_bias`, the only key for biases, under the keys of all
/// projections.
pub(super) fn with_biases(config: &Config<'_>) -> Map<String, Value> {
    config.renamed(&[("use_bias", "attention_bias"), ("use_bias", "mlp_bias")])
}
