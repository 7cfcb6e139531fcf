//! gpt-oss: windows in every second layer, attention sinks, and experts with biases, whose matrices
//! are often stored as `MXFP4`.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, expert_count, experts};
use super::gguf::{GgufNames, grouped_keys, refuse_changes, required};
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::{Activation, Attention, Mixer, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;

/// The config keys of the activation's constants, and the only values that the kernels support.
const GATES: [(&str, f64); 2] = [("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)];
/// Every second layer attends to all positions. The other layers have windows.
const CYCLE: u64 = 2;
/// The base of the rotary embedding, if the config does not state it.
const THETA: f64 = 150_000.0;

pub(super) const FAMILY: Family = Family {
    title: "gpt-oss",
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    attention: "grouped-query with sinks, windows in every second layer",
    layers: "experts",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "gpt-oss", fits: |_| Ok(true), keys, rules: GGUF_RULES }),
    rules: RULES,
};

/// In fused tensors, `gate_proj` and `up_proj` alternate. Tensors of `MXFP4` blocks alternate rows,
/// and plain tensors, which are transposed, alternate columns.
const RULES: &[Rule] = &[
    Rule::renamed("model.layers.#.mlp.router.*", "model.layers.#.mlp.gate.*"),
    Rule::new(GATE_UP, GATE, Take::EACH_EXPERT.transposed().every(0, 2)),
    Rule::new(GATE_UP, UP, Take::EACH_EXPERT.transposed().every(1, 2)),
    Rule::new("model.layers.#.mlp.experts.down_proj", DOWN, Take::EACH_EXPERT.transposed()),
    Rule::new(GATE_UP_BLOCKS, GATE, Take::EACH_EXPERT.every(0, 2)),
    Rule::new(GATE_UP_BLOCKS, UP, Take::EACH_EXPERT.every(1, 2)),
    Rule::new("model.layers.#.mlp.experts.down_proj_blocks", DOWN, Take::EACH_EXPERT),
    Rule::new(GATE_UP_BIAS, GATE_BIAS, Take::EACH_EXPERT.every(0, 2)),
    Rule::new(GATE_UP_BIAS, UP_BIAS, Take::EACH_EXPERT.every(1, 2)),
    Rule::new("model.layers.#.mlp.experts.down_proj_bias", DOWN_BIAS, Take::EACH_EXPERT),
];
const GATE_UP: &str = "model.layers.#.mlp.experts.gate_up_proj";
const GATE_UP_BLOCKS: &str = "model.layers.#.mlp.experts.gate_up_proj_blocks";
const GATE_UP_BIAS: &str = "model.layers.#.mlp.experts.gate_up_proj_bias";
const GATE: &str = "model.layers.#.mlp.experts.@.gate_proj.weight";
const UP: &str = "model.layers.#.mlp.experts.@.up_proj.weight";
const DOWN: &str = "model.layers.#.mlp.experts.@.down_proj.weight";
const GATE_BIAS: &str = "model.layers.#.mlp.experts.@.gate_proj.bias";
const UP_BIAS: &str = "model.layers.#.mlp.experts.@.up_proj.bias";
const DOWN_BIAS: &str = "model.layers.#.mlp.experts.@.down_proj.bias";

/// In GGUF files, `gate_proj` and `up_proj` are separate tensors.
const GGUF_RULES: &[Rule] = &[
    Rule::renamed("blk.#.attn_sinks.weight", "model.layers.#.self_attn.sinks"),
    Rule::renamed("blk.#.post_attention_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::new("blk.#.ffn_gate_exps.bias", GATE_BIAS, Take::EACH_EXPERT),
    Rule::new("blk.#.ffn_up_exps.bias", UP_BIAS, Take::EACH_EXPERT),
    Rule::new("blk.#.ffn_down_exps.bias", DOWN_BIAS, Take::EACH_EXPERT),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    for (key, known) in GATES {
        let found = config.real(key, known)?;
        if (found - known).abs() > 1e-6 {
            return Err(ModelError::unserved_part(&format!("{key} {found} ({known} is served)")));
        }
    }
    let mut values = config.renamed(&[("intermediate_size", "moe_intermediate_size")]);
    values.entry("attention_bias").or_insert(json!(true));
    values.entry("rope_theta").or_insert(json!(THETA));
    let config = &Config { values: &values, ..*config };
    let attention = Attention { sinks: true, ..config.attention(None)? };
    let rope = rope(config, attention.head_dim)?;
    let (windows, _) = config.cycle_of_windows(CYCLE)?;
    let count = expert_count(config, &["num_local_experts", "num_experts"])?;
    let feeds = config.feeds(&vec![true; windows.len()], || {
        // The softmax over the chosen logits equals the softmax over all logits divided by the sum
        // of its chosen values.
        Ok(Experts {
            normalise: true,
            bias: true,
            activation: Activation::ClampedSwiglu,
            ..experts(config, count, Routing::SOFTMAX)?
        })
    })?;
    let mixer = |&window: &Option<u64>| Mixer::Attention(Attention { window, ..attention });
    let ropes = vec![Some(rope); windows.len()];
    config.decoder(windows.iter().map(mixer).collect(), ropes, feeds)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let mut keys = grouped_keys(files, false)?;
    keys.extend([
        ("num_local_experts".to_owned(), json!(required(files, "expert_count")?)),
        ("num_experts_per_tok".to_owned(), json!(required(files, "expert_used_count")?)),
        ("intermediate_size".to_owned(), json!(required(files, "expert_feed_forward_length")?)),
        // GGUF files do not state this value, but all models of the family are trained with it.
        ("truncate".to_owned(), json!(false)),
    ]);
    Ok(keys)
}
