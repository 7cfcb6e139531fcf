//! Kimi Linear: delta nets with a decay per channel (KDA), and latent attention without positional
//! encoding in every fourth layer.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Routed, with_first_dense};
use super::latent::latent;
use super::recurrence::{Recurrence, StateNorm};
use super::rules::{Rule, Take};
use super::shape::{Mixer, Shape};
use crate::error::ModelError;
use crate::sizes::MOST_HEADS;

const ROUTED: Routed =
    Routed { first_dense: 1, shared: 1, normalise: true, groups: 1, kept: 1, scaling: 2.446 };
/// The largest kernel size of the convolution.
const MOST_TAPS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "Kimi Linear",
    architecture: "KimiLinearForCausalLM",
    model_type: "kimi_linear",
    attention: "delta nets with a decay a channel, and latent without positions in some layers",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: None,
    rules: RULES,
};

const STATES: Take = Take::ALL.only(|shape, layer| shape.mixer(layer).recurrence().is_some());
const ATTENDS: Take = Take::ALL.only(|shape, layer| shape.mixer(layer).recurrence().is_none());
const QUERIES: &str = "model.layers.#.self_attn.q_proj.*";
const OUTPUTS: &str = "model.layers.#.self_attn.o_proj.*";

const RULES: &[Rule] = &[
    Rule::renamed("model.layers.#.block_sparse_moe.**", "model.layers.#.mlp.**"),
    Rule::new(QUERIES, QUERIES, ATTENDS),
    Rule::new(QUERIES, "model.layers.#.linear_attn.in_proj_q.*", STATES),
    Rule::renamed("model.layers.#.self_attn.k_proj.*", "model.layers.#.linear_attn.in_proj_k.*"),
    Rule::renamed("model.layers.#.self_attn.v_proj.*", "model.layers.#.linear_attn.in_proj_v.*"),
    Rule::renamed("model.layers.#.self_attn.b_proj.*", "model.layers.#.linear_attn.in_proj_b.*"),
    Rule::new(OUTPUTS, OUTPUTS, ATTENDS),
    Rule::new(OUTPUTS, "model.layers.#.linear_attn.out_proj.*", STATES),
    Rule::renamed("model.layers.#.self_attn.q_conv1d.*", "model.layers.#.linear_attn.conv_q.*"),
    Rule::renamed("model.layers.#.self_attn.k_conv1d.*", "model.layers.#.linear_attn.conv_k.*"),
    Rule::renamed("model.layers.#.self_attn.v_conv1d.*", "model.layers.#.linear_attn.conv_v.*"),
    Rule::renamed("model.layers.#.self_attn.f_a_proj.*", "model.layers.#.linear_attn.low_a.*"),
    Rule::renamed("model.layers.#.self_attn.f_b_proj.*", "model.layers.#.linear_attn.in_proj_a.*"),
    Rule::renamed("model.layers.#.self_attn.g_a_proj.*", "model.layers.#.linear_attn.low_z.*"),
    Rule::renamed("model.layers.#.self_attn.g_b_proj.*", "model.layers.#.linear_attn.in_proj_z.*"),
    Rule::new(
        "model.layers.#.self_attn.A_log",
        "model.layers.#.linear_attn.A_log",
        Take::ALL.flat(),
    ),
    Rule::renamed("model.layers.#.self_attn.dt_bias", "model.layers.#.linear_attn.dt_bias"),
    Rule::renamed("model.layers.#.self_attn.o_norm.*", "model.layers.#.linear_attn.norm.*"),
    Rule::renamed("model.layers.#.mlp.experts.@.w1.*", "model.layers.#.mlp.experts.@.gate_proj.*"),
    Rule::renamed("model.layers.#.mlp.experts.@.w3.*", "model.layers.#.mlp.experts.@.up_proj.*"),
    Rule::renamed("model.layers.#.mlp.experts.@.w2.*", "model.layers.#.mlp.experts.@.down_proj.*"),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = common(config);
    let config = &Config { values: &values, ..*config };
    let attends = attending_layers(config)?;
    config.only("moe_router_activation_func", &["sigmoid"])?;
    let values = with_first_dense(config)?;
    let config = &Config { values: &values, ..*config };
    let feeds = config.feeds(&ROUTED.layers(config)?, || ROUTED.corrected(config))?;
    let (latent, _) = latent(config, 0)?;
    let (latent, delta_net) = (Mixer::Latent(latent), Mixer::Recurrence(delta_net(config)?));
    let mixers = attends.iter().map(|&attends| if attends { &latent } else { &delta_net });
    let mixers = mixers.cloned().collect();
    config.decoder(mixers, vec![None; attends.len()], feeds)
}

/// Returns the config's values under our names. Configs on the hub nest the values
/// of the delta nets.
fn common(config: &Config<'_>) -> Map<String, Value> {
    let mut values = config.renamed(&[
        ("model_max_length", "max_position_embeddings"),
        ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
    ]);
    values.entry("q_lora_rank").or_insert(Value::Null);
    values.entry("rms_norm_eps").or_insert_with(|| json!(1e-5));
    if let Some(own) = config.get("linear_attn_config").and_then(Value::as_object) {
        for (from, to) in [
            ("head_dim", "linear_head_dim"),
            ("num_heads", "linear_num_heads"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        ] {
            if let Some(value) = own.get(from) {
                values.insert(to.into(), value.clone());
            }
        }
    }
    values
}

/// Returns true for each layer with attention: from the hub's list of 1-based indices, or from a
/// list of kinds, or every fourth layer.
fn attending_layers(config: &Config<'_>) -> Result<Vec<bool>, ModelError> {
    let layers = config.layer_count()?;
    let own = config.get("linear_attn_config").and_then(Value::as_object);
    let numbers = own.and_then(|own| own.get("full_attn_layers")).and_then(Value::as_array);
    if let Some(numbers) = numbers {
        let there = |layer: usize| numbers.iter().any(|it| it.as_u64() == Some(layer as u64 + 1));
        return Ok((0..layers).map(there).collect());
    }
    if let Some(kinds) = config.get("layer_types").and_then(Value::as_array) {
        return config.kinds_of_layers(kinds, "full_attention", "linear_attention");
    }
    Ok((0..layers).map(|layer| layer > 0 && layer.is_multiple_of(4)).collect())
}

fn delta_net(config: &Config<'_>) -> Result<Recurrence, ModelError> {
    config.only("hidden_act", &["silu"])?;
    let heads = config.number_or("linear_num_heads", 32, MOST_HEADS)?.max(1) as usize;
    let dim = config.number_or("linear_head_dim", 128, MOST_HEADS)?.max(1) as usize;
    Ok(Recurrence {
        heads,
        key_heads: heads,
        tiled: false,
        key_dim: dim,
        value_dim: dim,
        channel_decay: true,
        delta: true,
        taps: config.number_or("linear_conv_kernel_dim", 4, MOST_TAPS)?.max(1) as usize,
        conv_bias: false,
        bias: false,
        norm: StateNorm::BeforeGate,
        sigmoid_gate: true,
        low_rank: dim,
        norm_size: dim,
    })
}
