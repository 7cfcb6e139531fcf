//! Gemma 4, the text of it. Layers have heads of two sizes, values may be keys, and some layers
//! read the keys and values of others. Each layer has inputs. Experts stand beside a dense part.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, check_count, experts};
use super::gemma2::cap;
use super::rope::{RopeKind, rope_of_kind};
use super::rules::{Rule, Take, joined};
use super::shape::{
    Activation, Attention, DenseFeed, FeedShape, LayerInputs, Mixer, NormPlacement, QkNorm, Shape,
};
use super::text;
use crate::error::ModelError;
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, optional};

/// Every sixth layer sees all positions.
const CYCLE: u64 = 6;
/// The rotated part of heads that see all positions.
const TURNED: f64 = 0.25;
const LOCAL: RopeKind = RopeKind {
    layer: "sliding_attention",
    theta: "rope_local_base_freq",
    usual: 10_000.0,
    scaled: false,
};
const WHOLE: RopeKind =
    RopeKind { layer: "full_attention", theta: "rope_theta", usual: 1_000_000.0, scaled: false };

pub(super) const FAMILY: Family = Family {
    title: "Gemma 4",
    architecture: "Gemma4ForCausalLM",
    model_type: "gemma4_text",
    attention: "grouped-query of two head sizes, windows in five of six layers, some keys and values shared",
    layers: "dense, or dense beside experts",
    compiled: false,
    shape,
    gguf: None,
    rules: RULES,
};

/// The repositories with towers, which are not read.
pub(super) const TEXT: Family = Family {
    title: "Gemma 4 with towers (text)",
    architecture: "Gemma4ForConditionalGeneration",
    model_type: "gemma4",
    shape: |config| shape(&Config { values: &text::text_config(config), ..*config }),
    rules: &TEXT_RULES,
    ..FAMILY
};

/// The repositories whose decoder reads patches of images as they are. They are not read either.
pub(super) const UNIFIED: Family = Family {
    title: "Gemma 4 without towers (text)",
    architecture: "Gemma4UnifiedForConditionalGeneration",
    model_type: "gemma4_unified",
    layers: "dense",
    shape: |config| {
        let mut values = text::text_config(config);
        // Such a config leaves out what is usual.
        for (key, usual) in [("sliding_window", 1024), ("max_position_embeddings", 262_144)] {
            values.entry(key).or_insert_with(|| json!(usual));
        }
        values.insert("hidden_size_per_layer_input".into(), json!(0));
        shape(&Config { values: &values, ..*config })
    },
    ..TEXT
};

const OTHERS: &[Rule] = &[
    Rule::spare("model.audio_tower.**"),
    Rule::spare("model.embed_audio.**"),
    Rule::spare("model.embed_vision.**"),
    Rule::spare("model.vision_embedder.**"),
];
const WITH_OTHERS: usize = text::RULES.len() + OTHERS.len();
const TOWER_RULES: [Rule; WITH_OTHERS] = joined(text::RULES, OTHERS);
const TEXT_RULES: [Rule; WITH_OTHERS + RULES.len()] = joined(&TOWER_RULES, RULES);

