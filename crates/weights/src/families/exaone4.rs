//! EXAONE 4: norms after the attention and the feed-forward part, and on the queries and keys of
//! each head. In models with windows, layers without one have no rotary embedding.

use super::Family;
use super::config::Config;
use super::gguf::GgufNames;
use super::olmo2::{AFTER, windowed_keys};
use super::rope::rope;
use super::shape::{Attention, Mixer, NormPlacement, QkNorm, Shape};
use crate::error::ModelError;

/// Every fourth layer has no window, if the config does not list the layers' kinds.
const CYCLE: u64 = 4;

pub(super) const FAMILY: Family = Family {
    title: "EXAONE 4",
    architecture: "Exaone4ForCausalLM",
    model_type: "exaone4",
    attention: "grouped-query; 32B: windows in three of four layers, the others without rotation",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "exaone4",
        fits: |_| Ok(true),
        keys: windowed_keys,
        rules: AFTER,
    }),
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let attention = Attention { qk_norm: QkNorm::Heads, ..config.attention(None)? };
    let rope = rope(config, attention.head_dim)?;
    let (windows, is_local) = config.cycle_of_windows(CYCLE)?;
    let is_hybrid = config.get("sliding_window").is_some_and(|window| !window.is_null());
    let ropes = is_local.iter().map(|&local| (local || !is_hybrid).then(|| rope.clone())).collect();
    let feeds = vec![config.dense()?; windows.len()];
    let mixer = |window| Mixer::Attention(Attention { window, ..attention });
    let mut shape = config.decoder(windows.into_iter().map(mixer).collect(), ropes, feeds)?;
    for layer in &mut shape.layers {
        layer.norms = NormPlacement::After;
    }
    Ok(shape)
}
