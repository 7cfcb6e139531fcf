//! The Hugging Face names of the weights that a GGUF file's tensors hold
//! (`gguf.constants.TENSOR_NAMES`).

use super::file::{GgufFiles, GgufTensor};
use crate::config::Shape;
use crate::error::ModelError;

/// Tables for the rotary embedding: they are part of the config here, not weights.
const ROPE_TENSOR: &str = "rope_freqs.weight";

/// A weight of the model and the tensor that it is.
pub(crate) struct Stored<'a> {
    pub(crate) name: String,
    pub(crate) tensor: &'a GgufTensor,
}

/// Every weight of the model that is in the files, in their order; a head that is tied to the
/// embedding is left out.
pub(crate) fn stored_weights<'a>(
    files: &'a GgufFiles,
    shape: &Shape,
) -> Result<Vec<Stored<'a>>, ModelError> {
    let mut found: Vec<Stored<'a>> = Vec::new();
    for tensor in &files.tensors {
        if tensor.name == ROPE_TENSOR || (shape.tied && tensor.name == "output.weight") {
            continue;
        }
        let name = hf_name(&tensor.name).ok_or_else(|| {
            let name = &tensor.name;
            ModelError::broken(format!(
                "the GGUF file has a tensor '{name}' that the model has no place for"
            ))
        })?;
        if found.iter().any(|stored| stored.name == name) {
            return Err(ModelError::broken(format!(
                "the GGUF file has {name} twice, once as '{}'",
                tensor.name
            )));
        }
        found.push(Stored { name, tensor });
    }
    Ok(found)
}

fn hf_name(name: &str) -> Option<String> {
    let (stem, kind) = name.rsplit_once('.')?;
    if kind != "weight" && kind != "bias" {
        return None;
    }
    let Some(of_layer) = stem.strip_prefix("blk.") else {
        let name = match stem {
            "token_embd" => "model.embed_tokens",
            "output_norm" => "model.norm",
            "output" => "lm_head",
            _ => return None,
        };
        return Some(format!("{name}.{kind}"));
    };
    let (layer, part) = of_layer.split_once('.')?;
    if layer.is_empty() || layer.len() > 9 || !layer.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let part = match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "post_attention_norm" | "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}
