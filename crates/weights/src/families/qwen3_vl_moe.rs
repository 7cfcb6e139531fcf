//! Qwen3-VL with experts: a Qwen3-MoE behind the tower of Qwen3-VL. Stacks of experts have columns
//! first on the hub, and rows first as transformers 5 saves them.

use super::Family;
use super::qwen3_moe;
use super::qwen3_vl::with_tower;
use super::rules::{Rule, Take};
use super::shape::Shape;
use crate::vision::TowerKind;

pub(super) const FAMILY: Family = Family {
    title: "Qwen3-VL MoE",
    architecture: "Qwen3VLMoeForConditionalGeneration",
    model_type: "qwen3_vl_moe",
    attention: "grouped-query, positions of three numbers; a tower with deepstack outputs",
    layers: "experts, some dense",
    compiled: false,
    shape: |config| with_tower(config, qwen3_moe::of_tower, [24, 20, 20], TowerKind::Table),
    gguf: None,
    rules: &[
        super::qwen3_vl::RULES[0],
        super::qwen3_vl::RULES[1],
        Rule::new(
            "model.layers.#.mlp.experts.gate_up_proj",
            "model.layers.#.mlp.experts.@.gate_proj.weight",
            IN.share(0, 2),
        ),
        Rule::new(
            "model.layers.#.mlp.experts.gate_up_proj",
            "model.layers.#.mlp.experts.@.up_proj.weight",
            IN.share(1, 2),
        ),
        Rule::new(
            "model.layers.#.mlp.experts.down_proj",
            "model.layers.#.mlp.experts.@.down_proj.weight",
            Take::EACH_EXPERT.transposed_where(ends_in_states),
        ),
    ],
};

const IN: Take = Take::EACH_EXPERT.transposed_where(begins_with_states);

/// True if rows of a matrix are as many as a state has, which is the input of the first product.
fn begins_with_states(shape: &Shape, [rows, _]: [usize; 2]) -> bool {
    rows == shape.hidden_size
}

/// True if columns of a matrix are as many as a state has, which is the output of the second
/// product.
fn ends_in_states(shape: &Shape, [_, columns]: [usize; 2]) -> bool {
    columns == shape.hidden_size
}
