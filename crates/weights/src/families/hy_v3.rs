//! Hy3: routed experts and a shared expert, with DeepSeek V3's routing without groups.

use super::Family;
use super::config::Config;
use super::experts::{Routed, with_first_dense};
use super::rope::rope;
use super::rules::Rule;
use super::shape::{Attention, QkNorm, Shape};
use crate::error::ModelError;

const ROUTED: Routed =
    Routed { first_dense: 1, shared: 1, normalise: true, groups: 1, kept: 1, scaling: 2.826 };

pub(super) const FAMILY: Family = Family {
    title: "Hy3",
    architecture: "HYV3ForCausalLM",
    model_type: "hy_v3",
    attention: "grouped-query",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: None,
    rules: &[
        Rule::renamed("model.layers.#.mlp.router.gate.*", "model.layers.#.mlp.gate.*"),
        Rule::renamed(
            "model.layers.#.mlp.expert_bias",
            "model.layers.#.mlp.gate.e_score_correction_bias",
        ),
        Rule::renamed(
            "model.layers.#.mlp.shared_mlp.gate_proj.*",
            "model.layers.#.mlp.shared_experts.gate_proj.*",
        ),
        Rule::renamed(
            "model.layers.#.mlp.shared_mlp.up_proj.*",
            "model.layers.#.mlp.shared_experts.up_proj.*",
        ),
        Rule::renamed(
            "model.layers.#.mlp.shared_mlp.down_proj.*",
            "model.layers.#.mlp.shared_experts.down_proj.*",
        ),
    ],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = config.renamed(&[
        ("num_shared_experts", "n_shared_experts"),
        ("router_scaling_factor", "routed_scaling_factor"),
    ]);
    let values = with_first_dense(&Config { values: &values, ..*config })?;
    let config = &Config { values: &values, ..*config };
    let attention = Attention { qk_norm: QkNorm::Heads, ..config.attention(None)? };
    let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
    let feeds = config.feeds(&ROUTED.layers(config)?, || ROUTED.corrected(config))?;
    config.grouped(attention, rope, vec![None; layers], feeds)
}
