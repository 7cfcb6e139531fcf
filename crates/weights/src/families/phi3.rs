//! Phi-3 and Phi-4: Llama with fused products.

use super::Family;
use super::config::WindowRule;
use super::rope::rope;
use super::rules::{Rule, Take, fused_keys, fused_queries, fused_values};

pub(super) const FAMILY: Family = Family {
    title: "Phi-3, Phi-4",
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    attention: "grouped-query",
    layers: "dense",
    compiled: true,
    shape: |config| {
        let attention = config.attention(None)?;
        let (rope, windows) = (rope(config, attention.head_dim)?, config.windows(WindowRule::All)?);
        let feeds = vec![config.dense()?; windows.len()];
        config.grouped(attention, rope, windows, feeds)
    },
    gguf: None,
    rules: &[
        Rule::new(QKV, "model.layers.#.self_attn.q_proj.*", Take::ALL.rows(fused_queries)),
        Rule::new(QKV, "model.layers.#.self_attn.k_proj.*", Take::ALL.rows(fused_keys)),
        Rule::new(QKV, "model.layers.#.self_attn.v_proj.*", Take::ALL.rows(fused_values)),
        Rule::new(GATE_UP, "model.layers.#.mlp.gate_proj.*", Take::ALL.share(0, 2)),
        Rule::new(GATE_UP, "model.layers.#.mlp.up_proj.*", Take::ALL.share(1, 2)),
    ],
};

const QKV: &str = "model.layers.#.self_attn.qkv_proj.*";
const GATE_UP: &str = "model.layers.#.mlp.gate_up_proj.*";
