//! Qwen3.5 and 3.6: Qwen3-Next with separate projections, dense or with experts. Repositories
//! include Qwen3-VL's vision tower, without deepstack outputs.

use serde_json::{Value, json};

use super::Family;
use super::config::Config;
use super::gguf::GgufNames;
use super::qwen3_next::{self, COMMON, GGUF_RULES};
use super::qwen3_vl::with_tower;
use super::recurrence;
use super::rules::{Rule, Take, joined};
use super::shape::Shape;
use super::text::text_config;
use crate::error::ModelError;
use crate::vision::{TOWER_CONFIG, TowerKind};

/// The number of rotary frequencies for time, for row and for column, if the config has none.
const SECTIONS: [usize; 3] = [11, 11, 10];
const ATTENTION: &str = "gated delta nets, and grouped-query with a gate and positions of three numbers in every fourth \
     layer; a tower";

pub(super) const FAMILY: Family = Family {
    title: "Qwen3.5, 3.6 (images in PyTorch)",
    architecture: "Qwen3_5ForConditionalGeneration",
    model_type: "qwen3_5",
    attention: ATTENTION,
    layers: "dense",
    compiled: true,
    shape: |config| behind_tower(config, |config| qwen3_next::shape(config, false)),
    gguf: None,
    rules: &RULES,
};

pub(super) const TEXT: Family = Family {
    title: "Qwen3.5, 3.6 without a tower",
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    attention: qwen3_next::FAMILY.attention,
    shape: |config| qwen3_next::shape(config, false),
    gguf: Some(GgufNames {
        architecture: "qwen35",
        fits: |_| Ok(true),
        keys: |files| qwen3_next::keys(files, true),
        rules: GGUF_RULES,
    }),
    ..FAMILY
};

pub(super) const MOE: Family = Family {
    title: "Qwen3.5-MoE, 3.6-MoE (images in PyTorch)",
    architecture: "Qwen3_5MoeForConditionalGeneration",
    model_type: "qwen3_5_moe",
    layers: "experts",
    shape: |config| behind_tower(config, |config| qwen3_next::shape(config, true)),
    gguf: None,
    ..FAMILY
};

pub(super) const MOE_TEXT: Family = Family {
    title: "Qwen3.5-MoE, 3.6-MoE without a tower",
    architecture: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    attention: qwen3_next::FAMILY.attention,
    layers: "experts",
    shape: |config| qwen3_next::shape(config, true),
    gguf: Some(GgufNames {
        architecture: "qwen35moe",
        fits: |_| Ok(true),
        keys: |files| qwen3_next::keys(files, true),
        rules: GGUF_RULES,
    }),
    ..FAMILY
};

/// Reads the shape of a decoder with a vision tower.
fn behind_tower(
    config: &Config<'_>,
    decoder: fn(&Config<'_>) -> Result<Shape, ModelError>,
) -> Result<Shape, ModelError> {
    let mut values = text_config(config);
    if let Some(mut tower) = config.get(TOWER_CONFIG).and_then(Value::as_object).cloned() {
        // In transformers, this family's tower has no deepstack outputs, whatever the config
        // states.
        tower.insert("deepstack_visual_indexes".into(), json!([]));
        values.insert(TOWER_CONFIG.into(), tower.into());
    }
    with_tower(&Config { values: &values, ..*config }, decoder, SECTIONS, TowerKind::Table)
}

const RULES: [Rule; 6 + COMMON.len()] = joined(
    &[
        Rule::renamed("model.visual.**", "visual.**"),
        Rule::renamed("model.language_model.**", "model.**"),
        Rule::renamed("language_model.lm_head.*", "lm_head.*"),
        Rule::new(QKV, "model.layers.#.linear_attn.in_proj_q.weight", QUERIES),
        Rule::new(QKV, "model.layers.#.linear_attn.in_proj_k.weight", KEYS),
        Rule::new(QKV, "model.layers.#.linear_attn.in_proj_v.weight", VALUES),
    ],
    COMMON,
);
const QKV: &str = "model.layers.#.linear_attn.in_proj_qkv.weight";
const QUERIES: Take = Take::ALL.blocks(recurrence::queries);
const KEYS: Take = Take::ALL.blocks(recurrence::keys);
const VALUES: Take = Take::ALL.blocks(recurrence::values);
