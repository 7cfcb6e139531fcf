//! Qwen3-Next: gated delta nets, and gated attention in every fourth layer.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, experts};
use super::gguf::{GgufNames, changes, grouped_keys, refuse_changes, required, whole};
use super::qwen3_moe::sparse_layers;
use super::recurrence::{self, DECAYS, Recurrence, StateNorm, grouped};
use super::rope::partial_rope;
use super::rules::{RowBlocks, Rule, Take};
use super::shape::{Attention, FeedShape, Mixer, Norm, QkNorm, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS};

/// The fraction of a head that RoPE rotates, if the config does not state it.
const ROTATED: f64 = 0.25;
/// Every fourth layer has attention, if the config does not list the layers' kinds.
const CYCLE: u64 = 4;
/// The largest kernel size of the convolution.
const MOST_TAPS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "Qwen3-Next",
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    attention: "gated delta nets, and grouped-query with a gate in every fourth layer",
    layers: "experts, some dense",
    compiled: true,
    shape: |config| shape(config, true),
    gguf: Some(GgufNames {
        architecture: "qwen3next",
        fits: |_| Ok(true),
        keys: |files| keys(files, false),
        rules: GGUF_RULES,
    }),
    rules: &RULES,
};

/// The rules of [`COMMON`], and rules for fused projections whose rows are grouped by key head.
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

/// Rules shared by Qwen3-Next and Qwen3.5. Norm weights are stored as differences from 1, except
/// for the output norm of delta nets. Layers for multi-token prediction have separate names.
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

const GGUF_QUERIES: &str = "blk.#.attn_q.*";
const GGUF_QKV: &str = "blk.#.attn_qkv.weight";
const GGUF_QKVZ: &str = "blk.#.ssm_in.weight";
const GGUF_BA: &str = "blk.#.ssm_ba.weight";
const GGUF_CONV: &str = "blk.#.ssm_conv1d.weight";

