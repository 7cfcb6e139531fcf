//! Falcon-H1: attention and Mamba 2 in parallel in each layer. Its config has factors for almost
//! all projections, which are multiplied into the weights.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys, required};
use super::recurrence::{Recurrence, StateNorm, mamba};
use super::rope::rope;
use super::rules::{Rule, joined};
use super::shape::{Beside, Mixer, Scales, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::{MOST, MOST_HEADS};

/// The largest kernel size of the convolution.
const MOST_TAPS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "Falcon-H1",
    architecture: "FalconH1ForCausalLM",
    model_type: "falcon_h1",
    attention: "grouped-query beside Mamba 2 in each layer",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "falcon-h1",
        fits: |_| Ok(true),
        keys,
        rules: &GGUF_RULES,
    }),
    rules: &RULES,
};

const OWN: &[Rule] = &[
    Rule::renamed("model.layers.#.mamba.**", "model.layers.#.linear_attn.**"),
    Rule::renamed("model.layers.#.feed_forward.**", "model.layers.#.mlp.**"),
    Rule::renamed("model.final_layernorm.*", "model.norm.*"),
    Rule::renamed("model.layers.#.pre_ff_layernorm.*", "model.layers.#.post_attention_layernorm.*"),
];
const GGUF_RULES: [Rule; 1 + mamba::GGUF_RULES.len()] = joined(
    // GGUF files name this weight without the suffix `.weight`.
    &[Rule::renamed("blk.#.ffn_norm", "model.layers.#.post_attention_layernorm.weight")],
    mamba::GGUF_RULES,
);
const RULES: [Rule; OWN.len() + mamba::RULES.len()] = joined(OWN, mamba::RULES);

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let layers = config.layer_count()?;
    let attention = config.attention(None)?;
    let rope = rope(config, attention.head_dim)?;
    let mixer = Mixer::Beside(Beside { attention, recurrence: mamba2(config)? });
    let ropes = vec![Some(rope); layers];
    let shape = config.decoder(vec![mixer; layers], ropes, vec![config.dense()?; layers])?;
    let scales = Scales {
        embeddings: config.real("embedding_multiplier", 1.0)?,
        logits: config.real("lm_head_multiplier", 1.0)?,
        ..Scales::NONE
    };
    Ok(Shape { scales, factors: factors(config)?, ..shape })
}

/// Returns the config keys of a GGUF file. The factors are already in its weights, and its models
/// apply the gate before the norm.
fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let has = |end: &str| files.tensors.iter().any(|tensor| tensor.name.ends_with(end));
    let own = json!({
        "mamba_d_ssm": required(files, "ssm.inner_size")?,
        "mamba_rms_norm": has("ssm_norm.weight"),
        "mamba_norm_before_gate": false,
        "projectors_bias": has("ssm_out.bias"),
    });
    let mut keys = dense_keys(files)?;
    keys.extend(mamba::keys_of(files)?);
    keys.extend(own.as_object().cloned().unwrap_or_default());
    Ok(keys)
}

