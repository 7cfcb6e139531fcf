//! MiniMax M2: norms over all heads of queries and keys, and experts under Mixtral's names.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::experts::Routing;
use super::gguf::{GgufNames, grouped_keys, refuse_changes, required, scores};
use super::mixtral::{RULES, normalised};
use super::rope::partial_rope;
use super::shape::{Attention, QkNorm, Shape};
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::MOST_HEADS;

pub(super) const FAMILY: Family = Family {
    title: "MiniMax M2",
    architecture: "MiniMaxM2ForCausalLM",
    model_type: "minimax_m2",
    attention: "grouped-query, half of a head rotated",
    layers: "experts",
    compiled: true,
    shape,
    gguf: Some(GgufNames { architecture: "minimax-m2", fits: |_| Ok(true), keys, rules: &[] }),
    rules: RULES,
};

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    config.only("scoring_func", &["sigmoid"])?;
    let attention = config.attention(None)?;
    let with_norms = config.flag("use_qk_norm", true);
    let attention =
        Attention { qk_norm: if with_norms { QkNorm::Rows } else { QkNorm::None }, ..attention };
    let rotated = config.optional("rotary_dim", MOST_HEADS)?;
    let usual = rotated.map_or(1.0, |rotated| rotated as f64 / attention.head_dim as f64);
    let rope = partial_rope(config, attention.head_dim, usual)?;
    let layers = config.layer_count()?;
    // The router's logits have the model's data type, and experts are not grouped.
    let routing = Routing { in_float32: false, best_of_group: 1, ..Routing::corrected(1, 1) };
    let feeds = config.feeds(&vec![true; layers], || normalised(config, routing))?;
    config.grouped(attention, rope, vec![None; layers], feeds)
}

fn keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let mut keys = grouped_keys(files, true)?;
    let of_experts = json!({
        "num_local_experts": required(files, "expert_count")?,
        "num_experts_per_tok": required(files, "expert_used_count")?,
        "intermediate_size": required(files, "expert_feed_forward_length")?,
        "scoring_func": scores(files, "sigmoid")?,
    });
    keys.extend(of_experts.as_object().cloned().unwrap_or_default());
    Ok(keys)
}
