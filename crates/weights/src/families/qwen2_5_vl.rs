//! Qwen2.5-VL: a vision tower and a Qwen2.

use super::Family;
use super::qwen2;
use super::qwen3_vl::{RULES, with_tower};
use crate::vision::TowerKind;

pub(super) const FAMILY: Family = Family {
    title: "Qwen2.5-VL",
    architecture: "Qwen2_5_VLForConditionalGeneration",
    model_type: "qwen2_5_vl",
    attention: "grouped-query, positions of three numbers; a tower with windows",
    layers: "dense",
    compiled: false,
    shape: |config| with_tower(config, qwen2::shape, [16, 24, 24], TowerKind::Windows),
    gguf: None,
    rules: RULES,
};
