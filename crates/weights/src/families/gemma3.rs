//! Gemma 3, with and without a vision tower.

use serde_json::{Map, Value, json};

use super::Family;
use super::config::Config;
use super::gemma2::{GGUF_RULES, Gemma, RULES, cap, keys};
use super::gguf::GgufNames;
use super::rope::{RopeKind, rope_of_kind};
use super::rules::{Rule, Take, joined};
use super::shape::{QkNorm, Shape};
use super::text;
use crate::error::ModelError;
use crate::gguf::GgufFiles;
use crate::sizes::MOST_LAYERS;
use crate::vector::DENSE_SHAPES;
use crate::vision::{VisionTower, has_tower};

/// Every sixth layer attends to all positions.
const CYCLE: u64 = 6;
/// The number of layers of the 27B model, in which `query_pre_attn_scalar` is the hidden size
/// divided by the number of heads.
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

/// Repositories with a vision tower. Attention within an image is bidirectional.
pub(super) const TOWER: Family = Family {
    title: "Gemma 3 with a tower (images in PyTorch)",
    architecture: "Gemma3ForConditionalGeneration",
    model_type: "gemma3",
    attention: "grouped-query, windows in five of six layers, both ways within images; a SigLIP tower",
    shape: |config| {
        let mut values = text::text_config(config);
        // The text config in these repositories omits default values.
        for (key, usual) in [
            ("vocab_size", 262_208),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("sliding_window", 4096),
            ("max_position_embeddings", 131_072),
        ] {
            values.entry(key).or_insert_with(|| json!(usual));
        }
        let mut shape = shape(&Config { values: &values, ..*config })?;
        if has_tower(config) {
            shape.tower = Some(VisionTower::siglip(config.values, shape.hidden_size)?);
        }
        Ok(shape)
    },
    gguf: None,
    rules: &TOWER_RULES,
    ..FAMILY
};
/// The decoder without a head, with bidirectional attention over the whole prompt.
pub(super) const EMBEDDING: Family = Family {
    title: "EmbeddingGemma",
    architecture: "Gemma3TextModel",
    attention: "grouped-query both ways, windows in five of six layers",
    gguf: Some(GgufNames {
        architecture: "gemma-embedding",
        fits: |_| Ok(true),
        keys: embedding_keys,
        rules: &EMBEDDING_RULES,
    }),
    ..FAMILY
};
const EMBEDDING_RULES: [Rule; GGUF_RULES.len() + DENSE.len()] = joined(GGUF_RULES, &RENAMED_DENSE);
/// The tensors of `Dense` modules in a GGUF file.
const DENSE: [&str; 2] = ["dense_2.weight", "dense_3.weight"];
const RENAMED_DENSE: [Rule; DENSE.len()] =
    [Rule::renamed(DENSE[0], "dense.0.weight"), Rule::renamed(DENSE[1], "dense.1.weight")];

/// Returns the config keys of a GGUF file, including the shapes of the `Dense` modules. A file does
/// not state that attention is bidirectional, so this key is added.
fn embedding_keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    let mut keys = keys(files, LARGEST)?;
    keys.insert("sliding_window_pattern".into(), json!(CYCLE));
    keys.insert("use_bidirectional_attention".into(), json!(true));
    let dense = DENSE.iter().map_while(|name| files.tensor(name));
    let dense: Vec<&[usize]> = dense.map(|tensor| &tensor.shape[..]).collect();
    keys.insert(DENSE_SHAPES.into(), json!(dense));
    Ok(keys)
}

const TOWER_RULES: [Rule; NAMES.len() + RULES.len()] = joined(NAMES, RULES);
/// The names of the tower's weights get the prefix `visual`. The tower's pooling head is not used.
const NAMES: &[Rule] = &[
    Rule::renamed("model.language_model.**", "model.**"),
    Rule::renamed("language_model.model.**", "model.**"),
    Rule::renamed("language_model.lm_head.*", "lm_head.*"),
    Rule::renamed("model.vision_tower.**", "vision_tower.**"),
    Rule::renamed("vision_tower.vision_model.**", "visual.**"),
    Rule::renamed("vision_tower.**", "visual.**"),
    Rule::spare("visual.head.**"),
    Rule::renamed("model.multi_modal_projector.**", "visual.projector.**"),
    Rule::renamed("multi_modal_projector.**", "visual.projector.**"),
    Rule::new(
        "visual.projector.mm_input_projection_weight",
        "visual.projector.weight",
        Take::ALL.transposed(),
    ),
    Rule::new(
        "visual.projector.mm_soft_emb_norm.weight",
        "visual.projector.norm.weight",
        Take::ALL.plus(1.0),
    ),
];

fn shape(config: &Config<'_>) -> Result<Shape, ModelError> {
    let cycle = config.optional("sliding_window_pattern", MOST_LAYERS)?.unwrap_or(CYCLE);
    let caps =
        [cap(config, "attn_logit_softcapping", 0.0)?, cap(config, "final_logit_softcapping", 0.0)?];
    let kind = Gemma { cycle, caps, qk_norm: QkNorm::Heads };
    kind.shape(config, |dim| {
        Ok([rope_of_kind(config, &LOCAL, dim)?, rope_of_kind(config, &WHOLE, dim)?])
    })
}
