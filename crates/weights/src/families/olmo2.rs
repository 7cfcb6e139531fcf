//! OLMo 2 and 3. Each layer has norms after the attention and after the feed-forward part. Queries
//! and keys are normalised over all heads. OLMo 3 has windows, and scales the rotary embedding only
//! in layers without a window.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gguf::{GgufNames, dense_keys, required};
use super::mistral::has_window;
use super::rope::{RopeKind, rope, rope_of_kind};
use super::rules::Rule;
use super::shape::{Attention, Mixer, NormPlacement, QkNorm, Rope, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};

/// Every fourth layer has no window, if the config does not list the layers' kinds.
const CYCLE: u64 = 4;
const LOCAL: RopeKind =
    RopeKind { layer: "sliding_attention", theta: "rope_theta", usual: 500_000.0, scaled: false };
const WHOLE: RopeKind = RopeKind { layer: "full_attention", scaled: true, ..LOCAL };
const PATTERN: &str = "attention.sliding_window_pattern";

pub(super) const FAMILY: Family = Family {
    title: "OLMo 2",
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    attention: "grouped-query, norms over all heads",
    layers: "dense",
    compiled: true,
    shape: |config| {
        let rope = rope(config, attention(config)?.head_dim)?;
        let layers = config.layer_count()?;
        shape(config, vec![None; layers], vec![Some(rope); layers])
    },
    gguf: Some(GgufNames {
        architecture: "olmo2",
        fits: |files| Ok(!has_window(files)),
        keys: dense_keys,
        rules: AFTER,
    }),
    rules: &[],
};

pub(super) const OLMO3: Family = Family {
    title: "OLMo 3",
    architecture: "Olmo3ForCausalLM",
    model_type: "olmo3",
    attention: "grouped-query, norms over all heads, windows in three of four layers",
    shape: |config| {
        let dim = attention(config)?.head_dim;
        let (local, whole) =
            (rope_of_kind(config, &LOCAL, dim)?, rope_of_kind(config, &WHOLE, dim)?);
        let (windows, is_local) = config.cycle_of_windows(CYCLE)?;
        let rope = |&is_local: &bool| Some(if is_local { local.clone() } else { whole.clone() });
        shape(config, windows, is_local.iter().map(rope).collect())
    },
    gguf: Some(GgufNames {
        architecture: "olmo2",
        fits: |files| Ok(has_window(files)),
        keys: windowed_keys,
        rules: AFTER,
    }),
    ..FAMILY
};

/// Rules for the norms after the attention and after the feed-forward part.
pub(super) const AFTER: &[Rule] = &[
    Rule::renamed("blk.#.post_attention_norm.*", "model.layers.#.post_attention_layernorm.*"),
    Rule::renamed("blk.#.post_ffw_norm.*", "model.layers.#.post_feedforward_layernorm.*"),
];

fn attention(config: &Config<'_>) -> Result<Attention, ModelError> {
    Ok(Attention { qk_norm: QkNorm::Rows, ..config.attention(None)? })
}

fn shape(
    config: &Config<'_>,
    windows: Vec<Option<u64>>,
    ropes: Vec<Option<Rope>>,
) -> Result<Shape, ModelError> {
    let attention = attention(config)?;
    let feeds = vec![config.dense()?; windows.len()];
    let mixer = |window| Mixer::Attention(Attention { window, ..attention });
    let mut shape = config.decoder(windows.into_iter().map(mixer).collect(), ropes, feeds)?;
    for layer in &mut shape.layers {
        layer.norms = NormPlacement::After;
    }
    Ok(shape)
}

/// Returns the config keys of a dense model whose GGUF file lists the layers with a window.
pub(super) fn windowed_keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = dense_keys(files)?;
    if let Some(pattern) = files.get(PATTERN).and_then(GgufValue::as_list) {
        let layers = required(files, "block_count")?;
        if pattern.len() as i64 != layers {
            return Err(ModelError::broken(format!(
                "{PATTERN} names {} of {layers} layers",
                pattern.len()
            )));
        }
        let kind = |it: &GgufValue| if it.truthy() { LOCAL.layer } else { WHOLE.layer };
        keys.insert("layer_types".into(), json!(pattern.iter().map(kind).collect::<Vec<_>>()));
    }
    Ok(keys)
}