/// The rules for GGUF files, which store norm weights with the 1 added, and decays without the
/// logarithm. The first Qwen3-Next files have the same fused projections as the safetensors.
pub(super) const GGUF_RULES: &[Rule] = &[
    Rule::renamed("blk.#.post_attention_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::new(GGUF_QUERIES, "model.layers.#.self_attn.q_proj.*", blocks(|mixer| halves(mixer, 0))),
    Rule::new(GGUF_QUERIES, "model.layers.#.self_attn.g_proj.*", blocks(|mixer| halves(mixer, 1))),
    Rule::new(GGUF_QKV, "model.layers.#.linear_attn.in_proj_q.weight", blocks(recurrence::queries)),
    Rule::new(GGUF_QKV, "model.layers.#.linear_attn.in_proj_k.weight", blocks(recurrence::keys)),
    Rule::new(GGUF_QKV, "model.layers.#.linear_attn.in_proj_v.weight", blocks(recurrence::values)),
    Rule::renamed("blk.#.attn_gate.*", "model.layers.#.linear_attn.in_proj_z.*"),
    Rule::new(GGUF_QKVZ, "model.layers.#.linear_attn.in_proj_q.weight", blocks(grouped::queries)),
    Rule::new(GGUF_QKVZ, "model.layers.#.linear_attn.in_proj_k.weight", blocks(grouped::keys)),
    Rule::new(GGUF_QKVZ, "model.layers.#.linear_attn.in_proj_v.weight", blocks(grouped::values)),
    Rule::new(GGUF_QKVZ, "model.layers.#.linear_attn.in_proj_z.weight", blocks(grouped::gates)),
    Rule::new(GGUF_BA, "model.layers.#.linear_attn.in_proj_b.weight", blocks(grouped::strengths)),
    Rule::new(GGUF_BA, "model.layers.#.linear_attn.in_proj_a.weight", blocks(grouped::decays)),
    Rule::renamed("blk.#.ssm_beta.*", "model.layers.#.linear_attn.in_proj_b.*"),
    Rule::renamed("blk.#.ssm_alpha.*", "model.layers.#.linear_attn.in_proj_a.*"),
    Rule::new(GGUF_CONV, "model.layers.#.linear_attn.conv_q.weight", blocks(recurrence::queries)),
    Rule::new(GGUF_CONV, "model.layers.#.linear_attn.conv_k.weight", blocks(recurrence::keys)),
    Rule::new(GGUF_CONV, "model.layers.#.linear_attn.conv_v.weight", blocks(recurrence::values)),
    Rule::new("blk.#.ssm_a", "model.layers.#.linear_attn.A_log", DECAYS),
    Rule::renamed("blk.#.ssm_dt.bias", "model.layers.#.linear_attn.dt_bias"),
    Rule::renamed("blk.#.ssm_norm.*", "model.layers.#.linear_attn.norm.*"),
    Rule::renamed("blk.#.ssm_out.*", "model.layers.#.linear_attn.out_proj.*"),
    Rule::new(
        "blk.#.ffn_gate_inp_shexp.weight",
        "model.layers.#.mlp.shared_expert_gate.weight",
        Take::ALL.flat(),
    ),
];

const fn norm(name: &'static str) -> Rule {
    Rule::new(name, name, Take::ALL.plus(1.0))
}

const fn blocks(found: fn(&Mixer) -> Option<RowBlocks>) -> Take {
    Take::ALL.blocks(found)
}

/// Rows of the queries (`number` 0) or of the gates (1) in each head of the fused projection.
fn halves(mixer: &Mixer, number: usize) -> Option<RowBlocks> {
    let Mixer::Attention(Attention { heads, head_dim, .. }) = *mixer else { return None };
    let first = number * head_dim;
    Some(RowBlocks { first, width: head_dim, step: 2 * head_dim, count: heads })
}

/// Reads the shape. `sparse` is true if most layers have experts.
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

/// Returns true for each layer with attention.
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
        tiled: config.flag("linear_tiled_heads", false),
        key_dim: config.size("linear_key_head_dim", MOST_HEADS)?,
        value_dim,
        channel_decay: false,
        delta: true,
        taps: config.size("linear_conv_kernel_dim", MOST_TAPS)?,
        conv_bias: false,
        bias: false,
        norm: StateNorm::BeforeGate,
        sigmoid_gate: false,
        low_rank: 0,
        norm_size: value_dim,
    })
}

/// Returns the config keys of a GGUF file. `tiled` is true if consecutive value heads belong to
/// different key heads.
pub(super) fn keys(files: &GgufFiles, tiled: bool) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let mut keys = grouped_keys(files, true)?;
    let heads = required(files, "ssm.time_step_rank")?;
    let of_states = json!({
        "full_attention_interval": whole(files, "full_attention_interval")?.unwrap_or(CYCLE as i64),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": required(files, "ssm.group_count")?,
        "linear_key_head_dim": required(files, "ssm.state_size")?,
        "linear_value_head_dim": required(files, "ssm.inner_size")? / heads.max(1),
        "linear_conv_kernel_dim": required(files, "ssm.conv_kernel")?,
        "linear_tiled_heads": tiled,
    });
    keys.extend(of_states.as_object().cloned().unwrap_or_default());
    if whole(files, "expert_count")?.unwrap_or(0) > 0 {
        if files.get("expert_weights_scale").is_some_and(changes) {
            return Err(ModelError::unserved_part("weights of experts with a scale"));
        }
        let normalise = files.get("expert_weights_norm").is_none_or(GgufValue::truthy);
        let of_experts = json!({
            "num_experts": required(files, "expert_count")?,
            "num_experts_per_tok": required(files, "expert_used_count")?,
            "moe_intermediate_size": required(files, "expert_feed_forward_length")?,
            "shared_expert_intermediate_size":
                required(files, "expert_shared_feed_forward_length")?,
            "norm_topk_prob": normalise,
        });
        keys.extend(of_experts.as_object().cloned().unwrap_or_default());
    }
    Ok(keys)
}