const RULES: &[Rule] = &[
    // Layers that read the keys and values of others have spare ones in some files.
    keys("model.layers.#.self_attn.k_proj.*"),
    keys("model.layers.#.self_attn.v_proj.*"),
    keys("model.layers.#.self_attn.k_norm.*"),
    dense("model.layers.#.mlp.gate_proj.*"),
    dense("model.layers.#.mlp.up_proj.*"),
    dense("model.layers.#.mlp.down_proj.*"),
    beside("model.layers.#.mlp.gate_proj.*", "model.layers.#.mlp.shared_experts.gate_proj.*"),
    beside("model.layers.#.mlp.up_proj.*", "model.layers.#.mlp.shared_experts.up_proj.*"),
    beside("model.layers.#.mlp.down_proj.*", "model.layers.#.mlp.shared_experts.down_proj.*"),
    Rule::renamed("model.layers.#.router.proj.*", "model.layers.#.mlp.gate.*"),
    Rule::renamed("model.layers.#.router.scale", "model.layers.#.mlp.gate.scale"),
    Rule::renamed(
        "model.layers.#.router.per_expert_scale",
        "model.layers.#.mlp.gate.per_expert_scale",
    ),
    Rule::renamed(
        "model.layers.#.pre_feedforward_layernorm_2.*",
        "model.layers.#.mlp.experts_layernorm.*",
    ),
    Rule::renamed(
        "model.layers.#.post_feedforward_layernorm_1.*",
        "model.layers.#.mlp.post_shared_layernorm.*",
    ),
    Rule::renamed(
        "model.layers.#.post_feedforward_layernorm_2.*",
        "model.layers.#.mlp.post_experts_layernorm.*",
    ),
    Rule::new(
        "model.layers.#.experts.gate_up_proj",
        "model.layers.#.mlp.experts.@.gate_proj.weight",
        Take::EACH_EXPERT.share(0, 2),
    ),
    Rule::new(
        "model.layers.#.experts.gate_up_proj",
        "model.layers.#.mlp.experts.@.up_proj.weight",
        Take::EACH_EXPERT.share(1, 2),
    ),
    Rule::new(
        "model.layers.#.experts.down_proj",
        "model.layers.#.mlp.experts.@.down_proj.weight",
        Take::EACH_EXPERT,
    ),
];

const fn keys(name: &'static str) -> Rule {
    Rule::new(name, name, Take::ALL.only(|shape, layer| shape.layers[layer].keys_of.is_none()))
}

const fn dense(name: &'static str) -> Rule {
    Rule::new(name, name, Take::ALL.only(|shape, layer| shape.experts(layer).is_none()))
}

const fn beside(name: &'static str, weight: &'static str) -> Rule {
    Rule::new(name, weight, Take::ALL.only(|shape, layer| shape.experts(layer).is_some()))
}

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    if config.get("use_bidirectional_attention").and_then(Value::as_str) == Some("all") {
        return Err(ModelError::unserved_part("positions that see what is behind them"));
    }
    let mut values = config.values.clone();
    // A config inside that of a whole may leave out what is usual.
    for (key, usual) in [
        ("vocab_size", 262_144),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("sliding_window", 512),
        ("max_position_embeddings", 131_072),
    ] {
        values.entry(key).or_insert_with(|| json!(usual));
    }
    if config.get("rope_parameters").is_none_or(Value::is_null) {
        let whole = json!({"rope_type": "proportional", "partial_rotary_factor": TURNED});
        values.insert("rope_parameters".into(), json!({ WHOLE.layer: whole }));
    }
    let config = &Config { values: &values, ..*config };
    let layers = config.layer_count()?;
    let (mut windows, mut is_local) = config.cycle_of_windows(CYCLE)?;
    // The last layer sees all positions, whatever a config says.
    (windows[layers - 1], is_local[layers - 1]) = (None, false);
    let shared = config.number_or("num_kv_shared_layers", 0, MOST_LAYERS)? as usize;
    let own = layers.checked_sub(shared).filter(|&own| own > 0).ok_or_else(|| {
        ModelError::broken(format!(
            "{shared} of {layers} layers can't read the keys of others (num_kv_shared_layers)"
        ))
    })?;
    let feed = feeds(config, layers)?;
    let is_wide = config.flag("use_double_wide_mlp", false);
    let (mut mixers, mut ropes, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    for (layer, (&is_local, window)) in is_local.iter().zip(windows).enumerate() {
        let attention = Attention { window, ..attention(config, layer, is_local)? };
        let kind = if is_local { LOCAL } else { WHOLE };
        ropes.push(Some(rope_of_kind(config, &kind, attention.head_dim)?));
        mixers.push(Mixer::Attention(attention));
        parts.push(feed.widened(is_wide && layer >= own));
    }
    let mut shape = config.decoder(mixers, ropes, parts)?;
    shape.scales.embeddings = (shape.hidden_size as f64).sqrt();
    shape.scales.logit_cap = cap(config, "final_logit_softcapping", 0.0)?;
    shape.tied = config.flag("tie_word_embeddings", true);
    shape.layer_inputs = layer_inputs(config)?;
    for layer in 0..layers {
        let keys_of = (layer >= own).then(|| {
            let source = (0..own).rev().find(|&source| is_local[source] == is_local[layer]);
            source.ok_or_else(|| {
                ModelError::broken(
                    "no layer has keys that the last ones read (num_kv_shared_layers)",
                )
            })
        });
        let at = &mut shape.layers[layer];
        at.keys_of = keys_of.transpose()?.map(|source| source as u16);
        at.norms = NormPlacement::Around;
        at.scaled = true;
    }
    Ok(shape)
}

