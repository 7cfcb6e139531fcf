//! DeepSeek V3 and R1, and Kimi K2. GGUF has one architecture name for all of these models, for
//! DeepSeek V2 and for GLM-4.7-Flash.

use serde_json::{Map, Value, json};

use super::Family;
use super::experts::Routed;
use super::gguf::{GgufNames, head_counts, refuse_changes, required, routed_keys, scores, whole};
use super::latent::decoder;
use super::rules::{Rule, Take};
use crate::error::ModelError;
use crate::gguf::GgufFiles;

pub(super) const ROUTED: Routed =
    Routed { first_dense: 3, shared: 1, normalise: true, groups: 8, kept: 4, scaling: 2.5 };
pub(super) const QUERY_RANK: u64 = 1536;

pub(super) const FAMILY: Family = Family {
    title: "DeepSeek V3, R1",
    architecture: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    attention: "latent",
    layers: "experts, some dense",
    compiled: true,
    shape: |config| decoder(config, QUERY_RANK, &ROUTED, |config| ROUTED.corrected(config), None),
    gguf: Some(GgufNames {
        architecture: "deepseek2",
        fits: |files| Ok(gguf_scores(files)? == "sigmoid"),
        keys: gguf_keys,
        rules: RENAMED,
    }),
    rules: &[],
};

/// Tensor names of latent attention. Some files store the `kv_b_proj` weight in absorbed form, in
/// one tensor for keys and one for values.
pub(super) const RENAMED: &[Rule] = &[
    Rule::renamed("blk.#.attn_q_a.*", "model.layers.#.self_attn.q_a_proj.*"),
    Rule::renamed("blk.#.attn_q_a_norm.*", "model.layers.#.self_attn.q_a_layernorm.*"),
    Rule::renamed("blk.#.attn_q_b.*", "model.layers.#.self_attn.q_b_proj.*"),
    Rule::renamed("blk.#.attn_kv_a_mqa.*", "model.layers.#.self_attn.kv_a_proj_with_mqa.*"),
    Rule::renamed("blk.#.attn_kv_a_norm.*", "model.layers.#.self_attn.kv_a_layernorm.*"),
    Rule::renamed("blk.#.attn_kv_b.*", "model.layers.#.self_attn.kv_b_proj.*"),
    Rule::new("blk.#.attn_k_b.weight", UP, Take::ALL.transposed().joined(0, 2)),
    Rule::new("blk.#.attn_v_b.weight", UP, Take::ALL.joined(1, 2)),
];

const UP: &str = "model.layers.#.self_attn.kv_b_proj.weight";

/// Returns the score function of experts, which differs among families with this architecture name.
pub(super) fn gguf_scores(files: &GgufFiles) -> Result<&'static str, ModelError> {
    // Older files lack the key `expert_gating_func`. These belong to DeepSeek V2, unless they have
    // a correction bias for the routing.
    let corrected = files.tensors.iter().any(|tensor| tensor.name.ends_with(".exp_probs_b.bias"));
    scores(files, if corrected { "sigmoid" } else { "softmax" })
}

pub(super) fn gguf_keys(files: &GgufFiles) -> Result<Map<String, Value>, ModelError> {
    refuse_changes(files)?;
    let (heads, _) = head_counts(files)?;
    let rotary = required(files, "rope.dimension_count")?;
    // Files with separate tensors for keys and values state the sizes of the absorbed heads under
    // the usual keys, and of the original heads under the `_mla` keys.
    let length = |of: &str| -> Result<i64, ModelError> {
        let own = whole(files, &format!("attention.{of}_length_mla"))?.filter(|&it| it > 0);
        own.map_or_else(|| required(files, &format!("attention.{of}_length")), Ok)
    };
    let (of_keys, of_values) = (length("key")?, length("value")?);
    if !(1..of_keys).contains(&rotary) {
        return Err(ModelError::unserved_part(&format!(
            "heads of {of_keys} with {rotary} to rotate"
        )));
    }
    let keys = json!({
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": whole(files, "attention.q_lora_rank")?.filter(|&rank| rank > 0),
        "kv_lora_rank": required(files, "attention.kv_lora_rank")?,
        "qk_nope_head_dim": of_keys - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": of_values,
        "attention_bias": files.tensor("blk.0.attn_kv_a_mqa.bias").is_some(),
        "rope_interleave": true,
    });
    let mut keys = keys.as_object().cloned().unwrap_or_default();
    keys.extend(routed_keys(files, gguf_scores(files)?)?);
    Ok(keys)
}
