//! Qwen3-VL: a vision tower and a Qwen3.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::qwen3;
use super::rules::Rule;
use super::shape::{RotarySections, Shape};
use crate::error::ModelError;
use crate::sizes::truthy;
use crate::vision::{TowerKind, VisionTower, has_tower};

pub(super) const FAMILY: Family = Family {
    title: "Qwen3-VL",
    architecture: "Qwen3VLForConditionalGeneration",
    model_type: "qwen3_vl",
    attention: "grouped-query, positions of three numbers; a tower with deepstack outputs",
    layers: "dense",
    compiled: false,
    shape: |config| with_tower(config, qwen3::shape, [24, 20, 20], TowerKind::Table),
    gguf: None,
    rules: RULES,
};

/// Rules that remove the prefix of a multimodal model, which newer checkpoints have.
pub(super) const RULES: &[Rule] = &[
    Rule::renamed("model.language_model.**", "model.**"),
    Rule::renamed("model.visual.**", "visual.**"),
];

/// Reads the shape of a decoder with a vision tower, if the config has one. `usual` is the default
/// of `mrope_section`. With Qwen2.5-VL's windowed tower, `tie_word_embeddings` may also be in the
/// nested text config, and the three sections of frequencies are consecutive rather than
/// interleaved.
pub(super) fn with_tower(
    config: &Config<'_>,
    decoder: fn(&Config<'_>) -> Result<Shape, ModelError>,
    usual: [usize; 3],
    kind: TowerKind,
) -> Result<Shape, ModelError> {
    let windowed = kind == TowerKind::Windows;
    let text = config.get("text_config").and_then(Value::as_object).cloned().unwrap_or_default();
    let mut flat: Map<String, Value> = (*config.values).clone();
    flat.retain(|key, _| !matches!(key.as_str(), "text_config" | "vision_config"));
    let tied = config.flag("tie_word_embeddings", false);
    let tied = tied || windowed && truthy(text.get("tie_word_embeddings"));
    // Older checkpoints do not nest the text config.
    flat.extend(text.into_iter().filter(|(_, value)| !value.is_null()));
    flat.insert("tie_word_embeddings".into(), json!(tied));
    let there = |key: &str| flat.get(key).filter(|value| truthy(Some(value)))?.as_object().cloned();
    let mut rope = there("rope_parameters").or_else(|| there("rope_scaling")).unwrap_or_default();
    let counts = rope.shift_remove("mrope_section");
    rope.shift_remove("mrope_interleaved");
    for key in ["type", "rope_type"] {
        if rope.get(key).and_then(Value::as_str) == Some("mrope") {
            rope.insert(key.into(), "default".into());
        }
    }
    flat.shift_remove("rope_scaling");
    flat.insert("rope_parameters".into(), rope.into());
    let mut shape = decoder(&Config { values: &flat, ..*config })?;
    if !has_tower(config) {
        return Ok(shape);
    }
    let sections = sections(counts.as_ref(), usual);
    for rope in &mut shape.ropes {
        let whole = |sections: &[usize; 3]| {
            !sections.contains(&0) && sections.iter().sum::<usize>() == rope.dim / 2
        };
        let counts = sections.filter(whole);
        rope.sections = counts.map(|counts| RotarySections { counts, interleaved: !windowed });
        if rope.sections.is_none() {
            return Err(ModelError::broken(format!(
                "mrope_section {counts:?} does not share the {} rotary frequencies of a head among three",
                rope.dim / 2
            )));
        }
    }
    let (hidden, layers) = (shape.hidden_size, shape.layers.len());
    shape.tower = Some(VisionTower::from_config(config.values, kind, hidden, layers)?);
    Ok(shape)
}

fn sections(counts: Option<&Value>, usual: [usize; 3]) -> Option<[usize; 3]> {
    let Some(counts) = counts.filter(|counts| truthy(Some(counts))) else { return Some(usual) };
    let number = |count: &Value| usize::try_from(count.as_u64()?).ok();
    let counts: Option<Vec<usize>> = counts.as_array()?.iter().map(number).collect();
    counts?.try_into().ok()
}
