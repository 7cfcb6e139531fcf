//! Nemotron-H and Nemotron 3. Each layer is either Mamba 2, or attention without positional
//! encoding, or a feed-forward part without gates, dense or with experts.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, check_count, expert_count, experts};
use super::gguf::{GgufNames, required, routed_keys, scores, whole};
use super::recurrence::{Recurrence, StateNorm, mamba};
use super::rules::{Rule, Take, joined};
use super::shape::{DenseFeed, FeedShape, Mixer, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS};

/// The largest kernel size of the convolution.
const MOST_TAPS: u64 = 64;
const EPS: f64 = 1e-5;

pub(super) const FAMILY: Family = Family {
    title: "Nemotron-H, Nemotron 3",
    architecture: "NemotronHForCausalLM",
    model_type: "nemotron_h",
    attention: "Mamba 2, and grouped-query without positions in some layers",
    layers: "dense, experts, without gates",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "nemotron_h",
        fits: |_| Ok(true),
        keys,
        rules: &GGUF_RULES,
    }),
    rules: &RULES,
};

/// Weights of every kind of layer have the prefix `mixer`. Layers for multi-token prediction have
/// separate names.
const OWN: &[Rule] = &[
    Rule::spare("mtp.**"),
    Rule::renamed("backbone.**", "model.**"),
    Rule::renamed("model.layers.#.mixer.**", "model.layers.#.linear_attn.**"),
    Rule::renamed("model.embeddings.*", "model.embed_tokens.*"),
    Rule::renamed("model.norm_f.*", "model.norm.*"),
    Rule::new("model.layers.#.norm.*", "model.layers.#.input_layernorm.*", Take::ALL.only(mixes)),
    Rule::new("model.layers.#.norm.*", "model.layers.#.post_attention_layernorm.*", FEEDS),
    Rule::renamed("model.layers.#.linear_attn.q_proj.*", "model.layers.#.self_attn.q_proj.*"),
    Rule::renamed("model.layers.#.linear_attn.k_proj.*", "model.layers.#.self_attn.k_proj.*"),
    Rule::renamed("model.layers.#.linear_attn.v_proj.*", "model.layers.#.self_attn.v_proj.*"),
    Rule::renamed("model.layers.#.linear_attn.o_proj.*", "model.layers.#.self_attn.o_proj.*"),
    Rule::renamed("model.layers.#.linear_attn.up_proj.*", "model.layers.#.mlp.up_proj.*"),
    Rule::renamed("model.layers.#.linear_attn.down_proj.*", "model.layers.#.mlp.down_proj.*"),
    Rule::renamed("model.layers.#.linear_attn.gate.*", "model.layers.#.mlp.gate.*"),
    Rule::renamed(
        "model.layers.#.linear_attn.gate.e_score_correction_bias",
        "model.layers.#.mlp.gate.e_score_correction_bias",
    ),
    Rule::renamed(
        "model.layers.#.linear_attn.experts.@.up_proj.*",
        "model.layers.#.mlp.experts.@.up_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.linear_attn.experts.@.down_proj.*",
        "model.layers.#.mlp.experts.@.down_proj.*",
    ),
    Rule::new(
        "model.layers.#.linear_attn.experts.up_proj",
        "model.layers.#.mlp.experts.@.up_proj.weight",
        Take::EACH_EXPERT,
    ),
    Rule::new(
        "model.layers.#.linear_attn.experts.down_proj",
        "model.layers.#.mlp.experts.@.down_proj.weight",
        Take::EACH_EXPERT,
    ),
    Rule::renamed(
        "model.layers.#.linear_attn.shared_experts.up_proj.*",
        "model.layers.#.mlp.shared_experts.up_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.linear_attn.shared_experts.down_proj.*",
        "model.layers.#.mlp.shared_experts.down_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.linear_attn.fc1_latent_proj.*",
        "model.layers.#.mlp.fc1_latent_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.linear_attn.fc2_latent_proj.*",
        "model.layers.#.mlp.fc2_latent_proj.*",
    ),
];
const RULES: [Rule; OWN.len() + mamba::RULES.len()] = joined(OWN, mamba::RULES);

const GGUF_NORM: &str = "blk.#.attn_norm.*";
const GGUF_OWN: &[Rule] = &[
    Rule::new(GGUF_NORM, "model.layers.#.input_layernorm.*", Take::ALL.only(mixes)),
    Rule::new(GGUF_NORM, "model.layers.#.post_attention_layernorm.*", FEEDS),
    Rule::renamed("blk.#.ffn_latent_down.*", "model.layers.#.mlp.fc1_latent_proj.*"),
    Rule::renamed("blk.#.ffn_latent_up.*", "model.layers.#.mlp.fc2_latent_proj.*"),
];
const GGUF_RULES: [Rule; GGUF_OWN.len() + mamba::GGUF_RULES.len()] =
    joined(GGUF_OWN, mamba::GGUF_RULES);
