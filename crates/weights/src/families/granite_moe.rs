//! Granite 3 with experts, without and with a shared expert.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, expert_count, experts};
use super::gguf::{GgufNames, grouped_keys, required, whole};
use super::granite::{attention, scale_keys, scales};
use super::llama::PAIRED;
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::Shape;
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::MOST;

pub(super) const FAMILY: Family = Family {
    title: "Granite 3 MoE",
    architecture: "GraniteMoeForCausalLM",
    model_type: "granitemoe",
    attention: "grouped-query",
    layers: "experts",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "granitemoe",
        fits: |files| Ok(!has_shared(files)),
        keys,
        rules: PAIRED,
    }),
    rules: RULES,
};

pub(super) const SHARED: Family = Family {
    title: "Granite 3 MoE with a shared expert",
    architecture: "GraniteMoeSharedForCausalLM",
    model_type: "granitemoeshared",
    gguf: Some(GgufNames {
        architecture: "granitemoe",
        fits: |files| Ok(has_shared(files)),
        keys,
        rules: PAIRED,
    }),
    ..FAMILY
};

pub(super) const RULES: &[Rule] = &[
    Rule::renamed("model.layers.#.block_sparse_moe.router.layer.*", "model.layers.#.mlp.gate.*"),
    Rule::new(INPUT, "model.layers.#.mlp.experts.@.gate_proj.*", Take::EACH_EXPERT.share(0, 2)),
    Rule::new(INPUT, "model.layers.#.mlp.experts.@.up_proj.*", Take::EACH_EXPERT.share(1, 2)),
    Rule::new(OUTPUT, "model.layers.#.mlp.experts.@.down_proj.*", Take::EACH_EXPERT),
    Rule::new(SHARED_IN, "model.layers.#.mlp.shared_experts.gate_proj.*", Take::ALL.share(0, 2)),
    Rule::new(SHARED_IN, "model.layers.#.mlp.shared_experts.up_proj.*", Take::ALL.share(1, 2)),
    Rule::renamed(
        "model.layers.#.shared_mlp.output_linear.*",
        "model.layers.#.mlp.shared_experts.down_proj.*",
    ),
];
const INPUT: &str = "model.layers.#.block_sparse_moe.input_linear.*";
const OUTPUT: &str = "model.layers.#.block_sparse_moe.output_linear.*";
const SHARED_IN: &str = "model.layers.#.shared_mlp.input_linear.*";
const SHARED_LENGTH: &str = "expert_shared_feed_forward_length";

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = config.renamed(&[("intermediate_size", "moe_intermediate_size")]);
    let config = &Config { values: &values, ..*config };
    let attention = attention(config)?;
    let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
    let count = expert_count(config, &["num_local_experts"])?;
    let feeds = config.feeds(&vec![true; layers], || {
        // The softmax over the chosen logits equals the softmax over all logits divided by the sum
        // of its chosen values.
        Ok(Experts {
            normalise: true,
            shared_size: config.number_or("shared_intermediate_size", 0, MOST)? as usize,
            ..experts(config, count, Routing::SOFTMAX)?
        })
    })?;
    let shape = config.grouped(attention, rope, vec![None; layers], feeds)?;
    Ok(Shape { scales: scales(config)?, ..shape })
}

fn has_shared(files: &GgufFiles) -> bool {
    files.tensor("blk.0.ffn_up_shexp.weight").is_some()
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = grouped_keys(files, false)?;
    keys.extend(scale_keys(files, &keys));
    keys.insert("num_local_experts".into(), json!(required(files, "expert_count")?));
    keys.insert("num_experts_per_tok".into(), json!(required(files, "expert_used_count")?));
    let shared = if has_shared(files) { whole(files, SHARED_LENGTH)? } else { None };
    keys.insert("shared_intermediate_size".into(), json!(shared.unwrap_or(0)));
    Ok(keys)
}