/// The attention of a layer, whose window comes later.
fn attention(config: &Config<'_>, layer: usize, is_local: bool) -> Result<Attention, ModelError> {
    const HEAD_DIM: u64 = 256;
    const GLOBAL_HEAD_DIM: u64 = 512;
    let mut values = config.values.clone();
    let keys_are_values = !is_local && config.flag("attention_k_eq_v", false);
    if !is_local {
        // Files of the hub have what differs under names of its own, and transformers 5 saves it by
        // the number of the layer.
        let own = config.get("per_layer_config").and_then(|all| all.get(layer.to_string()));
        let own = own.and_then(Value::as_object).cloned().unwrap_or_default();
        let head_dim = match optional(&own, "head_dim", MOST_HEADS)? {
            Some(dim) => dim,
            None => config.optional("global_head_dim", MOST_HEADS)?.unwrap_or(GLOBAL_HEAD_DIM),
        };
        values.insert("head_dim".into(), json!(head_dim));
        let heads = match optional(&own, "num_key_value_heads", MOST_HEADS)? {
            None if keys_are_values => config.optional("num_global_key_value_heads", MOST_HEADS)?,
            heads => heads,
        };
        values.extend(heads.map(|heads| ("num_key_value_heads".to_owned(), json!(heads))));
    }
    let config = Config { values: &values, ..*config };
    Ok(Attention {
        scale: Some(1.0),
        qk_norm: QkNorm::Heads,
        value_norm: true,
        keys_are_values,
        ..config.attention(Some(HEAD_DIM))?
    })
}

/// The part behind the attention of a layer.
struct Feed(DenseFeed, Option<Experts>);

impl Feed {
    /// The part, with a dense one of twice the size if it is `wide`.
    fn widened(&self, wide: bool) -> FeedShape {
        let intermediate_size = self.0.intermediate_size * if wide { 2 } else { 1 };
        match self.1 {
            Some(experts) => {
                FeedShape::Experts(Experts { shared_size: intermediate_size, ..experts })
            }
            None => FeedShape::Dense(DenseFeed { intermediate_size, ..self.0 }),
        }
    }
}

fn feeds(config: &Config<'_>, layers: usize) -> Result<Feed, ModelError> {
    let mut values: Map<String, Value> =
        config.renamed(&[("top_k_experts", "num_experts_per_tok")]);
    let name = config.get("hidden_activation").and_then(Value::as_str);
    values.insert("hidden_act".into(), json!(name.unwrap_or(Activation::GeluTanh.name())));
    let config = &Config { values: &values, ..*config };
    let dense = DenseFeed {
        intermediate_size: config.size("intermediate_size", MOST)?,
        activation: config.activation()?,
        gated: true,
        bias: false,
    };
    if !config.flag("enable_moe_block", false) {
        return Ok(Feed(dense, None));
    }
    let count = config.size("num_experts", MOST)?;
    let beside =
        Experts { beside: true, normalise: true, ..experts(config, count, Routing::SOFTMAX)? };
    check_count(&beside, layers)?;
    Ok(Feed(dense, Some(beside)))
}

fn layer_inputs(config: &Config<'_>) -> Result<Option<LayerInputs>, ModelError> {
    const SIZE: u64 = 256;
    let size = config.number_or("hidden_size_per_layer_input", SIZE, MOST)? as usize;
    if size == 0 {
        return Ok(None);
    }
    let vocab_size = match config.optional("vocab_size_per_layer_input", MOST)? {
        Some(size) => size as usize,
        None => config.size("vocab_size", MOST)?,
    };
    Ok(Some(LayerInputs { vocab_size, size }))
}
