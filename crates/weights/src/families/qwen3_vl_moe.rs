//! Qwen3-VL with experts: Qwen3-VL's vision tower and a Qwen3-MoE. In checkpoints on the hub, the
//! matrices of experts are stored as `[columns, rows]`; transformers 5 stores them as
//! `[rows, columns]`.

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

/// True if the matrix has `hidden_size` rows: it is a transposed `gate_up_proj`.
fn begins_with_states(shape: &Shape, [rows, _]: [usize; 2]) -> bool {
    rows == shape.hidden_size
}

/// True if the matrix has `hidden_size` columns: it is a transposed `down_proj`.
fn ends_in_states(shape: &Shape, [_, columns]: [usize; 2]) -> bool {
    columns == shape.hidden_size
}
