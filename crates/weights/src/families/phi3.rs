//! Phi-3, Phi-4 and Phi-4-mini: fused matrices, and for long contexts a divisor per rotary
//! frequency.

use serde_json::{Map, Value};

use super::Family;
use super::config::{Config, WindowRule};
use super::gguf::{GgufNames, grouped_keys};
use super::rope::partial_rope;
use super::rules::{Rule, Take, fused_keys, fused_queries, fused_values};
use super::shape::Shape;
use crate::error::ModelError;
use crate::gguf::GgufFiles;

pub(super) const FAMILY: Family = Family {
    title: "Phi-3, Phi-4, Phi-4-mini",
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    attention: "grouped-query, in Phi-4-mini three quarters of a head rotated",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "phi3",
        fits: |_| Ok(true),
        keys,
        rules: &[
            // These two tables of rotary factors are read into the config instead.
            Rule::spare("rope_factors_long.*"),
            Rule::spare("rope_factors_short.*"),
            Rule::new("blk.#.attn_qkv.*", QUERIES, Take::ALL.rows(fused_queries)),
            Rule::new("blk.#.attn_qkv.*", KEYS, Take::ALL.rows(fused_keys)),
            Rule::new("blk.#.attn_qkv.*", VALUES, Take::ALL.rows(fused_values)),
            Rule::new("blk.#.ffn_up.*", GATE, Take::ALL.share(0, 2)),
            Rule::new("blk.#.ffn_up.*", UP, Take::ALL.share(1, 2)),
        ],
    }),
    rules: &[
        Rule::new(FUSED, QUERIES, Take::ALL.rows(fused_queries)),
        Rule::new(FUSED, KEYS, Take::ALL.rows(fused_keys)),
        Rule::new(FUSED, VALUES, Take::ALL.rows(fused_values)),
        Rule::new("model.layers.#.mlp.gate_up_proj.*", GATE, Take::ALL.share(0, 2)),
        Rule::new("model.layers.#.mlp.gate_up_proj.*", UP, Take::ALL.share(1, 2)),
    ],
};
const FUSED: &str = "model.layers.#.self_attn.qkv_proj.*";
const QUERIES: &str = "model.layers.#.self_attn.q_proj.*";
const KEYS: &str = "model.layers.#.self_attn.k_proj.*";
const VALUES: &str = "model.layers.#.self_attn.v_proj.*";
const GATE: &str = "model.layers.#.mlp.gate_proj.*";
const UP: &str = "model.layers.#.mlp.up_proj.*";

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = config.attention(None)?;
    let rope = partial_rope(config, attention.head_dim, 1.0)?;
    let windows = config.windows(WindowRule::All)?;
    let feeds = vec![config.dense()?; windows.len()];
    config.grouped(attention, rope, windows, feeds)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    grouped_keys(files, true)
}
