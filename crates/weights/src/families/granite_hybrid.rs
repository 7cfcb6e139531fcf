//! Granite 4: Mamba 2 in most layers and attention in the others; dense, or with routed experts and
//! a shared expert. GGUF files without recurrent layers may be Granite 3.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, experts};
use super::gguf::{GgufNames, kinds_of_layers, required, whole};
use super::granite::{attention, scale_keys, scales};
use super::granite_moe;
use super::llama::PAIRED;
use super::recurrence::{Recurrence, StateNorm, mamba};
use super::rope::rope;
use super::rules::{Rule, Take, joined};
use super::shape::{Mixer, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::{MOST, MOST_HEADS};

/// The largest kernel size of the convolution.
const MOST_TAPS: u64 = 64;

pub(super) const FAMILY: Family = Family {
    title: "Granite 4",
    architecture: "GraniteMoeHybridForCausalLM",
    model_type: "granitemoehybrid",
    attention: "grouped-query; h models: Mamba 2 in most layers",
    layers: "dense, experts",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "granitehybrid",
        fits: |_| Ok(true),
        keys,
        rules: &GGUF_RULES,
    }),
    rules: &RULES,
};
const GGUF_RULES: [Rule; mamba::GGUF_RULES.len() + PAIRED.len()] =
    joined(mamba::GGUF_RULES, PAIRED);
const INPUT: &str = "model.layers.#.shared_mlp.input_linear.*";
const OUTPUT: &str = "model.layers.#.shared_mlp.output_linear.*";
const DENSE: Take = Take::ALL.only(|shape, layer| shape.experts(layer).is_none());
const SHARED: Take = Take::ALL.only(|shape, layer| shape.experts(layer).is_some());

const OWN: &[Rule] = &[
    Rule::renamed("model.layers.#.mamba.**", "model.layers.#.linear_attn.**"),
    Rule::new(INPUT, "model.layers.#.mlp.gate_proj.*", DENSE.share(0, 2)),
    Rule::new(INPUT, "model.layers.#.mlp.up_proj.*", DENSE.share(1, 2)),
    Rule::new(OUTPUT, "model.layers.#.mlp.down_proj.*", DENSE),
    Rule::new(INPUT, "model.layers.#.mlp.shared_experts.gate_proj.*", SHARED.share(0, 2)),
    Rule::new(INPUT, "model.layers.#.mlp.shared_experts.up_proj.*", SHARED.share(1, 2)),
    Rule::new(OUTPUT, "model.layers.#.mlp.shared_experts.down_proj.*", SHARED),
    granite_moe::RULES[0],
    granite_moe::RULES[1],
    granite_moe::RULES[2],
    granite_moe::RULES[3],
];
const RULES: [Rule; OWN.len() + mamba::RULES.len()] = joined(OWN, mamba::RULES);

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let count = config.layer_count()?;
    let kinds = config.get("layer_types").or_else(|| config.get("layers_block_type"));
    // transformers 5 writes `full_attention` and `linear_attention`; configs on the hub have
    // `attention` and `mamba`.
    let attends = |kind: &Value| match kind.as_str() {
        Some("attention" | "full_attention") => Some(true),
        Some("mamba" | "linear_attention") => Some(false),
        _ => None,
    };
    let attends: Vec<bool> = match kinds.and_then(Value::as_array) {
        None => vec![false; count],
        Some(kinds) => kinds.iter().map(attends).collect::<Option<_>>().ok_or_else(|| {
            ModelError::unserved_part("layer_types of other kinds in GraniteMoeHybridForCausalLM")
        })?,
    };
    if attends.len() != count {
        return Err(ModelError::broken(format!(
            "the model's config has {count} layers (num_hidden_layers) and {} kinds of them (layer_types)",
            attends.len()
        )));
    }
    let routed = config.number_or("num_local_experts", 8, MOST)? as usize;
    let values: Map<String, Value> = config.renamed(&[match routed {
        0 => ("shared_intermediate_size", "intermediate_size"),
        _ => ("intermediate_size", "moe_intermediate_size"),
    }]);
    let config = &Config { values: &values, ..*config };
    let attention = attention(config)?;
    let rotated = config.get("position_embedding_type").and_then(Value::as_str) == Some("rope");
    let rope = rope(config, attention.head_dim)?;
    let feeds = config.feeds(&vec![routed > 0; count], || {
        Ok(Experts {
            normalise: true,
            shared_size: config.size("shared_intermediate_size", MOST)?,
            ..experts(config, routed, Routing::SOFTMAX)?
        })
    })?;
    let all_attend = attends.iter().all(|&attends| attends);
    let mamba = if all_attend { None } else { Some(Mixer::Recurrence(mamba2(config)?)) };
    let attention = Mixer::Attention(attention);
    let mixer = |&attends: &bool| mamba.as_ref().filter(|_| !attends).unwrap_or(&attention);
    let mixers = attends.iter().map(mixer).cloned().collect();
    let ropes = attends.iter().map(|&attends| (attends && rotated).then(|| rope.clone()));
    let shape = config.decoder(mixers, ropes.collect(), feeds)?;
    Ok(Shape { scales: scales(config)?, ..shape })
}

