//! SmolLM3: Llama in which some layers have no rotary embedding.

use serde_json::Value;

use super::Family;
use super::config::{Config, WindowRule};
use super::gguf::{GgufNames, dense_keys};
use super::llama::PAIRED;
use super::rope::rope;
use super::shape::{Attention, Mixer, Shape};
use crate::error::ModelError;
use crate::sizes::{MOST, truthy};

/// Every fourth layer has no rotary embedding, if the config does not list the layers.
const INTERVAL: u64 = 4;

pub(super) const FAMILY: Family = Family {
    title: "SmolLM3",
    architecture: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    attention: "grouped-query, some layers without rotation",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "smollm3",
        fits: |_| Ok(true),
        keys: dense_keys,
        rules: PAIRED,
    }),
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = config.attention(None)?;
    let rope = rope(config, attention.head_dim)?;
    let windows = config.windows(WindowRule::Upper)?;
    let count = windows.len();
    let interval = config.optional("no_rope_layer_interval", MOST)?.unwrap_or(INTERVAL);
    let listed = config.get("no_rope_layers").and_then(Value::as_array);
    if let Some(listed) = listed.filter(|listed| listed.len() < count) {
        return Err(ModelError::broken(format!(
            "no_rope_layers names {} of {count} layers",
            listed.len()
        )));
    }
    // The config's list has a 1 for each layer with a rotary embedding.
    let is_rotated = |layer: usize| match listed {
        Some(listed) => truthy(listed.get(layer)),
        None => !(layer as u64 + 1).is_multiple_of(interval),
    };
    let ropes = (0..count).map(|layer| is_rotated(layer).then(|| rope.clone())).collect();
    let mixer = |window| Mixer::Attention(Attention { window, ..attention });
    let mixers = windows.into_iter().map(mixer).collect();
    config.decoder(mixers, ropes, vec![config.dense()?; count])
}
