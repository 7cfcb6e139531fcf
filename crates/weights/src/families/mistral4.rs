//! The text part of Mistral Small 4: latent attention with a factor on queries that grows with
//! position, and softmax routing.

use serde_json::Value;

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routed, Routing};
use super::latent::decoder;
use super::rules::{Rule, Take};
use super::shape::Shape;
use crate::error::ModelError;
use crate::sizes::MOST;

const ROUTED: Routed =
    Routed { first_dense: 0, shared: 1, normalise: true, groups: 1, kept: 1, scaling: 1.0 };
const QUERY_RANK: u64 = 1024;

pub(super) const FAMILY: Family = Family {
    title: "Mistral 4",
    architecture: "Mistral4ForCausalLM",
    model_type: "mistral4",
    attention: "latent, queries that grow with their position",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: None,
    rules: STACKS,
};

/// Rules for the two tensors that stack a layer's experts.
pub(super) const STACKS: &[Rule] = &[
    Rule::new(
        "model.layers.#.mlp.experts.gate_up_proj",
        "model.layers.#.mlp.experts.@.gate_proj.weight",
        Take::EACH_EXPERT.share(0, 2),
    ),
    Rule::new(
        "model.layers.#.mlp.experts.gate_up_proj",
        "model.layers.#.mlp.experts.@.up_proj.weight",
        Take::EACH_EXPERT.share(1, 2),
    ),
    Rule::new(
        "model.layers.#.mlp.experts.down_proj",
        "model.layers.#.mlp.experts.@.down_proj.weight",
        Take::EACH_EXPERT,
    ),
];

pub(super) fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let mut values = config.values.clone();
    // `partial_rotary_factor` refers to a whole head. It is removed, because here the head size of
    // RoPE is already that of the rotated part.
    if let Some(Value::Object(rope)) = values.get_mut("rope_parameters") {
        rope.shift_remove("partial_rotary_factor");
    }
    let config = &Config { values: &values, ..*config };
    decoder(config, QUERY_RANK, &ROUTED, experts, None)
}

fn experts(config: &Config<'_>) -> Result<Experts, ModelError> {
    let number = |key| config.number_or(key, 1, MOST);
    let (groups, kept_groups) = (number("n_group")?.max(1), number("topk_group")?.max(1));
    let routing = Routing {
        groups: groups as usize,
        kept_groups: kept_groups as usize,
        // A group's score is the sum of its two best expert scores.
        best_of_group: if groups > 1 { 2 } else { 1 },
        ..Routing::SOFTMAX
    };
    ROUTED.experts(config, routing)
}