const FEEDS: Take = Take::ALL.only(|shape, layer| !mixes(shape, layer));

/// True if a layer mixes positions, rather than being a feed-forward part.
fn mixes(shape: &Shape, layer: usize) -> bool {
    !matches!(shape.mixer(layer), Mixer::None)
}

/// The kind of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Dense,
    Experts,
}

impl Kind {
    /// Returns a kind by its name, or by its letter in a pattern. Newer configs have other names.
    fn of(name: &str) -> Option<Self> {
        match name {
            "M" | "mamba" | "linear_attention" => Some(Self::Mamba),
            "*" | "attention" | "full_attention" => Some(Self::Attention),
            "-" | "mlp" => Some(Self::Dense),
            "E" | "moe" => Some(Self::Experts),
            _ => None,
        }
    }
}

/// Returns the kind of each layer, from a list of names or a pattern of letters.
fn kinds(config: &Config<'_>) -> Result<Vec<Kind>, ModelError> {
    let list = ["layers_block_type", "layer_types"].iter().find_map(|key| config.get(*key));
    let names: Vec<String> = match list.and_then(Value::as_array) {
        Some(list) => list.iter().map(|it| it.as_str().unwrap_or_default().to_owned()).collect(),
        None => {
            let pattern = config.get("hybrid_override_pattern").and_then(Value::as_str);
            let pattern = pattern.ok_or_else(|| {
                ModelError::broken("the model's config has no 'layers_block_type'")
            })?;
            pattern.chars().map(String::from).collect()
        }
    };
    if names.is_empty() || names.len() as u64 > MOST_LAYERS {
        return Err(ModelError::broken(format!(
            "the model's config has {} layers (layers_block_type)",
            names.len()
        )));
    }
    let kind = |name: &String| {
        Kind::of(name).ok_or_else(|| {
            ModelError::unserved_part(&format!("layers of the kind {name:?} (layers_block_type)"))
        })
    };
    names.iter().map(kind).collect()
}

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let kinds = kinds(config)?;
    let values = common(config, kinds.len());
    let config = &Config { values: &values, ..*config };
    let has = |kind: Kind| kinds.contains(&kind);
    let attention = Mixer::Attention(config.attention(None)?);
    let mamba = if has(Kind::Mamba) { Mixer::Recurrence(mamba2(config)?) } else { Mixer::None };
    let dense = if has(Kind::Dense) { dense(config)? } else { FeedShape::None };
    let sparse = if has(Kind::Experts) {
        let found = mixture(config)?;
        check_count(&found, kinds.len())?;
        FeedShape::Experts(found)
    } else {
        FeedShape::None
    };
    let mixers = kinds.iter().map(|kind| match kind {
        Kind::Mamba => mamba.clone(),
        Kind::Attention => attention.clone(),
        Kind::Dense | Kind::Experts => Mixer::None,
    });
    let feeds = kinds.iter().map(|kind| match kind {
        Kind::Mamba | Kind::Attention => FeedShape::None,
        Kind::Dense => dense,
        Kind::Experts => sparse,
    });
    config.decoder(mixers.collect(), vec![None; kinds.len()], feeds.collect())
}

/// Returns the config's values under our names.
fn common(config: &Config<'_>, layers: usize) -> Map<String, Value> {
    let mut values = config.renamed(&[("layer_norm_epsilon", "rms_norm_eps")]);
    let activation = config.get("mlp_hidden_act").filter(|value| !value.is_null());
    values.insert("hidden_act".into(), activation.cloned().unwrap_or_else(|| json!("relu2")));
    values.insert("num_hidden_layers".into(), json!(layers));
    values.entry("rms_norm_eps").or_insert_with(|| json!(EPS));
    values
}

