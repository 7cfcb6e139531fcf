//! Qwen3.5 and 3.6: Qwen3-Next with projections of their own, dense or with experts. Repositories
//! have a tower, which is not read.

use super::Family;
use super::config::Config;
use super::gguf::GgufNames;
use super::qwen3_next::{self, COMMON, GGUF_RULES};
use super::recurrence;
use super::rules::{Rule, Take, joined};
use super::text::text_config;

pub(super) const FAMILY: Family = Family {
    title: "Qwen3.5, 3.6 (text)",
    architecture: "Qwen3_5ForConditionalGeneration",
    model_type: "qwen3_5",
    attention: "gated delta nets, and grouped-query with a gate in every fourth layer",
    layers: "dense",
    compiled: true,
    shape: |config| {
        let values = text_config(config);
        qwen3_next::shape(&Config { values: &values, ..*config }, false)
    },
    gguf: None,
    rules: &RULES,
};

pub(super) const TEXT: Family = Family {
    title: "Qwen3.5, 3.6 without a tower",
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
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
    title: "Qwen3.5-MoE, 3.6-MoE (text)",
    architecture: "Qwen3_5MoeForConditionalGeneration",
    model_type: "qwen3_5_moe",
    layers: "experts",
    shape: |config| {
        let values = text_config(config);
        qwen3_next::shape(&Config { values: &values, ..*config }, true)
    },
    gguf: None,
    ..FAMILY
};

pub(super) const MOE_TEXT: Family = Family {
    title: "Qwen3.5-MoE, 3.6-MoE without a tower",
    architecture: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
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

const RULES: [Rule; 7 + COMMON.len()] = joined(
    &[
        Rule::spare("visual.**"),
        Rule::spare("model.visual.**"),
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
