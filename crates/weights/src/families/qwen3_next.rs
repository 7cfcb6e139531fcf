//! Qwen3-Next: gated delta nets, and gated attention in every fourth layer.

use serde_json::Value;

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, experts};
use super::qwen3_moe::sparse_layers;
use super::recurrence::{self, Recurrence, StateNorm, grouped};
use super::rope::partial_rope;
use super::rules::{RowBlocks, Rule, Take};
use super::shape::{Attention, FeedShape, Mixer, Norm, QkNorm, Shape};
use crate::error::ModelError;
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS};

/// The part of a head that a config rotates which does not say it.
const ROTATED: f64 = 0.25;
/// One of so many layers has attention, in a config that does not say it.
const CYCLE: u64 = 4;
/// The largest number of taps.
const MOST_TAPS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "Qwen3-Next",
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    attention: "gated delta nets, and grouped-query with a gate in every fourth layer",
    layers: "experts, some dense",
    compiled: false,
    shape: |config| shape(config, true),
    gguf: None,
    rules: &RULES,
};

/// The rules of projections that are fused for each key head, and those of [`COMMON`].
const RULES: [Rule; 6 + COMMON.len()] = super::rules::joined(
    &[
        Rule::new(QKVZ, "model.layers.#.linear_attn.in_proj_q.weight", blocks(grouped::queries)),
        Rule::new(QKVZ, "model.layers.#.linear_attn.in_proj_k.weight", blocks(grouped::keys)),
        Rule::new(QKVZ, "model.layers.#.linear_attn.in_proj_v.weight", blocks(grouped::values)),
        Rule::new(QKVZ, "model.layers.#.linear_attn.in_proj_z.weight", blocks(grouped::gates)),
        Rule::new(BA, "model.layers.#.linear_attn.in_proj_b.weight", blocks(grouped::strengths)),
        Rule::new(BA, "model.layers.#.linear_attn.in_proj_a.weight", blocks(grouped::decays)),
    ],
    COMMON,
);
const QKVZ: &str = "model.layers.#.linear_attn.in_proj_qkvz.weight";
const BA: &str = "model.layers.#.linear_attn.in_proj_ba.weight";
const CONV: &str = "model.layers.#.linear_attn.conv1d.weight";
const QUERIES: &str = "model.layers.#.self_attn.q_proj.*";
const STACK: &str = "model.layers.#.mlp.experts.gate_up_proj";

/// The rules that these models share. Weights of norms are distances from 1, but for that of a
/// state's output. Layers that predict further tokens have names of their own.
pub(super) const COMMON: &[Rule] = &[
    Rule::spare("mtp.**"),
    norm("model.norm.weight"),
    norm("model.layers.#.input_layernorm.weight"),
    norm("model.layers.#.post_attention_layernorm.weight"),
    norm("model.layers.#.self_attn.q_norm.weight"),
    norm("model.layers.#.self_attn.k_norm.weight"),
    Rule::new(QUERIES, QUERIES, blocks(|mixer| halves(mixer, 0))),
    Rule::new(QUERIES, "model.layers.#.self_attn.g_proj.*", blocks(|mixer| halves(mixer, 1))),
    Rule::new(CONV, "model.layers.#.linear_attn.conv_q.weight", blocks(recurrence::queries)),
    Rule::new(CONV, "model.layers.#.linear_attn.conv_k.weight", blocks(recurrence::keys)),
    Rule::new(CONV, "model.layers.#.linear_attn.conv_v.weight", blocks(recurrence::values)),
    Rule::new(
        STACK,
        "model.layers.#.mlp.experts.@.gate_proj.weight",
        Take::EACH_EXPERT.share(0, 2),
    ),
    Rule::new(STACK, "model.layers.#.mlp.experts.@.up_proj.weight", Take::EACH_EXPERT.share(1, 2)),
    Rule::new(
        "model.layers.#.mlp.experts.down_proj",
        "model.layers.#.mlp.experts.@.down_proj.weight",
        Take::EACH_EXPERT,
    ),
    super::qwen2_moe::RULES[0],
    super::qwen2_moe::RULES[1],
    super::qwen2_moe::RULES[2],
    super::qwen2_moe::RULES[3],
];

