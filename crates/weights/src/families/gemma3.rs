//! Gemma 3, the text of it.

use serde_json::json;

use super::Family;
use super::config::Config;
use super::gemma2::{GGUF_RULES, Gemma, RULES, cap, keys};
use super::gguf::GgufNames;
use super::rope::{RopeKind, rope_of_kind};
use super::rules::{Rule, joined};
use super::shape::{QkNorm, Shape};
use super::text;
use crate::error::ModelError;
use crate::sizes::MOST_LAYERS;

/// Every sixth layer sees all positions.
const CYCLE: u64 = 6;
/// The number of layers of the size whose scores go by the hidden size (27B).
const LARGEST: i64 = 62;
const LOCAL: RopeKind = RopeKind {
    layer: "sliding_attention",
    theta: "rope_local_base_freq",
    usual: 10_000.0,
    scaled: false,
};
const WHOLE: RopeKind =
    RopeKind { layer: "full_attention", theta: "rope_theta", usual: 1_000_000.0, scaled: true };

pub(super) const FAMILY: Family = Family {
    title: "Gemma 3",
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    attention: "grouped-query, windows in five of six layers",
    layers: "dense",
    compiled: true,
    shape,
    gguf: Some(GgufNames {
        architecture: "gemma3",
        fits: |_| Ok(true),
        keys: |files| {
            let mut keys = keys(files, LARGEST)?;
            keys.insert("sliding_window_pattern".into(), json!(CYCLE));
            Ok(keys)
        },
        rules: GGUF_RULES,
    }),
    rules: RULES,
};

/// The repositories with a tower, which is not read.
pub(super) const TEXT: Family = Family {
    title: "Gemma 3 with a tower (text)",
    architecture: "Gemma3ForConditionalGeneration",
    model_type: "gemma3",
    shape: |config| {
        let mut values = text::text_config(config);
        // Such a config leaves out what is usual.
        for (key, usual) in [
            ("vocab_size", 262_208),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("sliding_window", 4096),
            ("max_position_embeddings", 131_072),
        ] {
            values.entry(key).or_insert_with(|| json!(usual));
        }
        shape(&Config { values: &values, ..*config })
    },
    gguf: None,
    rules: &TEXT_RULES,
    ..FAMILY
};
const TEXT_RULES: [Rule; text::RULES.len() + RULES.len()] = joined(text::RULES, RULES);

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let cycle = config.optional("sliding_window_pattern", MOST_LAYERS)?.unwrap_or(CYCLE);
    let caps =
        [cap(config, "attn_logit_softcapping", 0.0)?, cap(config, "final_logit_softcapping", 0.0)?];
    let kind = Gemma { cycle, caps, qk_norm: QkNorm::Heads };
    kind.shape(config, |dim| {
        Ok([rope_of_kind(config, &LOCAL, dim)?, rope_of_kind(config, &WHOLE, dim)?])
    })
}
