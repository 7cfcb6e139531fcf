//! GLM-4.5 to GLM-4.7.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::{Config, WindowRule};
use super::experts::Routed;
use super::gguf::{GgufNames, grouped_keys, refuse_changes, routed_keys, scores};
use super::rope::partial_rope;
use super::rules::Rule;
use super::shape::{Attention, QkNorm, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;

const ROUTED: Routed =
    Routed { first_dense: 1, shared: 1, normalise: true, groups: 1, kept: 1, scaling: 1.0 };

/// The fraction of a head that RoPE rotates.
const ROTATED: f64 = 0.5;

pub(super) const FAMILY: Family = Family {
    title: "GLM-4.5, GLM-4.6",
    architecture: "Glm4MoeForCausalLM",
    model_type: "glm4_moe",
    attention: "grouped-query, half of a head rotated",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "glm4moe",
        fits: |_| Ok(true),
        keys,
        // Here a tensor of this name is the norm before the feed-forward part. In Gemma's files, it
        // is the norm after the attention.
        rules: &[Rule::renamed(
            "blk.#.post_attention_norm.*",
            "model.layers.#.post_attention_layernorm.*",
        )],
    }),
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let with_norms = config.flag("use_qk_norm", false);
    let attention = Attention {
        qk_norm: if with_norms { QkNorm::Heads } else { QkNorm::None },
        output_bias: false,
        ..config.attention(None)?
    };
    let rope = partial_rope(config, attention.head_dim, ROTATED)?;
    let windows = config.windows(WindowRule::All)?;
    let feeds = config.feeds(&ROUTED.layers(config)?, || ROUTED.corrected(config))?;
    config.grouped(attention, rope, windows, feeds)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let mut keys = grouped_keys(files, true)?;
    keys.extend(routed_keys(files, scores(files, "sigmoid")?)?);
    let norms = files.tensor("blk.0.attn_q_norm.weight").is_some();
    keys.insert("use_qk_norm".into(), json!(norms));
    Ok(keys)
}
