//! Llama, and the models that share its architecture.

use super::Family;
use super::gguf::{GgufNames, dense_keys};
use super::rope::rope;
use super::rules::{Rule, Take};

pub(super) const FAMILY: Family = Family {
    title: "Llama, SmolLM2",
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape: |config| {
        let attention = config.attention(None)?;
        let (rope, layers) = (rope(config, attention.head_dim)?, config.layer_count()?);
        config.grouped(attention, rope, vec![None; layers], vec![config.dense()?; layers])
    },
    gguf: Some(GgufNames {
        architecture: "llama",
        fits: |files| Ok(!super::mistral::has_window(files) && !super::mixtral::has_experts(files)),
        keys: dense_keys,
        rules: PAIRED,
    }),
    rules: &[],
};

/// llama.cpp's converter interleaves the rows of the two halves of each head, as in the original
/// Llama code.
pub(super) const PAIRED: &[Rule] = &[
    Rule::new(
        "blk.#.attn_q.*",
        "model.layers.#.self_attn.q_proj.*",
        Take::ALL.pairs(|it| it.heads),
    ),
    Rule::new(
        "blk.#.attn_k.*",
        "model.layers.#.self_attn.k_proj.*",
        Take::ALL.pairs(|it| it.kv_heads),
    ),
];
