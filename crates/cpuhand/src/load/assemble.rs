//! The weights of a decoder as the kernels take them.

use std::collections::HashMap;

use forebay_kernels::{
    BesideWeights, ExpertBiases, ExpertMatrices, FeedForward, Gated, Layer, Matrix, Storage,
    Weights,
};
use forebay_weights::{Angles, FeedShape, ModelError, NormPlacement, QkNorm};

use super::{
    BESIDE_NORMS, EMBEDDING, EMBEDDING_NORM, EXPERT_FACTORS, FACTOR, HEAD, Loaded, NORM, Plan,
    ROUTER_FACTORS, correction, inputs, norms_of, number_of_norms, recurrence, router_bias,
    shared_gate,
};
use crate::parts::{DecoderParts, ONE_PART};

/// The weights of a decoder, made of loaded ones.
pub(crate) fn assemble(
    plan: &Plan,
    parts: &DecoderParts<'_>,
    loaded: &Loaded,
    positions: usize,
) -> Result<Weights, ModelError> {
    let shape = parts.shape;
    let get = |name: &str| {
        let found = loaded.get(name).cloned();
        found.ok_or_else(|| ModelError::Broken(format!("{name} is neither loaded nor packed")))
    };
    let storages: HashMap<&str, Storage> =
        plan.matrices.iter().map(|it| (it.parts.name(), it.packing.storage)).collect();
    let matrix = |name: &str| -> Result<Matrix, ModelError> {
        let storage = storages.get(name).copied().unwrap_or(Storage::Plain);
        Ok(Matrix { storage, packed: get(name)? })
    };
    let mut layers = Vec::new();
    for layer in 0..plan.layers {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let bias = |there: bool, name: &str| there.then(|| get(&at(name))).transpose();
        let attention = parts.kind(layer).attention;
        let norm = |name: &str| get(&at(&format!("{name}.weight")));
        let recurrent = parts.recurrence(layer);
        let state = |name: &str| get(&at(&format!("linear_attn.{name}")));
        let recurrence = recurrent.map(|of| recurrence::weights(of, state)).transpose()?;
        let (first, last, [bias_in, bias_out]) = match recurrent {
            None => {
                let biases = [attention.qkv_bias, attention.output_bias];
                ("self_attn.q_proj", "self_attn.o_proj", biases)
            }
            Some(of) => ("linear_attn.in_proj_q", "linear_attn.out_proj", [of.bias; 2]),
        };
        let own = shape.layers[layer].keys_of.is_none();
        let head_norms = match attention.qk_norm {
            _ if recurrent.is_some() => None,
            QkNorm::None => None,
            QkNorm::Plain => {
                let ones = inputs::ones(attention.head_dim, number_of_norms(shape, plan.number))?;
                Some((ones.clone(), own.then_some(ones)))
            }
            QkNorm::Heads | QkNorm::Rows => Some((
                norm("self_attn.q_norm")?,
                own.then(|| norm("self_attn.k_norm")).transpose()?,
            )),
        };
        let placement = shape.layers[layer].norms;
        let [input, attended, before, fed] =
            norms_of(placement).map(|name| name.map(norm).transpose());
        let gated = |of: &str, inner: usize, with_bias: bool| -> Result<Gated, ModelError> {
            Ok(Gated {
                inner,
                gate_up: matrix(&at(&format!("{of}.gate_proj.weight")))?,
                gate_up_bias: bias(with_bias, &format!("{of}.gate_proj.bias"))?,
                down: matrix(&at(&format!("{of}.down_proj.weight")))?,
                down_bias: bias(with_bias, &format!("{of}.down_proj.bias"))?,
            })
        };
        let feed = match shape.feed(layer) {
            FeedShape::Experts(experts) => {
                let corrected = experts.routing.corrected;
                let (shared, inner) = (experts.shared_size > 0, experts.shared_size);
                let vector = |name: &str| get(&at(&format!("mlp.{name}")));
                let beside = || -> Result<BesideWeights, ModelError> {
                    let norm = |number: usize| vector(&format!("{}.weight", BESIDE_NORMS[number]));
                    Ok(BesideWeights {
                        router_factors: vector(ROUTER_FACTORS)?,
                        expert_factors: vector(EXPERT_FACTORS)?,
                        before: norm(0)?,
                        behind_dense: norm(1)?,
                        behind: norm(2)?,
                    })
                };
                let beside = experts.beside.then(beside).transpose()?;
                FeedForward::Experts(ExpertMatrices {
                    router: get(&at("mlp.gate.weight"))?,
                    correction: corrected.then(|| get(&correction(&at("mlp")))).transpose()?,
                    gate_up: matrix(&at("mlp.experts.0.gate_proj.weight"))?,
                    down: matrix(&at("mlp.experts.0.down_proj.weight"))?,
                    shared: shared
                        .then(|| gated("mlp.shared_experts", inner, false))
                        .transpose()?,
                    shared_gate: experts
                        .shared_gate
                        .then(|| get(&shared_gate(&at("mlp"))))
                        .transpose()?,
                    biases: match experts.bias {
                        false => None,
                        true => Some(ExpertBiases {
                            router: get(&router_bias(&at("mlp")))?,
                            gate_up: get(&at("mlp.experts.0.gate_proj.bias"))?,
                            down: get(&at("mlp.experts.0.down_proj.bias"))?,
                        }),
                    },
                    beside,
                })
            }
            FeedShape::Dense(dense) => {
                FeedForward::Dense(gated("mlp", dense.intermediate_size, dense.bias)?)
            }
            FeedShape::None => return Err(ModelError::Elsewhere(ONE_PART.into())),
        };
        layers.push(Layer {
            attention: parts.kind_of[layer],
            recurrence,
            keys_of: shape.layers[layer].keys_of.map(usize::from),
            parallel: placement == NormPlacement::Parallel,
            input_norm: input?,
            attended_norm: attended?,
            fed_norm: fed?,
            sinks: bias(attention.sinks && recurrent.is_none(), "self_attn.sinks")?,
            qkv: matrix(&at(&format!("{first}.weight")))?,
            qkv_bias: bias(bias_in, &format!("{first}.bias"))?,
            head_norms,
            output: matrix(&at(&format!("{last}.weight")))?,
            output_bias: bias(bias_out, &format!("{last}.bias"))?,
            post_norm: before?,
            feed,
            inputs: match shape.layer_inputs {
                None => None,
                Some(_) => Some(inputs::matrices(layer, &matrix, &get)?),
            },
            factor: bias(shape.layers[layer].scaled, FACTOR)?,
        });
    }
    let angles = shape.ropes.iter().map(|rope| -> Result<_, ModelError> {
        let Angles { cos, sin } = Angles::new(rope, shape.max_positions, positions, plan.number)?;
        Ok((cos, sin))
    });
    Ok(Weights {
        embedding: get(EMBEDDING)?,
        embedding_norm: shape.embedding_norm.then(|| get(EMBEDDING_NORM)).transpose()?,
        final_norm: get(NORM)?,
        head: (!shape.headless).then(|| matrix(HEAD)).transpose()?,
        layers,
        angles: angles.collect::<Result<Vec<_>, ModelError>>()?,
        query_scales: parts.query_scale().map_or_else(Vec::new, |scale| {
            (0..positions as u64).map(|position| scale.at(position)).collect()
        }),
        layer_inputs: match shape.layer_inputs {
            None => None,
            Some(_) => Some(inputs::weights(plan.table_storage(), &matrix, &get)?),
        },
    })
}
