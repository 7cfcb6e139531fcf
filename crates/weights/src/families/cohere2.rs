//! Command R7B and Command A: attention and feed-forward part of a layer read the same input, and
//! layers without a window have no rotary embedding.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::ernie4_5::NEIGHBOURS;
use super::gguf::{GgufNames, dense_keys};
use super::llama::PAIRED;
use super::rope::rope;
use super::shape::{Attention, Mixer, Norm, NormPlacement, Scales, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::MOST_LAYERS;

/// Every fourth layer has no window, if the config does not list the layers' kinds.
const CYCLE: u64 = 4;
const LOGIT_SCALE: f64 = 0.0625;

pub(super) const FAMILY: Family = Family {
    title: "Command R7B, Command A",
    architecture: "Cohere2ForCausalLM",
    model_type: "cohere2",
    attention: "grouped-query, windows in three of four layers, the others without rotation",
    layers: "dense, both parts beside each other",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "cohere2", fits: |_| Ok(true), keys, rules: PAIRED }),
    rules: NEIGHBOURS,
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let values = config.renamed(&[("layer_norm_eps", "rms_norm_eps")]);
    let config = &Config { values: &values, ..*config };
    if config.flag("use_qk_norm", false) {
        return Err(ModelError::unserved_part("norms of heads that subtract the mean"));
    }
    let attention = config.attention(None)?;
    let rope = rope(config, attention.head_dim)?;
    let cycle = config.optional("sliding_window_pattern", MOST_LAYERS)?.unwrap_or(CYCLE);
    let (windows, is_local) = config.cycle_of_windows(cycle)?;
    let feeds = vec![config.dense()?; windows.len()];
    let mixer = |window| Mixer::Attention(Attention { window, ..attention });
    let mixers = windows.into_iter().map(mixer).collect();
    let ropes = is_local.iter().map(|&is_local| is_local.then(|| rope.clone())).collect();
    let mut shape = config.decoder(mixers, ropes, feeds)?;
    shape.norm = Norm::Mean;
    shape.tied = config.flag("tie_word_embeddings", true);
    shape.scales = Scales { logits: config.real("logit_scale", LOGIT_SCALE)?, ..Scales::NONE };
    for layer in &mut shape.layers {
        layer.norms = NormPlacement::Parallel;
    }
    Ok(shape)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = dense_keys(files)?;
    let scale = files.get("logit_scale").and_then(GgufValue::as_f64).filter(|&it| it != 0.0);
    keys.insert("logit_scale".into(), json!(scale.unwrap_or(1.0)));
    Ok(keys)
}
