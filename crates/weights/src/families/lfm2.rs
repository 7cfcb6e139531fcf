//! LFM2: short convolutions between two gates, and attention in some layers.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, experts};
use super::gguf::{GgufNames, kinds_of_layers, required, scores};
use super::recurrence::{Recurrence, mamba};
use super::rope::rope;
use super::rules::{RowBlocks, Rule, Take};
use super::shape::{Attention, Mixer, QkNorm, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::{MOST, MOST_LAYERS};

/// Defaults for missing config keys.
const TAPS: u64 = 3;
const THETA: f64 = 1_000_000.0;
const EPS: f64 = 1e-5;
/// The largest kernel size of the convolution.
const MOST_TAPS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "LFM2, LFM2.5",
    architecture: "Lfm2ForCausalLM",
    model_type: "lfm2",
    attention: "short convolutions, and grouped-query in some layers",
    layers: "dense",
    compiled: true,
    shape: |config| {
        let mut values = common(config);
        values.insert("intermediate_size".into(), json!(intermediate_size(config)?));
        let config = &Config { values: &values, ..*config };
        let feeds = vec![config.dense()?; config.layer_count()?];
        decoder(config, feeds)
    },
    gguf: Some(GgufNames { architecture: "lfm2", fits: |_| Ok(true), keys, rules: GGUF_RULES }),
    rules: RULES,
};

pub(super) const MOE: Family = Family {
    title: "LFM2-MoE",
    architecture: "Lfm2MoeForCausalLM",
    model_type: "lfm2_moe",
    layers: "experts, some dense",
    shape: |config| {
        let values = common(config);
        let config = &Config { values: &values, ..*config };
        let first = config.number_or("num_dense_layers", 2, MOST_LAYERS)?;
        let sparse: Vec<bool> =
            (0..config.layer_count()? as u64).map(|layer| layer >= first).collect();
        let corrected = config.flag("use_expert_bias", true);
        let routing =
            Routing { corrected, in_float32: false, best_of_group: 1, ..Routing::corrected(1, 1) };
        let feeds = config.feeds(&sparse, || {
            let count = config.size("num_experts", MOST)?;
            Ok(Experts {
                normalise: config.flag("norm_topk_prob", true),
                scaling: config.real("routed_scaling_factor", 1.0)?,
                ..experts(config, count, routing)?
            })
        })?;
        decoder(config, feeds)
    },
    gguf: Some(GgufNames {
        architecture: "lfm2moe",
        fits: |_| Ok(true),
        keys: |files| {
            if scores(files, "sigmoid")? != "sigmoid" {
                return Err(ModelError::unserved_part("experts of LFM2 with other scores"));
            }
            let first = required(files, "leading_dense_block_count")?;
            let corrected = files.tensor(&format!("blk.{first}.exp_probs_b.bias")).is_some();
            let mut keys = keys(files)?;
            let of_experts = json!({
                "num_experts": required(files, "expert_count")?,
                "num_experts_per_tok": required(files, "expert_used_count")?,
                "moe_intermediate_size": required(files, "expert_feed_forward_length")?,
                "num_dense_layers": first,
                "use_expert_bias": corrected,
            });
            keys.extend(of_experts.as_object().cloned().unwrap_or_default());
            Ok(keys)
        },
        rules: GGUF_RULES,
    }),
    ..FAMILY
};

const CONV: &str = "model.layers.#.conv.in_proj.*";
const STACK: &str = "model.layers.#.feed_forward.experts.gate_up_proj";

