//! ERNIE 4.5 with experts.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::ernie4_5::with_biases;
use super::experts::{Experts, Routing, expert_count, experts};
use super::gguf::{GgufNames, grouped_keys, required, whole};
use super::llama::PAIRED;
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::Shape;
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::{MOST, MOST_LAYERS};

pub(super) const FAMILY: Family = Family {
    title: "ERNIE 4.5 MoE",
    architecture: "Ernie4_5_MoeForCausalLM",
    model_type: "ernie4_5_moe",
    attention: "grouped-query",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "ernie4_5-moe", fits: |_| Ok(true), keys, rules: PAIRED }),
    rules: &[
        // The layers for multi-token prediction.
        Rule::spare("model.mtp_block.**"),
        Rule::spare("model.mtp_emb_norm.**"),
        Rule::spare("model.mtp_hidden_norm.**"),
        Rule::spare("model.mtp_linear_proj.**"),
        super::ernie4_5::NEIGHBOURS[0],
        super::ernie4_5::NEIGHBOURS[1],
        Rule::new(
            "model.layers.#.mlp.moe_statics.e_score_correction_bias",
            "model.layers.#.mlp.gate.e_score_correction_bias",
            Take::ALL.flat(),
        ),
    ],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = with_biases(config);
    let config = &Config { values: &values, ..*config };
    let values = config.renamed(&[("moe_k", "num_experts_per_tok")]);
    let config = &Config { values: &values, ..*config };
    let attention = config.attention(None)?;
    let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
    let count = expert_count(config, &["moe_num_experts", "num_experts"])?;
    let first = config.number_or("moe_layer_start_index", 1, MOST_LAYERS)?;
    let every = config.optional("moe_layer_interval", MOST)?.unwrap_or(1);
    // -1 means the last layer.
    let last = config.get("moe_layer_end_index").and_then(Value::as_u64).unwrap_or(MOST_LAYERS);
    let is_sparse = |layer: u64| {
        count > 0 && (layer + 1).is_multiple_of(every) && (first..=last).contains(&layer)
    };
    let sparse: Vec<bool> = (0..layers as u64).map(is_sparse).collect();
    let routing = Routing { in_float32: true, corrected: true, ..Routing::SOFTMAX };
    let feeds = config.feeds(&sparse, || {
        let experts = experts(config, count, routing)?;
        let shared = config.number_or("moe_num_shared_experts", 2, MOST)? as usize;
        let shared_size = shared * experts.intermediate_size;
        Ok(Experts { normalise: true, shared_size, ..experts })
    })?;
    config.grouped(attention, rope, vec![None; layers], feeds)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = grouped_keys(files, false)?;
    let of_experts = json!({
        "moe_num_experts": required(files, "expert_count")?,
        "moe_k": required(files, "expert_used_count")?,
        "moe_intermediate_size": required(files, "expert_feed_forward_length")?,
        "moe_num_shared_experts": whole(files, "expert_shared_count")?.unwrap_or(0),
        "moe_layer_start_index": whole(files, "leading_dense_block_count")?.unwrap_or(0),
        "moe_layer_interval": whole(files, "interleave_moe_layer_step")?.unwrap_or(1),
    });
    keys.extend(of_experts.as_object().cloned().unwrap_or_default());
    Ok(keys)
}