/// Returns the config keys of a GGUF file. Layers without keys and values are recurrent.
fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let (kinds, most) = kinds_of_layers(files, "mamba")?;
    let heads = required(files, "attention.head_count")?.max(1);
    let hidden = required(files, "embedding_length")?.max(1);
    let has = |end: &str| files.tensors.iter().any(|tensor| tensor.name.ends_with(end));
    let rotates = files.get("rope.scaling.finetuned").is_some_and(GgufValue::truthy);
    let experts = whole(files, "expert_count")?.unwrap_or(0);
    let shared = whole(files, "expert_shared_feed_forward_length")?;
    let mut keys = json!({
        "num_attention_heads": heads,
        "num_key_value_heads": most,
        "head_dim": hidden / heads,
        "layer_types": kinds,
        "position_embedding_type": rotates.then_some("rope"),
        "num_local_experts": experts,
        "num_experts_per_tok": whole(files, "expert_used_count")?.unwrap_or(0),
        "shared_intermediate_size": match experts {
            0 => required(files, "feed_forward_length")?,
            _ => shared.unwrap_or(0),
        },
        "attention_bias": has("attn_output.bias"),
        "mamba_expand": required(files, "ssm.inner_size")? / hidden,
    });
    let keys = keys.as_object_mut().map(std::mem::take).unwrap_or_default();
    let scales = scale_keys(files, &keys);
    Ok(keys.into_iter().chain(scales).chain(mamba::keys_of(files)?).collect())
}

/// Reads a Mamba 2 layer, under the names of Bamba's config.
fn mamba2(config: &Config<'_>) -> Result<Recurrence, ModelError> {
    let heads = config.size("mamba_n_heads", MOST_HEADS)?;
    let expand = config.optional("mamba_expand", MOST)?.unwrap_or(2) as usize;
    let values = expand * config.size("hidden_size", MOST)?;
    let of_head = match config.get("mamba_d_head") {
        None | Some(Value::String(_)) => values / heads,
        Some(_) => config.size("mamba_d_head", MOST_HEADS)?,
    };
    let key_heads = config.optional("mamba_n_groups", MOST_HEADS)?.unwrap_or(1) as usize;
    if of_head * heads != values || !heads.is_multiple_of(key_heads) {
        return Err(ModelError::broken(format!(
            "{heads} heads (mamba_n_heads) of {of_head} elements (mamba_d_head) in {key_heads} groups \
             (mamba_n_groups) are not {values} (mamba_expand)"
        )));
    }
    let limits = config.get("time_step_limit").and_then(Value::as_array);
    let limits = limits.into_iter().flatten().filter_map(Value::as_f64);
    if limits.into_iter().any(|limit| limit != 0.0 && limit.is_finite()) {
        return Err(ModelError::unserved_part("steps between limits (time_step_limit)"));
    }
    config.only("hidden_act", &["silu"])?;
    Ok(Recurrence {
        heads,
        key_heads,
        tiled: false,
        key_dim: config.size("mamba_d_state", MOST_HEADS)?,
        value_dim: of_head,
        channel_decay: false,
        delta: false,
        taps: config.optional("mamba_d_conv", MOST_TAPS)?.unwrap_or(4) as usize,
        conv_bias: config.flag("mamba_conv_bias", true),
        bias: config.flag("mamba_proj_bias", false),
        norm: StateNorm::AfterGate,
        sigmoid_gate: false,
        low_rank: 0,
        norm_size: values / key_heads,
    })
}
