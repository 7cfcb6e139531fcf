//! Qwen2 with routed experts, and a shared expert with a gate.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::{Config, WindowRule};
use super::experts::{Experts, Routing, experts};
use super::gguf::{GgufNames, grouped_keys, refuse_changes, required, whole};
use super::qwen3_moe::sparse_layers;
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::{Attention, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::MOST;

pub(super) const FAMILY: Family = Family {
    title: "Qwen1.5-MoE, Qwen2-MoE",
    architecture: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    attention: "grouped-query",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "qwen2moe",
        fits: |_| Ok(true),
        keys,
        rules: &[Rule::new("blk.#.ffn_gate_inp_shexp.weight", GATE, Take::ALL.flat())],
    }),
    rules: RULES,
};
const GATE: &str = "model.layers.#.mlp.shared_expert_gate.weight";

/// The names of a shared expert with a gate.
pub(super) const RULES: &[Rule] = &[
    Rule::new("model.layers.#.mlp.shared_expert_gate.weight", GATE, Take::ALL.flat()),
    Rule::renamed(
        "model.layers.#.mlp.shared_expert.gate_proj.*",
        "model.layers.#.mlp.shared_experts.gate_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.mlp.shared_expert.up_proj.*",
        "model.layers.#.mlp.shared_experts.up_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.mlp.shared_expert.down_proj.*",
        "model.layers.#.mlp.shared_experts.down_proj.*",
    ),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = Attention {
        qkv_bias: config.flag("qkv_bias", true),
        output_bias: false,
        ..config.attention(None)?
    };
    let rope = rope(config, attention.head_dim)?;
    let windows = config.windows(WindowRule::Upper)?;
    let (count, sparse) = sparse_layers(config)?;
    let feeds = config.feeds(&sparse, || {
        Ok(Experts {
            shared_size: config.size("shared_expert_intermediate_size", MOST)?,
            shared_gate: true,
            ..experts(config, count, Routing::SOFTMAX)?
        })
    })?;
    config.grouped(attention, rope, windows, feeds)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let mut keys = grouped_keys(files, false)?;
    let shared = whole(files, "expert_shared_feed_forward_length")?;
    let of_experts = json!({
        "num_experts": required(files, "expert_count")?,
        "num_experts_per_tok": required(files, "expert_used_count")?,
        "moe_intermediate_size": required(files, "expert_feed_forward_length")?,
        // Older files state the shared expert's size as `feed_forward_length`.
        "shared_expert_intermediate_size":
            shared.map_or_else(|| required(files, "feed_forward_length"), Ok)?,
        "norm_topk_prob": false,
    });
    keys.extend(of_experts.as_object().cloned().unwrap_or_default());
    Ok(keys)
}
