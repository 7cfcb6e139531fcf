//! The Hugging Face names of the weights that a GGUF file's tensors hold
//! (`gguf.constants.TENSOR_NAMES`).

use std::collections::HashSet;

use super::file::{GgufFiles, GgufTensor};
use crate::config::Shape;
use crate::error::ModelError;

/// Tables for the rotary embedding: they are part of the config here, not weights.
const ROPE_TENSOR: &str = "rope_freqs.weight";

/// A weight of the model, which is rows of a tensor.
pub(crate) struct Stored<'a> {
    pub(crate) name: String,
    pub(crate) tensor: &'a GgufTensor,
    /// The shape of the weight.
    pub(crate) shape: Vec<usize>,
    /// Its first row, with the rows of all outer dimensions of the tensor together.
    pub(crate) first: usize,
}

/// Every weight of the model that is in the files, in their order. A head that is tied to the
/// embedding is left out. So are layers behind the last one of a model with experts.
pub(crate) fn stored_weights<'a>(
    files: &'a GgufFiles,
    shape: &Shape,
) -> Result<Vec<Stored<'a>>, ModelError> {
    let (mut found, mut names): (Vec<Stored<'a>>, _) = (Vec::new(), HashSet::new());
    for tensor in &files.tensors {
        if tensor.name == ROPE_TENSOR || (shape.tied && tensor.name == "output.weight") {
            continue;
        }
        let layer =
            tensor.name.strip_prefix("blk.").and_then(|name| number(name.split_once('.')?.0));
        if layer.is_some_and(|layer| !shape.has_place_for(layer)) {
            continue;
        }
        let stored = match of_experts(&tensor.name) {
            Some((layer, kinds)) => experts(tensor, layer, kinds, shape)?,
            None => {
                let name = hf_name(&tensor.name).ok_or_else(|| {
                    let name = &tensor.name;
                    ModelError::broken(format!(
                        "the GGUF file has a tensor '{name}' that the model has no place for"
                    ))
                })?;
                vec![Stored { name, tensor, shape: tensor.shape.clone(), first: 0 }]
            }
        };
        for one in stored {
            if !names.insert(one.name.clone()) {
                return Err(ModelError::broken(format!(
                    "the GGUF file has {} twice, once as '{}'",
                    one.name, tensor.name
                )));
            }
            found.push(one);
        }
    }
    Ok(found)
}

/// The layer of a tensor `[experts, rows, columns]`, and the matrices of an expert in its rows, one
/// after the other.
fn of_experts(name: &str) -> Option<(usize, &'static [&'static str])> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let kinds: &[&str] = match part {
        "ffn_gate_exps.weight" => &["gate_proj"],
        "ffn_up_exps.weight" => &["up_proj"],
        "ffn_down_exps.weight" => &["down_proj"],
        "ffn_gate_up_exps.weight" => &["gate_proj", "up_proj"],
        _ => return None,
    };
    Some((number(layer)?, kinds))
}

fn experts<'a>(
    tensor: &'a GgufTensor,
    layer: usize,
    kinds: &[&str],
    shape: &Shape,
) -> Result<Vec<Stored<'a>>, ModelError> {
    let sparse = shape.sparse.get(layer).copied().unwrap_or(false);
    let wanted = shape.experts.filter(|_| sparse).map_or(0, |experts| experts.count);
    let unfit = || {
        ModelError::broken(format!(
            "the GGUF file has {} of {:?}, and the layer has {wanted} experts",
            tensor.name, tensor.shape
        ))
    };
    let &[count, rows, columns] = &tensor.shape[..] else { return Err(unfit()) };
    if count != wanted || !rows.is_multiple_of(kinds.len()) {
        return Err(unfit());
    }
    let of_one = rows / kinds.len();
    let each =
        (0..count).flat_map(|expert| (0..).zip(kinds).map(move |(at, kind)| (expert, at, kind)));
    let stored = each.map(|(expert, at, kind)| Stored {
        name: format!("model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"),
        tensor,
        shape: vec![of_one, columns],
        first: expert * rows + at * of_one,
    });
    Ok(stored.collect())
}

/// The layer of a weight.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    number(name.strip_prefix("layers.")?.split_once('.')?.0)
}

fn number(text: &str) -> Option<usize> {
    let is_number = !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
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
    number(layer)?;
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
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_shexp" => "mlp.shared_experts.gate_proj",
        "ffn_up_shexp" => "mlp.shared_experts.up_proj",
        "ffn_down_shexp" => "mlp.shared_experts.down_proj",
        // The one tensor that is called a bias and is none of a product.
        "exp_probs_b" if kind == "bias" => {
            return Some(format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"));
        }
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_experts_are_told_from_others() {
        let fused: &[&str] = &["gate_proj", "up_proj"];
        assert_eq!(of_experts("blk.12.ffn_gate_up_exps.weight"), Some((12, fused)));
        assert_eq!(of_experts("blk.0.ffn_down_exps.weight"), Some((0, &["down_proj"][..])));
        for name in [
            "blk.0.ffn_down.weight",
            "blk.0.ffn_down_exps.bias",
            "blk.x.ffn_down_exps.weight",
            "blk.12345678901.ffn_down_exps.weight",
            "ffn_down_exps.weight",
        ] {
            assert_eq!(of_experts(name), None, "{name}");
        }
        assert_eq!(
            hf_name("blk.3.ffn_gate_inp.weight").as_deref(),
            Some("model.layers.3.mlp.gate.weight")
        );
        assert_eq!(
            hf_name("blk.3.exp_probs_b.bias").as_deref(),
            Some("model.layers.3.mlp.gate.e_score_correction_bias")
        );
        assert_eq!(hf_name("blk.3.exp_probs_b.weight"), None);
        assert_eq!(layer_of("model.layers.7.mlp.gate.weight"), Some(7));
        assert_eq!(layer_of("layers.7.mlp.gate.weight"), Some(7));
        assert_eq!(layer_of("model.norm.weight"), None);
    }
}
