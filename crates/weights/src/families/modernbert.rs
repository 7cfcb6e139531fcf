//! `ModernBERT` (Warner et al. 2024) and derived models: attention is bidirectional, every third
//! layer has no window, and the first layer has no norm before its attention.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::rope::{RopeKind, rope_of_kind};
use super::rules::{Rule, Take, fused_keys, fused_queries, fused_values};
use super::shape::{
    Activation, Attention, DenseFeed, FeedShape, Mixer, Norm, NormPlacement, Shape,
};
use crate::error::ModelError;
use crate::sizes::{MOST, MOST_LAYERS, MOST_POSITIONS, size};
use crate::vector::{VectorActivation, VectorLayer};

/// Every third layer has no window, if the config does not list the layers' kinds.
const CYCLE: u64 = 3;
/// The default number of positions in a window, counted on both sides.
const LOCAL_ATTENTION: u64 = 128;
const ACTIVATION: &str = "gelu";
const LOCAL: RopeKind = RopeKind {
    layer: "sliding_attention",
    theta: "local_rope_theta",
    usual: 10_000.0,
    scaled: true,
};
const WHOLE: RopeKind = RopeKind {
    layer: "full_attention",
    theta: "global_rope_theta",
    usual: 160_000.0,
    scaled: true,
};

pub(super) const FAMILY: Family = Family {
    title: "ModernBERT",
    architecture: "ModernBertModel",
    model_type: "modernbert",
    attention: "multi-head both ways, windows in two of three layers",
    layers: "dense",
    compiled: true,
    shape,
    gguf: None,
    rules: RULES,
};

/// Rerankers and classifiers.
pub(super) const SCORES: Family = Family {
    title: "ModernBERT rerankers, classifiers",
    architecture: "ModernBertForSequenceClassification",
    ..FAMILY
};

const RULES: &[Rule] = &[
    Rule::renamed("model.embeddings.tok_embeddings.*", "model.embed_tokens.*"),
    Rule::renamed("model.embeddings.norm.*", "model.embed_norm.*"),
    Rule::renamed("model.final_norm.*", "model.norm.*"),
    Rule::renamed("model.layers.#.attn_norm.*", "model.layers.#.input_layernorm.*"),
    Rule::renamed("model.layers.#.mlp_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::new(FUSED, "model.layers.#.self_attn.q_proj.*", Take::ALL.rows(fused_queries)),
    Rule::new(FUSED, "model.layers.#.self_attn.k_proj.*", Take::ALL.rows(fused_keys)),
    Rule::new(FUSED, "model.layers.#.self_attn.v_proj.*", Take::ALL.rows(fused_values)),
    Rule::renamed("model.layers.#.attn.Wo.*", "model.layers.#.self_attn.o_proj.*"),
    Rule::new(INNER, "model.layers.#.mlp.gate_proj.*", Take::ALL.share(0, 2)),
    Rule::new(INNER, "model.layers.#.mlp.up_proj.*", Take::ALL.share(1, 2)),
    Rule::renamed("model.layers.#.mlp.Wo.*", "model.layers.#.mlp.down_proj.*"),
    // Models without a language-model head may store these names with the prefix `model.` added.
    Rule::renamed("model.head.dense.*", "head.dense.*"),
    Rule::renamed("model.head.norm.*", "head.norm.*"),
    Rule::renamed("model.classifier.*", "classifier.*"),
];
const FUSED: &str = "model.layers.#.attn.Wqkv.*";
const INNER: &str = "model.layers.#.mlp.Wi.*";

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    if config.flag("norm_bias", false) {
        return Err(ModelError::unserved_part("norms that have biases (norm_bias)"));
    }
    let cycle = config.optional("global_attn_every_n_layers", MOST_LAYERS)?.unwrap_or(CYCLE);
    let layers = config.layer_count()?;
    let is_local: Vec<bool> = match config.get("layer_types").and_then(Value::as_array) {
        None => (0..layers as u64).map(|layer| !layer.is_multiple_of(cycle)).collect(),
        Some(kinds) => config.kinds_of_layers(kinds, LOCAL.layer, WHOLE.layer)?,
    };
    let local = config.optional("local_attention", MOST_POSITIONS)?.unwrap_or(LOCAL_ATTENTION);
    let attention = Attention { both_ways: true, ..config.attention(None)? };
    let mixer = |&is_local: &bool| {
        // The config's window counts positions on both sides, while a shape's window counts one
        // side.
        let window = is_local.then_some(local / 2 + 1);
        Mixer::Attention(Attention { window, ..attention })
    };
    let [near, far] = [LOCAL, WHOLE].map(|kind| rope_of_kind(config, &kind, attention.head_dim));
    let (near, far) = (near?, far?);
    let rope = |&is_local: &bool| Some(if is_local { near.clone() } else { far.clone() });
    let name = config.get("hidden_activation").and_then(Value::as_str).unwrap_or(ACTIVATION);
    let activation = Activation::from_name(name).ok_or_else(|| {
        ModelError::unserved_part(&format!("the activation hidden_activation {name:?}"))
    })?;
    let feed = FeedShape::Dense(DenseFeed {
        intermediate_size: config.size("intermediate_size", MOST)?,
        activation,
        gated: true,
        bias: config.flag("mlp_bias", false),
    });
    let mixers = is_local.iter().map(mixer).collect();
    let ropes = is_local.iter().map(rope).collect();
    let mut shape = config.decoder(mixers, ropes, vec![feed; layers])?;
    shape.norm = Norm::Mean;
    shape.norm_eps = config.real("norm_eps", 1e-5)?;
    shape.embedding_norm = true;
    shape.tied = true;
    shape.layers[0].norms = NormPlacement::BeforeFeed;
    Ok(shape)
}

/// Returns the layers after pooling that compute `labels` scores.
pub(super) fn score_layers(
    config: &Map<String, Value>,
    labels: usize,
) -> Result<Vec<VectorLayer>, ModelError> {
    let hidden = size(config, "hidden_size", MOST)?;
    let name = config.get("classifier_activation").and_then(Value::as_str).unwrap_or(ACTIVATION);
    let activation = VectorActivation::from_name(name).ok_or_else(|| {
        ModelError::unserved_part(&format!("the activation classifier_activation {name:?}"))
    })?;
    let bias = config.get("classifier_bias") == Some(&json!(true));
    let dense = VectorLayer {
        name: "head.dense".into(),
        inputs: hidden,
        outputs: hidden,
        bias,
        activation,
        norm: Some("head.norm".into()),
        file: None,
    };
    let classifier = VectorLayer {
        name: "classifier".into(),
        outputs: labels,
        bias: true,
        activation: VectorActivation::Identity,
        norm: None,
        ..dense.clone()
    };
    Ok(vec![dense, classifier])
}