fn mamba2(config: &Config<'_>) -> Result<Recurrence, ModelError> {
    let heads = config.size("mamba_n_heads", MOST_HEADS)?;
    let values = match config.optional("mamba_d_ssm", MOST)? {
        Some(values) => values as usize,
        None => {
            let expand = config.number_or("mamba_expand", 2, MOST)? as usize;
            expand * config.size("hidden_size", MOST)?
        }
    };
    let of_head = match config.get("mamba_d_head") {
        None | Some(Value::String(_) | Value::Null) => values / heads,
        Some(_) => config.size("mamba_d_head", MOST_HEADS)?,
    };
    let key_heads = config.number_or("mamba_n_groups", 1, MOST_HEADS)?.max(1) as usize;
    if of_head * heads != values || of_head == 0 || !heads.is_multiple_of(key_heads) {
        return Err(ModelError::broken(format!(
            "{heads} heads (mamba_n_heads) of {of_head} elements (mamba_d_head) in {key_heads} groups \
             (mamba_n_groups) are not {values} (mamba_d_ssm)"
        )));
    }
    let unlimited = |limit: f64| limit == 0.0 || limit.is_infinite();
    let limits = config.get("time_step_limit").and_then(Value::as_array);
    if !limits.into_iter().flatten().filter_map(Value::as_f64).all(unlimited) {
        return Err(ModelError::unserved_part("steps between limits (time_step_limit)"));
    }
    config.only("hidden_act", &["silu"])?;
    let bias = config.flag("mamba_proj_bias", false);
    if bias != config.flag("projectors_bias", false) {
        return Err(ModelError::unserved_part(
            "biases on one of two projections (mamba_proj_bias, projectors_bias)",
        ));
    }
    let norm =
        match (config.flag("mamba_rms_norm", false), config.flag("mamba_norm_before_gate", true)) {
            (false, _) => StateNorm::None,
            (true, true) => StateNorm::BeforeGate,
            (true, false) => StateNorm::AfterGate,
        };
    Ok(Recurrence {
        heads,
        key_heads,
        tiled: false,
        key_dim: config.number_or("mamba_d_state", 256, MOST_HEADS)?.max(1) as usize,
        value_dim: of_head,
        channel_decay: false,
        delta: false,
        taps: config.number_or("mamba_d_conv", 4, MOST_TAPS)?.max(1) as usize,
        conv_bias: config.flag("mamba_conv_bias", true),
        bias,
        norm,
        sigmoid_gate: false,
        low_rank: 0,
        norm_size: if norm == StateNorm::None { 0 } else { values / key_heads },
    })
}

/// Reads a list of `N` factors, each 1 by default.
fn list<const N: usize>(config: &Config<'_>, key: &str) -> Result<[f64; N], ModelError> {
    let Some(found) = config.get(key).filter(|it| !it.is_null()) else { return Ok([1.0; N]) };
    let numbers: Option<Vec<f64>> =
        found.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
    let numbers = numbers.and_then(|numbers| <[f64; N]>::try_from(numbers).ok());
    numbers.filter(|numbers| numbers.iter().all(|it| it.is_finite())).ok_or_else(|| {
        ModelError::broken(format!("the model's config has no {N} numbers in '{key}'"))
    })
}

/// Returns a factor per weight: the product of the factors on the projection's input and output. A
/// bias gets only the output's factor.
fn factors(config: &Config<'_>) -> Result<BTreeMap<String, f64>, ModelError> {
    let attended = config.real("attention_in_multiplier", 1.0)?;
    let stated = config.real("ssm_in_multiplier", 1.0)?;
    let [gates, values, keys, queries, steps] = list(config, "ssm_multipliers")?;
    let [gate, down] = list(config, "mlp_multipliers")?;
    let products = [
        ("self_attn.q_proj", attended, 1.0),
        ("self_attn.k_proj", attended, config.real("key_multiplier", 1.0)?),
        ("self_attn.v_proj", attended, 1.0),
        ("self_attn.o_proj", 1.0, config.real("attention_out_multiplier", 1.0)?),
        ("linear_attn.in_proj_z", stated, gates),
        ("linear_attn.in_proj_v", stated, values),
        ("linear_attn.in_proj_k", stated, keys),
        ("linear_attn.in_proj_q", stated, queries),
        ("linear_attn.in_proj_a", stated, steps),
        ("linear_attn.out_proj", 1.0, config.real("ssm_out_multiplier", 1.0)?),
        ("mlp.gate_proj", 1.0, gate),
        ("mlp.down_proj", 1.0, down),
    ];
    let of_product = |&(name, input, output): &(&str, f64, f64)| {
        [(format!("{name}.weight"), input * output), (format!("{name}.bias"), output)]
    };
    let found = products.iter().flat_map(of_product);
    Ok(found.filter(|(_, factor)| *factor != 1.0).collect())
}