const RULES: &[Rule] = &[
    Rule::renamed("model.embedding_norm.*", "model.norm.*"),
    Rule::renamed("model.layers.#.operator_norm.*", "model.layers.#.input_layernorm.*"),
    Rule::renamed("model.layers.#.ffn_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::renamed("model.layers.#.self_attn.out_proj.*", "model.layers.#.self_attn.o_proj.*"),
    Rule::renamed("model.layers.#.self_attn.q_layernorm.*", "model.layers.#.self_attn.q_norm.*"),
    Rule::renamed("model.layers.#.self_attn.k_layernorm.*", "model.layers.#.self_attn.k_norm.*"),
    Rule::new(CONV, "model.layers.#.linear_attn.in_proj_k.*", part(|mixer| third(mixer, 0))),
    Rule::new(CONV, "model.layers.#.linear_attn.in_proj_q.*", part(|mixer| third(mixer, 1))),
    Rule::new(CONV, "model.layers.#.linear_attn.in_proj_v.*", part(|mixer| third(mixer, 2))),
    Rule::new(
        "model.layers.#.conv.conv.*",
        "model.layers.#.linear_attn.conv_v.*",
        part(mamba::conv_values),
    ),
    Rule::renamed("model.layers.#.conv.out_proj.*", "model.layers.#.linear_attn.out_proj.*"),
    Rule::renamed("model.layers.#.feed_forward.w1.*", "model.layers.#.mlp.gate_proj.*"),
    Rule::renamed("model.layers.#.feed_forward.w3.*", "model.layers.#.mlp.up_proj.*"),
    Rule::renamed("model.layers.#.feed_forward.w2.*", "model.layers.#.mlp.down_proj.*"),
    Rule::renamed("model.layers.#.feed_forward.gate.*", "model.layers.#.mlp.gate.*"),
    Rule::renamed(
        "model.layers.#.feed_forward.expert_bias",
        "model.layers.#.mlp.gate.e_score_correction_bias",
    ),
    Rule::renamed(
        "model.layers.#.feed_forward.experts.@.w1.*",
        "model.layers.#.mlp.experts.@.gate_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.feed_forward.experts.@.w3.*",
        "model.layers.#.mlp.experts.@.up_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.feed_forward.experts.@.w2.*",
        "model.layers.#.mlp.experts.@.down_proj.*",
    ),
    Rule::new(
        STACK,
        "model.layers.#.mlp.experts.@.gate_proj.weight",
        Take::EACH_EXPERT.share(0, 2),
    ),
    Rule::new(STACK, "model.layers.#.mlp.experts.@.up_proj.weight", Take::EACH_EXPERT.share(1, 2)),
    Rule::new(
        "model.layers.#.feed_forward.experts.down_proj",
        "model.layers.#.mlp.experts.@.down_proj.weight",
        Take::EACH_EXPERT,
    ),
];

const GGUF_CONV: &str = "blk.#.shortconv.in_proj.*";

const GGUF_RULES: &[Rule] = &[
    Rule::renamed("token_embd_norm.*", "model.norm.*"),
    Rule::new(GGUF_CONV, "model.layers.#.linear_attn.in_proj_k.*", part(|mixer| third(mixer, 0))),
    Rule::new(GGUF_CONV, "model.layers.#.linear_attn.in_proj_q.*", part(|mixer| third(mixer, 1))),
    Rule::new(GGUF_CONV, "model.layers.#.linear_attn.in_proj_v.*", part(|mixer| third(mixer, 2))),
    Rule::new(
        "blk.#.shortconv.conv.*",
        "model.layers.#.linear_attn.conv_v.*",
        part(mamba::conv_values),
    ),
    Rule::renamed("blk.#.shortconv.out_proj.*", "model.layers.#.linear_attn.out_proj.*"),
];

const fn part(blocks: fn(&Mixer) -> Option<RowBlocks>) -> Take {
    Take::ALL.blocks(blocks)
}

/// Rows of one third of `in_proj`: the gate before the convolution (`number` 0), the gate after it
/// (1), or the convolution's input (2).
fn third(mixer: &Mixer, number: usize) -> Option<RowBlocks> {
    let Mixer::Recurrence(found) = mixer else { return None };
    let width = found.values();
    Some(RowBlocks { first: number * width, width, step: width, count: 1 })
}

/// Returns the config keys of a GGUF file. Layers without keys and values are convolutions.
fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let (kinds, most) = kinds_of_layers(files, "conv")?;
    let heads = required(files, "attention.head_count")?.max(1);
    let biases = files.tensors.iter().any(|tensor| tensor.name.ends_with("shortconv.conv.bias"));
    let found = json!({
        "num_attention_heads": heads,
        "num_key_value_heads": most,
        "head_dim": required(files, "embedding_length")? / heads,
        "layer_types": kinds,
        "conv_L_cache": required(files, "shortconv.l_cache")?,
        "conv_bias": biases,
        "block_auto_adjust_ff_dim": false,
    });
    Ok(found.as_object().cloned().unwrap_or_default())
}

/// Returns the config's values under our names.
fn common(config: &Config<'_>) -> Map<String, Value> {
    let mut values = config.renamed(&[
        ("norm_eps", "rms_norm_eps"),
        ("block_norm_eps", "rms_norm_eps"),
        ("tie_embedding", "tie_word_embeddings"),
    ]);
    values.entry("rms_norm_eps").or_insert_with(|| json!(EPS));
    values.entry("tie_word_embeddings").or_insert_with(|| json!(true));
    values.entry("rope_theta").or_insert_with(|| json!(THETA));
    values
}

/// Returns the inner size of a dense feed-forward part. The config may state the size before it is
/// scaled and rounded up.
fn intermediate_size(config: &Config<'_>) -> Result<u64, ModelError> {
    let key =
        if config.contains_key("block_ff_dim") { "block_ff_dim" } else { "intermediate_size" };
    let size = config.size(key, MOST)? as u64;
    if !config.flag("block_auto_adjust_ff_dim", true) {
        return Ok(size);
    }
    let multiple = config.optional("block_multiple_of", MOST)?.unwrap_or(256);
    let factor = config.real("block_ffn_dim_multiplier", 1.0)?;
    let size = (factor * (2 * size / 3) as f64) as u64;
    Ok(size.div_ceil(multiple) * multiple)
}

fn decoder(config: &Config<'_>, feeds: Vec<super::FeedShape>) -> Result<Shape, ModelError> {
    let attention = Attention { qk_norm: QkNorm::Heads, ..config.attention(None)? };
    let rope = rope(config, attention.head_dim)?;
    let hidden = config.size("hidden_size", MOST)?;
    let taps = config.optional("conv_L_cache", MOST_TAPS)?.unwrap_or(TAPS) as usize;
    let bias = config.flag("conv_bias", false);
    let convolution = Mixer::Recurrence(Recurrence::convolution(hidden, taps, bias));
    let attends = attending_layers(config)?;
    let attention = Mixer::Attention(attention);
    let mixers = attends.iter().map(|&attends| if attends { &attention } else { &convolution });
    let mixers = mixers.cloned().collect();
    let ropes = attends.iter().map(|&attends| attends.then(|| rope.clone())).collect();
    config.decoder(mixers, ropes, feeds)
}

/// Returns true for each layer with attention.
fn attending_layers(config: &Config<'_>) -> Result<Vec<bool>, ModelError> {
    if let Some(kinds) = config.get("layer_types").and_then(Value::as_array) {
        return config.kinds_of_layers(kinds, "full_attention", "conv");
    }
    let named = config.get("full_attn_idxs").and_then(Value::as_array);
    let attends = |layer: usize| {
        named.is_none_or(|named| named.iter().any(|it| it.as_u64() == Some(layer as u64)))
    };
    Ok((0..config.layer_count()?).map(attends).collect())
}
