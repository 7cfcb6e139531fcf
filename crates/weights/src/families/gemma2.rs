//! Gemma 2, and the code that it shares with Gemma 3.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys, required};
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::{
    Activation, Attention, DenseFeed, FeedShape, Mixer, Norm, NormPlacement, QkNorm, Rope, Shape,
};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::{MOST, MOST_POSITIONS, real};

/// The head size, if the config does not give it.
pub(super) const HEAD_DIM: u64 = 256;
/// The activation of the feed-forward part, if the config does not state it.
const ACTIVATION: &str = "gelu_pytorch_tanh";
const WINDOW: &str = "sliding_window";
/// Every second layer attends to all positions.
const CYCLE: u64 = 2;
/// The number of layers of the 27B model, in which `query_pre_attn_scalar` is the hidden size
/// divided by the number of heads.
const LARGEST: i64 = 46;

pub(super) const FAMILY: Family = Family {
    title: "Gemma 2",
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    attention: "grouped-query, windows in every second layer",
    layers: "dense",
    compiled: true,
    shape: |config| {
        let caps = [
            cap(config, "attn_logit_softcapping", 50.0)?,
            cap(config, "final_logit_softcapping", 30.0)?,
        ];
        let kind = Gemma { cycle: CYCLE, caps, qk_norm: QkNorm::None };
        kind.shape(config, |dim| Ok([rope(config, dim)?, rope(config, dim)?]))
    },
    gguf: Some(GgufNames {
        architecture: "gemma2",
        fits: |_| Ok(true),
        keys: |files| {
            let mut keys = keys(files, LARGEST)?;
            for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
                let cap = files.get(key).and_then(GgufValue::as_f64);
                keys.extend(cap.map(|cap| (key.to_owned(), json!(cap))));
            }
            Ok(keys)
        },
        rules: GGUF_RULES,
    }),
    rules: RULES,
};

/// The parameters in which Gemma 2 and Gemma 3 differ.
pub(super) struct Gemma {
    /// Every `cycle`-th layer has no window.
    pub(super) cycle: u64,
    /// The soft caps of attention scores and of logits.
    pub(super) caps: [Option<f64>; 2],
    pub(super) qk_norm: QkNorm,
}

impl Gemma {
    /// Reads the shape. `ropes` returns the rotary embeddings of layers with and without a window,
    /// given the head size.
    pub(super) fn shape(
        &self,
        config: &Config<'_>,
        ropes: impl FnOnce(usize) -> Result<[Rope; 2], ModelError>,
    ) -> Result<Shape, ModelError> {
        let both_ways = config.flag("use_bidirectional_attention", false);
        let mut values = config.values.clone();
        if both_ways && config.get(WINDOW).is_some_and(|window| !window.is_null()) {
            // This config's window counts positions on both sides, while a shape's window counts
            // one side.
            let window = config.number_or(WINDOW, 0, MOST_POSITIONS)?;
            values.insert(WINDOW.into(), json!(window / 2 + 1));
        }
        let config = &Config { values: &values, ..*config };
        let [cap, logit_cap] = self.caps;
        let base = config.real("query_pre_attn_scalar", HEAD_DIM as f64)?;
        let attention = Attention {
            scale: Some(base.powf(-0.5)),
            cap,
            qk_norm: self.qk_norm,
            both_ways,
            ..config.attention(Some(HEAD_DIM))?
        };
        let [local, whole] = ropes(attention.head_dim)?;
        let (windows, is_local) = config.cycle_of_windows(self.cycle)?;
        let name = config.get("hidden_activation").and_then(Value::as_str).unwrap_or(ACTIVATION);
        let activation = Activation::from_name(name).ok_or_else(|| {
            ModelError::unserved_part(&format!("the activation hidden_activation {name:?}"))
        })?;
        let feed = FeedShape::Dense(DenseFeed {
            intermediate_size: config.size("intermediate_size", MOST)?,
            activation,
            gated: true,
            bias: false,
        });
        let feeds = vec![feed; windows.len()];
        let mixer = |&window: &Option<u64>| Mixer::Attention(Attention { window, ..attention });
        let mixers = windows.iter().map(mixer).collect();
        let rope = |&is_local: &bool| Some(if is_local { local.clone() } else { whole.clone() });
        let mut shape = config.decoder(mixers, is_local.iter().map(rope).collect(), feeds)?;
        shape.norm = Norm::RmsBesideOne;
        shape.scales.embeddings = (shape.hidden_size as f64).sqrt();
        shape.scales.logit_cap = logit_cap;
        shape.tied = config.flag("tie_word_embeddings", true);
        for layer in &mut shape.layers {
            layer.norms = NormPlacement::Around;
        }
        Ok(shape)
    }
}

/// Reads a soft cap that may be null; `usual` if the config does not state it.
pub(super) fn cap(config: &Config<'_>, key: &str, usual: f64) -> Result<Option<f64>, ModelError> {
    match config.get(key) {
        None => Ok(Some(usual).filter(|&cap| cap != 0.0)),
        Some(Value::Null) => Ok(None),
        Some(_) => Ok(Some(real(config, key, 0.0)?).filter(|&cap| cap != 0.0)),
    }
}

/// Returns the config keys of a GGUF file. In a model with `largest` layers, attention scores are
/// scaled by the hidden size divided by the number of heads, as in llama.cpp.
pub(super) fn keys(files: &GgufFiles, largest: i64) -> Result<Map<String, Value>, ModelError> {
    let mut keys = dense_keys(files)?;
    let head_dim = keys.get("head_dim").and_then(Value::as_i64).unwrap_or(0);
    let base = match required(files, "block_count")? == largest {
        true => {
            required(files, "embedding_length")? / required(files, "attention.head_count")?.max(1)
        }
        false => head_dim,
    };
    keys.insert("query_pre_attn_scalar".into(), json!(base));
    keys.insert("hidden_act".into(), json!(ACTIVATION));
    keys.insert("hidden_activation".into(), json!(ACTIVATION));
    Ok(keys)
}

/// Norm weights are stored as differences from 1.
pub(super) const RULES: &[Rule] = &[
    norm("model.norm.weight"),
    norm("model.layers.#.input_layernorm.weight"),
    norm("model.layers.#.post_attention_layernorm.weight"),
    norm("model.layers.#.pre_feedforward_layernorm.weight"),
    norm("model.layers.#.post_feedforward_layernorm.weight"),
    norm("model.layers.#.self_attn.q_norm.weight"),
    norm("model.layers.#.self_attn.k_norm.weight"),
];

const fn norm(name: &'static str) -> Rule {
    Rule::new(name, name, Take::ALL.plus(1.0))
}

/// GGUF files store norm weights with the 1 added.
pub(super) const GGUF_RULES: &[Rule] = &[
    Rule::renamed("blk.#.post_attention_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::renamed("blk.#.ffn_norm.*", "model.layers.#.pre_feedforward_layernorm.*"),
    Rule::renamed("blk.#.post_ffw_norm.*", "model.layers.#.post_feedforward_layernorm.*"),
];
