//! The modules that adapters may change, and their sizes.

use crate::error::ModelError;
use crate::families::{FeedShape, Mixer, Rule, Shape, TensorPart, layer_of, weights_of};

/// A linear projection of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Module {
    pub(super) layer: usize,
    /// The last components of the module's name, such as `self_attn.q_proj`.
    pub(super) end: &'static str,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl Module {
    /// The module's full name in its family.
    pub(super) fn name(&self) -> String {
        format!("model.layers.{}.{}", self.layer, self.end)
    }

    /// Finds the module whose weight has this name.
    pub(super) fn of(weight: &str, shape: &Shape) -> Result<Self, ModelError> {
        let name = weight.strip_suffix(".weight").unwrap_or(weight);
        let unknown = || {
            ModelError::broken(format!(
                "it changes {name}, a module for which LoRA is not supported"
            ))
        };
        if !shape.factors.is_empty() {
            return Err(ModelError::broken(format!(
                "it changes {name}, and LoRA is not supported for models with scaled weights"
            )));
        }
        let layer = layer_of(weight).filter(|&layer| layer < shape.layers.len());
        let layer = layer.ok_or_else(unknown)?;
        let end = name.split_once(&format!("layers.{layer}.")).map_or("", |(_, end)| end);
        let (hidden, mixer, feed) = (shape.hidden_size, shape.mixer(layer), shape.feed(layer));
        let found = match (end.split_once('.'), mixer, feed) {
            (Some(("self_attn", projection)), Mixer::Attention(attention), _) => {
                if attention.gate {
                    return Err(ModelError::broken(format!(
                        "it changes {name}, whose attention has a gate"
                    )));
                }
                let queries = attention.heads * attention.head_dim;
                let keys = attention.kv_heads * attention.head_dim;
                let values = attention.kv_heads * attention.value_dim;
                let has_keys = shape.layers[layer].keys_of.is_none();
                match projection {
                    "k_proj" | "v_proj" if !has_keys => None,
                    "v_proj" if attention.keys_are_values => None,
                    "q_proj" => Some(("self_attn.q_proj", hidden, queries)),
                    "k_proj" => Some(("self_attn.k_proj", hidden, keys)),
                    "v_proj" => Some(("self_attn.v_proj", hidden, values)),
                    "o_proj" => {
                        let inputs = attention.heads * attention.value_dim;
                        Some(("self_attn.o_proj", inputs, hidden))
                    }
                    _ => None,
                }
            }
            (Some(("mlp", projection)), _, FeedShape::Dense(dense)) => {
                let inner = dense.intermediate_size;
                match projection {
                    "gate_proj" if dense.gated => Some(("mlp.gate_proj", hidden, inner)),
                    "up_proj" => Some(("mlp.up_proj", hidden, inner)),
                    "down_proj" => Some(("mlp.down_proj", inner, hidden)),
                    _ => None,
                }
            }
            (Some(("mlp", _)), _, FeedShape::Experts(_)) => {
                return Err(ModelError::broken(format!(
                    "it changes {name}, and adapters of experts are not served"
                )));
            }
            (Some(("self_attn", _)), Mixer::Latent(_), _) => {
                return Err(ModelError::broken(format!(
                    "it changes {name}, and adapters of latent attention are not served"
                )));
            }
            (_, Mixer::Recurrence(_), _) => {
                return Err(ModelError::broken(format!(
                    "it changes {name}, and adapters of recurrent layers are not served"
                )));
            }
            _ => None,
        };
        let (end, inputs, outputs) = found.ok_or_else(unknown)?;
        Ok(Self { layer, end, inputs, outputs })
    }
}

/// Returns the modules whose weights are parts of the base model's tensor `weight`. With each comes
/// the part of an adapter matrix `[outputs, rank]` that belongs to the module.
pub(super) fn parts_of(
    weight: &str,
    [outputs, rank]: [usize; 2],
    shape: &Shape,
    rules: [&[Rule]; 2],
) -> Result<Vec<(Module, TensorPart)>, ModelError> {
    let stored = [outputs, rank];
    let Some(weights) = weights_of(rules, (weight, &stored), shape)? else {
        return Ok(vec![(Module::of(weight, shape)?, TensorPart::whole(&stored))]);
    };
    if weights.is_empty() {
        return Err(ModelError::broken(format!(
            "it changes {weight}, which the model does not use"
        )));
    }
    let parts = weights.into_iter().map(|found| Ok((Module::of(&found.name, shape)?, found.part)));
    parts.collect()
}
