//! Mixtral: Mistral with experts. Its GGUF files have Llama's architecture name.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::{Config, WindowRule};
use super::experts::{Experts, Routing, expert_count, experts};
use super::gguf::{GgufNames, grouped_keys, refuse_changes, required, whole};
use super::llama::PAIRED;
use super::rope::rope;
use super::rules::Rule;
use super::shape::Shape;
use crate::error::ModelError;
use crate::gguf::GgufFiles;

pub(super) const FAMILY: Family = Family {
    title: "Mixtral",
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    attention: "grouped-query",
    layers: "experts",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "llama",
        fits: |files| Ok(has_experts(files)),
        keys,
        rules: PAIRED,
    }),
    rules: RULES,
};

/// Rules for the names of experts' weights in Mixtral and MiniMax M2.
pub(super) const RULES: &[Rule] = &[
    Rule::renamed("model.layers.#.block_sparse_moe.gate.*", "model.layers.#.mlp.gate.*"),
    Rule::renamed(
        "model.layers.#.block_sparse_moe.experts.@.w1.*",
        "model.layers.#.mlp.experts.@.gate_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.block_sparse_moe.experts.@.w2.*",
        "model.layers.#.mlp.experts.@.down_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.block_sparse_moe.experts.@.w3.*",
        "model.layers.#.mlp.experts.@.up_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.block_sparse_moe.e_score_correction_bias",
        "model.layers.#.mlp.gate.e_score_correction_bias",
    ),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = config.attention(None)?;
    let (rope, windows) = (rope(config, attention.head_dim)?, config.windows(WindowRule::All)?);
    let feeds =
        config.feeds(&vec![true; windows.len()], || normalised(config, Routing::SOFTMAX))?;
    config.grouped(attention, rope, windows, feeds)
}

/// Reads experts of size `intermediate_size`. The routing weights of a token are normalised to sum
/// to 1.
pub(super) fn normalised(config: &Config<'_>, routing: Routing) -> Result<Experts, ModelError> {
    let values = config.renamed(&[("intermediate_size", "moe_intermediate_size")]);
    let config = &Config { values: &values, ..*config };
    let count = expert_count(config, &["num_local_experts", "num_experts"])?;
    Ok(Experts { normalise: true, ..experts(config, count, routing)? })
}

/// True if a GGUF file of the architecture `llama` has experts.
pub(super) fn has_experts(files: &GgufFiles) -> bool {
    matches!(whole(files, "expert_count"), Ok(Some(1..)))
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let mut keys = grouped_keys(files, false)?;
    keys.insert("num_local_experts".into(), json!(required(files, "expert_count")?));
    keys.insert("num_experts_per_tok".into(), json!(required(files, "expert_used_count")?));
    Ok(keys)
}
