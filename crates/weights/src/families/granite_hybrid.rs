//! Granite 4 without recurrent layers. Its GGUF files are those of Granite 3.

use serde_json::{Map, Value};

use super::Family;
use super::config::Config;
use super::granite::{attention, scales};
use super::rope::rope;
use super::rules::{Rule, Take};
use super::shape::{Mixer, Shape};
use crate::error::ModelError;
use crate::sizes::MOST;

pub(super) const FAMILY: Family = Family {
    title: "Granite 4 (dense)",
    architecture: "GraniteMoeHybridForCausalLM",
    model_type: "granitemoehybrid",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape,
    gguf: None,
    rules: &[
        Rule::new(INPUT, "model.layers.#.mlp.gate_proj.*", Take::ALL.share(0, 2)),
        Rule::new(INPUT, "model.layers.#.mlp.up_proj.*", Take::ALL.share(1, 2)),
        Rule::renamed(
            "model.layers.#.shared_mlp.output_linear.*",
            "model.layers.#.mlp.down_proj.*",
        ),
    ],
};
const INPUT: &str = "model.layers.#.shared_mlp.input_linear.*";

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let count = config.layer_count()?;
    let kinds = config.get("layer_types").or_else(|| config.get("layers_block_type"));
    let attends = |kind: &Value| matches!(kind.as_str(), Some("attention" | "full_attention"));
    let kinds = kinds.and_then(Value::as_array);
    if !kinds.is_some_and(|kinds| kinds.len() == count && kinds.iter().all(attends)) {
        return Err(ModelError::unserved_part(
            "recurrent layers (layer_types): try --model-impl transformers",
        ));
    }
    if config.number_or("num_local_experts", 8, MOST)? > 0 {
        return Err(ModelError::unserved_part(
            "experts in GraniteMoeHybridForCausalLM: try --model-impl transformers",
        ));
    }
    let values: Map<String, Value> =
        config.renamed(&[("shared_intermediate_size", "intermediate_size")]);
    let config = &Config { values: &values, ..*config };
    let attention = attention(config)?;
    let rotated = config.get("position_embedding_type").and_then(Value::as_str) == Some("rope");
    let rope = rope(config, attention.head_dim)?;
    let ropes = vec![rotated.then_some(rope); count];
    let feeds = vec![config.dense()?; count];
    let shape = config.decoder(vec![Mixer::Attention(attention); count], ropes, feeds)?;
    Ok(Shape { scales: scales(config)?, ..shape })
}
