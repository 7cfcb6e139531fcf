//! The text part of Llama 4: chunked attention, layers without rotary embedding, and experts whose
//! inputs are multiplied by the routing weights.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::ernie4_5::NEIGHBOURS;
use super::experts::{ExpertScores, Experts, Routing, check_count, expert_count, experts};
use super::gguf::{GgufNames, grouped_keys, required, whole};
use super::llama::PAIRED;
use super::rope::rope;
use super::rules::{Rule, Take, joined};
use super::shape::{Attention, DenseFeed, FeedShape, Mixer, QkNorm, QueryScale, Shape};
use super::text;
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::{MOST, MOST_LAYERS, MOST_POSITIONS, truthy};

/// Every fourth layer has no rotary embedding, if the config does not list the layers.
const INTERVAL: u64 = 4;

pub(super) const FAMILY: Family = Family {
    title: "Llama 4",
    architecture: "Llama4ForCausalLM",
    model_type: "llama4_text",
    attention: "grouped-query, chunks in three of four layers, the others without rotation",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "llama4", fits: |_| Ok(true), keys, rules: PAIRED }),
    rules: &RULES,
};

/// The family of repositories with a vision tower. The tower's weights are not read.
pub(super) const TEXT: Family = Family {
    title: "Llama 4 with a tower (text)",
    architecture: "Llama4ForConditionalGeneration",
    model_type: "llama4",
    shape: |config| shape(&Config { values: &text::text_config(config), ..*config }),
    gguf: None,
    rules: &TEXT_RULES,
    ..FAMILY
};

const TOWER: &[Rule] = &[Rule::spare("vision_model.**"), Rule::spare("model.vision_model.**")];
const WITH_TOWER: usize = text::RULES.len() + TOWER.len();
const TOWER_RULES: [Rule; WITH_TOWER] = joined(text::RULES, TOWER);
const TEXT_RULES: [Rule; WITH_TOWER + RULES.len()] = joined(&TOWER_RULES, &RULES);
const RULES: [Rule; NEIGHBOURS.len() + FEEDS.len()] = joined(NEIGHBOURS, FEEDS);

/// Experts' matrices are stored transposed: each row belongs to an input, not to an output.
const FEEDS: &[Rule] = &[
    Rule::renamed("model.layers.#.feed_forward.router.*", "model.layers.#.mlp.gate.*"),
    Rule::renamed("model.layers.#.feed_forward.gate_proj.*", "model.layers.#.mlp.gate_proj.*"),
    Rule::renamed("model.layers.#.feed_forward.up_proj.*", "model.layers.#.mlp.up_proj.*"),
    Rule::renamed("model.layers.#.feed_forward.down_proj.*", "model.layers.#.mlp.down_proj.*"),
    Rule::renamed(
        "model.layers.#.feed_forward.shared_expert.gate_proj.*",
        "model.layers.#.mlp.shared_experts.gate_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.feed_forward.shared_expert.up_proj.*",
        "model.layers.#.mlp.shared_experts.up_proj.*",
    ),
    Rule::renamed(
        "model.layers.#.feed_forward.shared_expert.down_proj.*",
        "model.layers.#.mlp.shared_experts.down_proj.*",
    ),
    Rule::new(
        "model.layers.#.feed_forward.experts.gate_up_proj",
        "model.layers.#.mlp.experts.@.gate_proj.weight",
        Take::EACH_EXPERT.transposed().share(0, 2),
    ),
    Rule::new(
        "model.layers.#.feed_forward.experts.gate_up_proj",
        "model.layers.#.mlp.experts.@.up_proj.weight",
        Take::EACH_EXPERT.transposed().share(1, 2),
    ),
    Rule::new(
        "model.layers.#.feed_forward.experts.down_proj",
        "model.layers.#.mlp.experts.@.down_proj.weight",
        Take::EACH_EXPERT.transposed(),
    ),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let mut values = config.values.clone();
    // A text config nested in a multimodal config may omit default values.
    for (key, usual) in [
        ("vocab_size", json!(202_048)),
        ("num_attention_heads", json!(40)),
        ("num_key_value_heads", json!(8)),
        ("head_dim", json!(128)),
        ("max_position_embeddings", json!(131_072)),
        ("intermediate_size", json!(8192)),
        ("num_local_experts", json!(16)),
        ("num_experts_per_tok", json!(1)),
        ("rms_norm_eps", json!(1e-5)),
        ("rope_theta", json!(500_000.0)),
    ] {
        values.entry(key).or_insert(usual);
    }
    let config = &Config { values: &values, ..*config };
    let attention = config.attention(None)?;
    let rope = rope(config, attention.head_dim)?;
    let layers = config.layer_count()?;
    let rotated = rotated_layers(config, layers)?;
    let chunked = match config.get("layer_types").and_then(Value::as_array) {
        None => rotated.clone(),
        Some(kinds) => config.kinds_of_layers(kinds, "chunked_attention", "full_attention")?,
    };
    let chunk = config.number_or("attention_chunk_size", 8192, MOST_POSITIONS)?;
    let longest = config.optional("max_position_embeddings", MOST_POSITIONS)?;
    let chunk = Some(chunk).filter(|&it| it > 0 && longest.is_none_or(|longest| it < longest));
    let query_scale = query_scale(config)?;
    let is_normed = config.flag("use_qk_norm", true);
    let mixer = |(&rotated, chunked): (&bool, bool)| {
        let qk_norm = if rotated && is_normed { QkNorm::Plain } else { QkNorm::None };
        let query_scale = query_scale.filter(|_| !rotated);
        let chunk = chunk.filter(|_| chunked);
        Mixer::Attention(Attention { qk_norm, query_scale, chunk, ..attention })
    };
    let mixers = rotated.iter().zip(chunked).map(mixer).collect();
    let ropes = rotated.iter().map(|&rotated| rotated.then(|| rope.clone())).collect();
    config.decoder(mixers, ropes, feeds(config, layers)?)
}

