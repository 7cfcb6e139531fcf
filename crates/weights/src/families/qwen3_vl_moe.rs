//! Qwen3-VL with experts: a Qwen3-MoE behind the tower of Qwen3-VL.

use super::Family;
use super::qwen3_moe;
use super::qwen3_vl::with_tower;
use super::rules::{Rule, Take};

pub(super) const FAMILY: Family = Family {
    title: "Qwen3-VL MoE",
    architecture: "Qwen3VLMoeForConditionalGeneration",
    model_type: "qwen3_vl_moe",
    attention: "grouped-query, positions of three numbers; a tower with deepstack outputs",
    layers: "experts, some dense",
    compiled: false,
    shape: |config| with_tower(config, qwen3_moe::of_tower, [24, 20, 20], false),
    gguf: None,
    rules: &[
        super::qwen3_vl::RULES[0],
        Rule::new(
            "model.layers.#.mlp.experts.gate_up_proj",
            "model.layers.#.mlp.experts.@.gate_proj.weight",
            Take::EACH_EXPERT.transposed().share(0, 2),
        ),
        Rule::new(
            "model.layers.#.mlp.experts.gate_up_proj",
            "model.layers.#.mlp.experts.@.up_proj.weight",
            Take::EACH_EXPERT.transposed().share(1, 2),
        ),
        Rule::new(
            "model.layers.#.mlp.experts.down_proj",
            "model.layers.#.mlp.experts.@.down_proj.weight",
            Take::EACH_EXPERT.transposed(),
        ),
    ],
};
