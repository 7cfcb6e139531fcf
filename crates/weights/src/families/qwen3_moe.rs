//! Qwen3 with experts.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::{Config, WindowRule};
use super::experts::{Experts, Routing, expert_count, experts};
use super::gguf::{GgufNames, changes, grouped_keys, refuse_changes, required, scores};
use super::rope::rope;
use super::shape::{Attention, QkNorm, Shape};
use crate::error::ModelError;
use crate::gguf::{GgufFiles, GgufValue};
use crate::sizes::MOST;

const COUNTS: [&str; 2] = ["num_experts", "num_local_experts"];

pub(super) const FAMILY: Family = Family {
    title: "Qwen3-MoE",
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    attention: "grouped-query",
    layers: "experts, some dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "qwen3moe", fits: |_| Ok(true), keys, rules: &[] }),
    rules: &[],
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    decoder(config, config.flag("norm_topk_prob", false))
}

/// Reads the decoder of a Qwen3-VL with experts. It always normalises the routing weights to sum to
/// 1.
pub(super) fn of_tower(config: &Config<'_>) -> Result<Shape, ModelError> {
    decoder(config, true)
}

fn decoder(config: &Config<'_>, normalise: bool) -> Result<Shape, ModelError> {
    config.only("scoring_func", &["softmax"])?;
    let attention = Attention { qk_norm: QkNorm::Heads, ..config.attention(None)? };
    let rope = rope(config, attention.head_dim)?;
    let windows = config.windows(WindowRule::Upper)?;
    let (count, sparse) = sparse_layers(config)?;
    let feeds = config.feeds(&sparse, || {
        Ok(Experts { normalise, ..experts(config, count, Routing::SOFTMAX)? })
    })?;
    config.grouped(attention, rope, windows, feeds)
}

/// Returns the number of experts, and whether each layer has experts.
pub(super) fn sparse_layers(config: &Config<'_>) -> Result<(usize, Vec<bool>), ModelError> {
    let count = expert_count(config, &COUNTS)?;
    let dense = config.get("mlp_only_layers").and_then(Value::as_array);
    let step = config.optional("decoder_sparse_step", MOST)?.unwrap_or(1);
    let is_sparse = |layer: u64| {
        let named = dense.is_some_and(|it| it.iter().any(|it| it.as_u64() == Some(layer)));
        count > 0 && !named && (layer + 1).is_multiple_of(step)
    };
    Ok((count, (0..config.layer_count()? as u64).map(is_sparse).collect()))
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    if files.get("expert_weights_scale").is_some_and(changes) {
        return Err(ModelError::unserved_part("weights of experts with a scale"));
    }
    let mut keys = grouped_keys(files, false)?;
    // Files do not state whether routing weights are normalised. llama.cpp always normalises them.
    let normalise = files.get("expert_weights_norm").is_none_or(GgufValue::truthy);
    keys.extend([
        ("num_experts".to_owned(), json!(required(files, "expert_count")?)),
        ("num_experts_per_tok".to_owned(), json!(required(files, "expert_used_count")?)),
        ("moe_intermediate_size".to_owned(), json!(required(files, "expert_feed_forward_length")?)),
        ("norm_topk_prob".to_owned(), json!(normalise)),
        ("scoring_func".to_owned(), json!(scores(files, "softmax")?)),
    ]);
    Ok(keys)
}