/// Returns true for each layer with a rotary embedding. The config's list has a 1 for these layers.
fn rotated_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let interval = config.optional("no_rope_layer_interval", MOST_LAYERS)?.unwrap_or(INTERVAL);
    let listed = config.get("no_rope_layers").and_then(Value::as_array);
    match listed.filter(|listed| !listed.is_empty()) {
        None => Ok((1..=layers as u64).map(|it| !it.is_multiple_of(interval)).collect()),
        Some(listed) if listed.len() < layers => Err(ModelError::broken(format!(
            "no_rope_layers names {} of {layers} layers",
            listed.len()
        ))),
        Some(listed) => Ok(listed[..layers].iter().map(|it| truthy(Some(it))).collect()),
    }
}

/// Returns the factor on queries in layers without rotary embedding. Positions are counted from 1.
fn query_scale(config: &Config<'_>) -> Result<Option<QueryScale>, ModelError> {
    if !config.flag("attn_temperature_tuning", true) {
        return Ok(None);
    }
    let every = config.optional("floor_scale", MOST_POSITIONS)?.unwrap_or(8192);
    Ok(Some(QueryScale { beta: config.real("attn_scale", 0.1)?, every, first: 1 }))
}

fn feeds(config: &Config<'_>, layers: usize) -> Result<Vec<FeedShape>, ModelError> {
    let step = config.optional("interleave_moe_layer_step", MOST_LAYERS)?.unwrap_or(1);
    let listed = config.get("moe_layers").and_then(Value::as_array);
    let is_sparse = |layer: usize| match listed {
        Some(listed) => listed.iter().any(|it| it.as_u64() == Some(layer as u64)),
        None => (layer as u64 + 1).is_multiple_of(step),
    };
    let sparse: Vec<bool> = (0..layers).map(is_sparse).collect();
    let values = config.renamed(&[("intermediate_size", "moe_intermediate_size")]);
    let config = &Config { values: &values, ..*config };
    let dense = FeedShape::Dense(DenseFeed {
        intermediate_size: config.number_or("intermediate_size_mlp", 16384, MOST)? as usize,
        activation: config.activation()?,
        gated: true,
        bias: false,
    });
    let routing = Routing { scores: ExpertScores::Sigmoid, ..Routing::SOFTMAX };
    let experts = experts(config, expert_count(config, &["num_local_experts"])?, routing)?;
    let experts =
        Experts { shared_size: experts.intermediate_size, weighs_inputs: true, ..experts };
    check_count(&experts, layers)?;
    let experts = FeedShape::Experts(experts);
    Ok(sparse.iter().map(|&sparse| if sparse { experts } else { dense }).collect())
}

/// Returns the config keys of a GGUF file. Three values are not in the file, and are constants as
/// in llama.cpp: the chunk size, the factor on queries, and whether heads are normalised. All
/// models normalise them, except the one with 128 experts. If the file states a window of 0, no
/// layer has chunks, and all layers have a rotary embedding.
fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    const WITHOUT_NORMS: i64 = 128;
    const CHUNK: i64 = 8192;
    let mut keys = grouped_keys(files, false)?;
    let experts = required(files, "expert_count")?;
    let interval = whole(files, "attention.sliding_window_pattern")?.unwrap_or(INTERVAL as i64);
    if interval != INTERVAL as i64 {
        return Err(ModelError::unserved_part(
            "chunks in other layers than those that are rotated",
        ));
    }
    let sees_all = whole(files, "attention.sliding_window")? == Some(0);
    let layers = required(files, "block_count")? as usize;
    let more = json!({
        "num_local_experts": experts,
        "num_experts_per_tok": required(files, "expert_used_count")?,
        "intermediate_size": required(files, "expert_feed_forward_length")?,
        "intermediate_size_mlp": required(files, "feed_forward_length")?,
        "interleave_moe_layer_step": required(files, "interleave_moe_layer_step")?,
        "use_qk_norm": experts != WITHOUT_NORMS,
        "attention_chunk_size": if sees_all { 0 } else { CHUNK },
        "attn_temperature_tuning": !sees_all,
        "no_rope_layers": if sees_all { vec![1; layers] } else { Vec::new() },
    });
    keys.extend(more.as_object().cloned().unwrap_or_default());
    Ok(keys)
}