const fn norm(name: &'static str) -> Rule {
    Rule::new(name, name, Take::ALL.plus(1.0))
}

const fn blocks(found: fn(&Mixer) -> Option<RowBlocks>) -> Take {
    Take::ALL.blocks(found)
}

/// The queries of each head, or the gates behind them.
fn halves(mixer: &Mixer, number: usize) -> Option<RowBlocks> {
    let Mixer::Attention(Attention { heads, head_dim, .. }) = *mixer else { return None };
    let first = number * head_dim;
    Some(RowBlocks { first, width: head_dim, step: 2 * head_dim, count: heads })
}

/// The shape. `sparse` is true if most layers have experts.
pub(super) fn shape(config: &Config<'_>, sparse: bool) -> Result<Shape, ModelError> {
    let attention =
        Attention { qk_norm: QkNorm::Heads, gate: true, ..config.attention(Some(256))? };
    let rope = partial_rope(config, attention.head_dim, ROTATED)?;
    let attends = attending_layers(config)?;
    let feeds: Vec<FeedShape> = if sparse {
        let (count, sparse) = sparse_layers(config)?;
        config.feeds(&sparse, || {
            Ok(Experts {
                shared_size: config.size("shared_expert_intermediate_size", MOST)?,
                shared_gate: true,
                normalise: config.flag("norm_topk_prob", true),
                ..experts(config, count, Routing::SOFTMAX)?
            })
        })?
    } else {
        vec![config.dense()?; attends.len()]
    };
    let delta_net = Mixer::Recurrence(delta_net(config)?);
    let attention = Mixer::Attention(attention);
    let mixers = attends.iter().map(|&attends| if attends { &attention } else { &delta_net });
    let mixers = mixers.cloned().collect();
    let ropes = attends.iter().map(|&attends| attends.then(|| rope.clone())).collect();
    let shape = config.decoder(mixers, ropes, feeds)?;
    Ok(Shape { norm: Norm::RmsBesideOne, ..shape })
}

/// True for each layer that attends.
fn attending_layers(config: &Config<'_>) -> Result<Vec<bool>, ModelError> {
    let layers = config.layer_count()?;
    let cycle = config.optional("full_attention_interval", MOST_LAYERS)?.unwrap_or(CYCLE);
    let Some(kinds) = config.get("layer_types").and_then(Value::as_array) else {
        return Ok((1..=layers as u64).map(|layer| layer.is_multiple_of(cycle)).collect());
    };
    config.kinds_of_layers(kinds, "full_attention", "linear_attention")
}

fn delta_net(config: &Config<'_>) -> Result<Recurrence, ModelError> {
    let heads = config.size("linear_num_value_heads", MOST_HEADS)?;
    let key_heads = config.size("linear_num_key_heads", MOST_HEADS)?;
    if !heads.is_multiple_of(key_heads) {
        return Err(ModelError::broken(format!(
            "{heads} value heads (linear_num_value_heads) can't share {key_heads} key heads \
             (linear_num_key_heads) equally"
        )));
    }
    config.only("hidden_act", &["silu"])?;
    let value_dim = config.size("linear_value_head_dim", MOST_HEADS)?;
    Ok(Recurrence {
        heads,
        key_heads,
        key_dim: config.size("linear_key_head_dim", MOST_HEADS)?,
        value_dim,
        channel_decay: false,
        delta: true,
        taps: config.size("linear_conv_kernel_dim", MOST_TAPS)?,
        conv_bias: false,
        bias: false,
        norm: StateNorm::BeforeGate,
        norm_size: value_dim,
    })
}