/// Returns the config keys of a GGUF file. The kind of a layer follows from its tensors.
fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let has = |end: &str| files.tensors.iter().any(|tensor| tensor.name.ends_with(end));
    let nextn = whole(files, "nextn_predict_layers")?.unwrap_or(0);
    let layers = (required(files, "block_count")? - nextn).clamp(0, MOST_LAYERS as i64);
    let letter = |layer: i64| {
        let there = |name: &str| files.tensor(&format!("blk.{layer}.{name}.weight")).is_some();
        let kinds = [("ssm_in", "M"), ("attn_q", "*"), ("ffn_gate_inp", "E"), ("ffn_up", "-")];
        kinds.iter().find(|(name, _)| there(name)).map_or("?", |(_, letter)| letter)
    };
    let pattern: String = (0..layers).map(letter).collect();
    // In models with experts, the feed-forward length in the metadata is that of the experts. So
    // the size of dense layers is read from a tensor's shape.
    let dense = pattern.find('-').and_then(|at| files.tensor(&format!("blk.{at}.ffn_up.weight")));
    let largest = |key: &str| -> Result<i64, ModelError> {
        match files.get(key).and_then(GgufValue::as_list) {
            Some(list) => Ok(list.iter().filter_map(GgufValue::as_i64).max().unwrap_or(0)),
            None => required(files, key),
        }
    };
    let found = json!({
        "hybrid_override_pattern": pattern,
        "num_attention_heads": largest("attention.head_count")?,
        "num_key_value_heads": largest("attention.head_count_kv")?,
        "head_dim": required(files, "attention.key_length")?,
        "intermediate_size": dense.and_then(|tensor| tensor.shape.first()),
        "attention_bias": has("attn_output.bias"),
        "mlp_bias": has("ffn_up.bias"),
    });
    let mut keys = found.as_object().cloned().unwrap_or_default();
    let mamba = mamba::keys_of(files)?;
    for (from, to) in [
        ("mamba_n_heads", "mamba_num_heads"),
        ("mamba_d_head", "mamba_head_dim"),
        ("mamba_d_state", "ssm_state_size"),
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_proj_bias", "use_bias"),
    ] {
        keys.insert(to.into(), mamba[from].clone());
    }
    if whole(files, "expert_count")?.unwrap_or(0) > 0 {
        if scores(files, "sigmoid")? != "sigmoid" {
            return Err(ModelError::unserved_part("experts of Nemotron 3 with other scores"));
        }
        let mut routed = routed_keys(files, "sigmoid")?;
        let shared = required(files, "expert_shared_feed_forward_length")?;
        routed.insert("moe_shared_expert_intermediate_size".into(), json!(shared));
        routed.insert("moe_latent_size".into(), json!(whole(files, "moe_latent_size")?));
        keys.extend(routed);
    }
    Ok(keys)
}

fn dense(config: &Config<'_>) -> Result<FeedShape, ModelError> {
    Ok(FeedShape::Dense(DenseFeed {
        intermediate_size: config.size("intermediate_size", MOST)?,
        activation: config.activation()?,
        gated: false,
        bias: config.flag("mlp_bias", false),
    }))
}

fn mixture(config: &Config<'_>) -> Result<Experts, ModelError> {
    let groups = config.number_or("n_group", 1, MOST)?.max(1) as usize;
    let kept = config.number_or("topk_group", 1, MOST)?.max(1) as usize;
    let count = expert_count(config, &["n_routed_experts", "num_local_experts"])?;
    Ok(Experts {
        gated: false,
        latent_size: config.optional("moe_latent_size", MOST)?.unwrap_or(0) as usize,
        shared_size: config.size("moe_shared_expert_intermediate_size", MOST)?,
        normalise: config.flag("norm_topk_prob", true),
        scaling: config.real("routed_scaling_factor", 1.0)?,
        ..experts(config, count, Routing::corrected(groups, kept))?
    })
}

fn mamba2(config: &Config<'_>) -> Result<Recurrence, ModelError> {
    let heads = config.size("mamba_num_heads", MOST_HEADS)?;
    let value_dim = config.size("mamba_head_dim", MOST_HEADS)?;
    let key_heads = match config.contains_key("mamba_n_groups") {
        true => config.size("mamba_n_groups", MOST_HEADS)?,
        false => config.number_or("n_groups", 8, MOST_HEADS)?.max(1) as usize,
    };
    if !heads.is_multiple_of(key_heads) {
        return Err(ModelError::broken(format!(
            "{heads} heads (mamba_num_heads) can't share {key_heads} groups (n_groups) equally"
        )));
    }
    let unlimited = |limit: f64| limit == 0.0 || limit.is_infinite();
    let limits = config.get("time_step_limit").and_then(Value::as_array);
    if !limits.into_iter().flatten().filter_map(Value::as_f64).all(unlimited) {
        return Err(ModelError::unserved_part("steps between limits (time_step_limit)"));
    }
    config.only("mamba_hidden_act", &["silu"])?;
    Ok(Recurrence {
        heads,
        key_heads,
        tiled: false,
        key_dim: config.size("ssm_state_size", MOST_HEADS)?,
        value_dim,
        channel_decay: false,
        delta: false,
        taps: config.number_or("conv_kernel", 4, MOST_TAPS)?.max(1) as usize,
        conv_bias: config.flag("use_conv_bias", true),
        bias: config.flag("use_bias", false),
        norm: StateNorm::AfterGate,
        sigmoid_gate: false,
        low_rank: 0,
        norm_size: heads * value_dim / key_heads,
    })
}
