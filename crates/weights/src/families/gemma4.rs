//! The text part of Gemma 4. Heads have two sizes, values may be equal to keys, and some layers
//! read the keys and values of other layers. Each layer has an additional embedding input. Experts
//! run beside a dense feed-forward part.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::{Experts, Routing, check_count, experts};
use super::gemma2::{GGUF_RULES, cap};
use super::gguf::{GgufNames, frequency_factors, of_layers, required, whole};
use super::rope::{RopeKind, rope_of_kind};
use super::rules::{Rule, Take, joined};
use super::shape::{
    Activation, Attention, DenseFeed, FeedShape, LayerInputs, Mixer, NormPlacement, QkNorm, Shape,
};
use super::text;
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::{MOST, MOST_HEADS, MOST_LAYERS, optional};

/// Every sixth layer attends to all positions.
const CYCLE: u64 = 6;
/// The fraction of a head that RoPE rotates in layers without a window.
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
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "gemma4",
        fits: |_| Ok(true),
        keys: file_keys,
        rules: &FILE_RULES,
    }),
    rules: RULES,
};

/// Repositories with towers. The towers' weights are not read.
pub(super) const TEXT: Family = Family {
    title: "Gemma 4 with towers (text)",
    architecture: "Gemma4ForConditionalGeneration",
    model_type: "gemma4",
    shape: |config| shape(&Config { values: &text::text_config(config), ..*config }),
    gguf: None,
    rules: &TEXT_RULES,
    ..FAMILY
};

/// Repositories whose decoder reads raw image patches. Images are not supported for them.
pub(super) const UNIFIED: Family = Family {
    title: "Gemma 4 without towers (text)",
    architecture: "Gemma4UnifiedForConditionalGeneration",
    model_type: "gemma4_unified",
    layers: "dense",
    shape: |config| {
        let mut values = text::text_config(config);
        // The text config in these repositories omits default values.
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

/// Rules for GGUF files, which store norm weights in the same form as the family's safetensors.
const FILE_RULES: [Rule; GGUF_RULES.len() + OF_FILES.len()] = joined(GGUF_RULES, OF_FILES);
const OF_FILES: &[Rule] = &[
    Rule::renamed("per_layer_token_embd.*", "model.embed_tokens_per_layer.*"),
    Rule::renamed("per_layer_model_proj.*", "model.per_layer_model_projection.*"),
    Rule::renamed("per_layer_proj_norm.*", "model.per_layer_projection_norm.*"),
    Rule::renamed("blk.#.inp_gate.*", "model.layers.#.per_layer_input_gate.*"),
    Rule::renamed("blk.#.proj.*", "model.layers.#.per_layer_projection.*"),
    Rule::renamed("blk.#.post_norm.*", "model.layers.#.post_per_layer_input_norm.*"),
    Rule::renamed("blk.#.layer_output_scale.weight", "model.layers.#.layer_scalar"),
    Rule::new("blk.#.attn_k.*", "model.layers.#.self_attn.k_proj.*", OWN_KEYS),
    Rule::new("blk.#.attn_v.*", "model.layers.#.self_attn.v_proj.*", OWN_KEYS),
    Rule::new("blk.#.attn_k_norm.*", "model.layers.#.self_attn.k_norm.*", OWN_KEYS),
    Rule::new("blk.#.ffn_gate.*", "model.layers.#.mlp.gate_proj.*", ALONE),
    Rule::new("blk.#.ffn_up.*", "model.layers.#.mlp.up_proj.*", ALONE),
    Rule::new("blk.#.ffn_down.*", "model.layers.#.mlp.down_proj.*", ALONE),
    Rule::new("blk.#.ffn_gate.*", "model.layers.#.mlp.shared_experts.gate_proj.*", BESIDE),
    Rule::new("blk.#.ffn_up.*", "model.layers.#.mlp.shared_experts.up_proj.*", BESIDE),
    Rule::new("blk.#.ffn_down.*", "model.layers.#.mlp.shared_experts.down_proj.*", BESIDE),
    Rule::renamed("blk.#.ffn_gate_inp.scale", "model.layers.#.mlp.gate.scale"),
    Rule::renamed("blk.#.ffn_down_exps.scale", "model.layers.#.mlp.gate.per_expert_scale"),
    Rule::renamed("blk.#.pre_ffw_norm_2.*", "model.layers.#.mlp.experts_layernorm.*"),
    Rule::renamed("blk.#.post_ffw_norm_1.*", "model.layers.#.mlp.post_shared_layernorm.*"),
    Rule::renamed("blk.#.post_ffw_norm_2.*", "model.layers.#.mlp.post_experts_layernorm.*"),
];
/// Takes a tensor only in layers that do not reuse another layer's keys and values. Some files have
/// unused key and value tensors in the other layers.
const OWN_KEYS: Take = Take::ALL.only(|shape, layer| shape.layers[layer].keys_of.is_none());
const ALONE: Take = Take::ALL.only(|shape, layer| shape.experts(layer).is_none());
const BESIDE: Take = Take::ALL.only(|shape, layer| shape.experts(layer).is_some());

const fn keys(name: &'static str) -> Rule {
    Rule::new(name, name, OWN_KEYS)
}

const fn dense(name: &'static str) -> Rule {
    Rule::new(name, name, ALONE)
}

const fn beside(name: &'static str, weight: &'static str) -> Rule {
    Rule::new(name, weight, BESIDE)
}

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    if config.get("use_bidirectional_attention").and_then(Value::as_str) == Some("all") {
        return Err(ModelError::unserved_part("bidirectional attention"));
    }
    let mut values = config.values.clone();
    // A text config nested in a multimodal config may omit default values.
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
    // The last layer has no window, whatever the config states.
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

/// Returns the attention of a layer. The caller sets the window.
fn attention(config: &Config<'_>, layer: usize, is_local: bool) -> Result<Attention, ModelError> {
    const HEAD_DIM: u64 = 256;
    const GLOBAL_HEAD_DIM: u64 = 512;
    let mut values = config.values.clone();
    let keys_are_values = !is_local && config.flag("attention_k_eq_v", false);
    if !is_local {
        // Layers without a window have other sizes. Configs on the hub state them under separate
        // names, and transformers 5 saves them by layer number.
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

/// The feed-forward part of a layer: a dense part, and experts if there are any.
struct Feed(DenseFeed, Option<Experts>);

impl Feed {
    /// Returns the part for one layer. If `wide`, its dense part has twice the inner size.
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

/// Returns the config keys of a GGUF file. Values that differ between layers are lists.
fn file_keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let is_local: Vec<bool> =
        of_layers(files, "attention.sliding_window_pattern")?.iter().map(|&it| it != 0).collect();
    let own = is_local.len() as i64 - whole(files, "attention.shared_kv_layers")?.unwrap_or(0);
    let whole_dim = head_dim(files, "")?.unwrap_or(0);
    let local_dim = head_dim(files, "_swa")?.unwrap_or(whole_dim);
    let heads = of_layers(files, "attention.head_count_kv")?;
    let of_kind = |local: bool| -> Result<Option<i64>, ModelError> {
        let mut found = heads.iter().zip(&is_local).filter(|(_, it)| **it == local).map(|it| *it.0);
        let first = found.next();
        match found.any(|other| Some(other) != first) {
            true => Err(ModelError::unserved_part("an attention.head_count_kv of several kinds")),
            false => Ok(first),
        }
    };
    let (local_heads, whole_heads) = (of_kind(true)?, of_kind(false)?);
    let keys_are_values = keys_are_values(files, &is_local, own)?;
    if !keys_are_values
        && local_heads.is_some()
        && whole_heads.is_some_and(|it| Some(it) != local_heads)
    {
        return Err(ModelError::unserved_part("an attention.head_count_kv of several kinds"));
    }
    let (intermediate_size, is_wide) = feed_sizes(files, own)?;
    let table = files.tensor("per_layer_token_embd.weight");
    let kind = |&local: &bool| if local { LOCAL.layer } else { WHOLE.layer };
    let mut keys = json!({
        "num_attention_heads": required(files, "attention.head_count")?,
        "num_key_value_heads": local_heads.or(whole_heads),
        "num_global_key_value_heads": whole_heads,
        "head_dim": local_dim,
        "global_head_dim": whole_dim,
        "layer_types": is_local.iter().map(kind).collect::<Vec<_>>(),
        "num_kv_shared_layers": is_local.len() as i64 - own,
        "attention_k_eq_v": keys_are_values,
        "intermediate_size": intermediate_size,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": whole(files, "embedding_length_per_layer_input")?.unwrap_or(0),
        "vocab_size_per_layer_input": table.and_then(|table| table.shape.first().copied()),
        "rope_parameters": file_ropes(files, whole_dim)?,
        "final_logit_softcapping": files.get("final_logit_softcapping").and_then(GgufValue::as_f64),
        "hidden_activation": Activation::GeluTanh.name(),
    });
    let experts = whole(files, "expert_count")?.unwrap_or(0);
    if experts > 0 {
        keys["enable_moe_block"] = json!(true);
        keys["num_experts"] = json!(experts);
        keys["top_k_experts"] = json!(required(files, "expert_used_count")?);
        keys["moe_intermediate_size"] = json!(required(files, "expert_feed_forward_length")?);
    }
    Ok(keys.as_object().cloned().unwrap_or_default())
}

/// Reads the head size from the metadata keys that end with `end`. Checks that value heads have the
/// same size and that all elements are rotated.
fn head_dim(files: &GgufFiles, end: &str) -> Result<Option<i64>, ModelError> {
    let read = |key: &str| whole(files, &format!("{key}{end}"));
    let dim = read("attention.key_length")?;
    for (key, what) in [
        ("attention.value_length", "keys and values of different lengths"),
        ("rope.dimension_count", "heads that are rotated in part"),
    ] {
        if read(key)?.is_some_and(|other| Some(other) != dim) {
            return Err(ModelError::unserved_part(what));
        }
    }
    Ok(dim)
}

/// True if layers without a window use their keys as values. Only layers below `own` are checked:
/// the rest read the values of other layers.
fn keys_are_values(files: &GgufFiles, is_local: &[bool], own: i64) -> Result<bool, ModelError> {
    let whole = is_local.iter().enumerate().take(own.max(0) as usize).filter(|(_, local)| !**local);
    let mut lack = whole.map(|(at, _)| files.tensor(&format!("blk.{at}.attn_v.weight")).is_none());
    let first = lack.next().unwrap_or(false);
    match lack.any(|other| other != first) {
        true => Err(ModelError::unserved_part("values that are keys in some layers")),
        false => Ok(first),
    }
}

/// Returns the inner size of the dense part, and true if it is doubled in layers from `own` on.
fn feed_sizes(files: &GgufFiles, own: i64) -> Result<(i64, bool), ModelError> {
    let sizes = of_layers(files, "feed_forward_length")?;
    let (first, last) = (sizes.first().copied(), sizes.last().copied());
    let (first, last) = (first.unwrap_or(0), last.unwrap_or(0));
    let is_wide = last != first;
    let fits = |(layer, &size): (i64, &i64)| {
        size == if is_wide && layer >= own { 2 * first } else { first }
    };
    match (0..).zip(&sizes).all(fits) {
        true => Ok((first, is_wide)),
        false => Err(ModelError::unserved_part("a feed_forward_length of several kinds")),
    }
}

/// Returns the rotary embeddings of both kinds of layers. In the file, pairs that are not rotated
/// have a divisor of at least `ENDLESS`.
fn file_ropes(files: &GgufFiles, dim: i64) -> Result<Value, ModelError> {
    const ENDLESS: f64 = 1e20;
    let base = |key: &str, kind: &RopeKind| {
        files.get(key).and_then(GgufValue::as_f64).unwrap_or(kind.usual)
    };
    let turned = match files.tensor("rope_freqs.weight") {
        None => dim / 2,
        Some(tensor) => {
            let factors = frequency_factors(tensor, dim)?;
            let turned = factors.iter().take_while(|&&factor| factor == 1.0).count();
            if factors[turned..].iter().any(|&factor| factor < ENDLESS) {
                return Err(ModelError::unserved_part(
                    "frequency factors in rope_freqs.weight that are not those of Gemma 4",
                ));
            }
            turned as i64
        }
    };
    // The code that reads this factor rounds the number of pairs down.
    let part = 2.0 * turned as f64 / dim as f64;
    let exact = (dim as f64 * part / 2.0).floor() as i64 == turned;
    Ok(json!({
        WHOLE.layer: {
            "rope_type": "proportional",
            "partial_rotary_factor": if exact { part } else { part.next_up() },
            "rope_theta": base("rope.freq_base", &WHOLE),
        },
        LOCAL.layer: {"rope_type": "default", "rope_theta": base("rope.freq_base_swa", &LOCAL)},
    }))
}
