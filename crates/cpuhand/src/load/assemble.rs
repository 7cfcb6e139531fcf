//! Assembles the weights of a decoder for the kernels.

use std::collections::HashMap;

use forebay_kernels::{
    BesideWeights, DenseMatrices, ExpertBiases, ExpertMatrices, FeedForward, Layer, Matrix,
    StatePart, Storage, Weights,
};
use forebay_weights::{Angles, Attention, FeedShape, ModelError, NormPlacement, QkNorm};

use super::{
    BESIDE_NORMS, EMBEDDING, EMBEDDING_NORM, EXPERT_FACTORS, FACTOR, HEAD, LATENT, Loaded, NORM,
    Plan, ROUTER_FACTORS, correction, first_products, inputs, latent, norms_of, number_of_norms,
    recurrence, router_bias, shared_gate,
};
use crate::parts::DecoderParts;

/// Assembles the weights of a decoder from loaded weights.
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
        let attention = parts.attention(layer);
        let norm = |name: &str| get(&at(&format!("{name}.weight")));
        let state = |name: &str| get(&at(&format!("linear_attn.{name}")));
        let of_state_matrix = |name: &str| matrix(&at(&format!("linear_attn.{name}")));
        let recurrent = parts.recurrence(layer);
        let recurrence =
            recurrent.map(|of| recurrence::weights(of, state, of_state_matrix)).transpose()?;
        let of_state =
            recurrent.map(|of| ("linear_attn.in_proj_q", "linear_attn.out_proj", [of.bias; 2]));
        let of_attention = attention
            .map(|of| ("self_attn.q_proj", "self_attn.o_proj", [of.qkv_bias, of.output_bias]));
        let weight = |name: &str| matrix(&at(&format!("{name}.weight")));
        let products = of_attention.or(of_state);
        let (first, last, [bias_in, bias_out]) = products.unwrap_or_default();
        let of_self = |name: &str| at(&format!("self_attn.{name}"));
        let vector = |name: &str| get(&of_self(name));
        let (latent, first, qkv_bias) = match parts.latent(layer) {
            None => (None, first.to_owned(), bias(bias_in, &format!("{first}.bias"))?),
            Some(of) => {
                let (name, bias) = latent::first(of, plan.number, vector)?;
                let weights = latent::weights(of, |name| matrix(&of_self(name)), vector)?;
                (Some(weights), format!("self_attn.{name}"), bias)
            }
        };
        let (recurrence, beside) = match (of_attention.and(of_state), recurrence) {
            (Some((input, output, [bias_in, bias_out])), Some(recurrence)) => {
                let part = StatePart {
                    recurrence,
                    input: weight(input)?,
                    input_bias: bias(bias_in, &format!("{input}.bias"))?,
                    output: weight(output)?,
                    output_bias: bias(bias_out, &format!("{output}.bias"))?,
                };
                (None, Some(part))
            }
            (_, recurrence) => (recurrence, None),
        };
        let own = shape.layers[layer].keys_of.is_none();
        let head_norms = match attention {
            None | Some(Attention { qk_norm: QkNorm::None, .. }) => None,
            Some(Attention { qk_norm: QkNorm::Plain, head_dim, .. }) => {
                let ones = inputs::ones(*head_dim, number_of_norms(shape, plan.number))?;
                Some((ones.clone(), own.then_some(ones)))
            }
            Some(Attention { qk_norm: QkNorm::Heads | QkNorm::Rows, .. }) => Some((
                norm("self_attn.q_norm")?,
                own.then(|| norm("self_attn.k_norm")).transpose()?,
            )),
        };
        let placement = shape.layers[layer].norms;
        let [input, attended, before, fed] =
            norms_of(shape, layer).map(|name| name.map(norm).transpose());
        let gate_up = first_products(parts.gated())[0];
        let dense =
            |of: &str, inner: usize, with_bias: bool| -> Result<DenseMatrices, ModelError> {
                Ok(DenseMatrices {
                    inner,
                    gate_up: matrix(&at(&format!("{of}.{gate_up}.weight")))?,
                    gate_up_bias: bias(with_bias, &format!("{of}.{gate_up}.bias"))?,
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
                let latent = || -> Result<[Matrix; 2], ModelError> {
                    let [before, behind] = LATENT.map(|name| weight(&format!("mlp.{name}")));
                    Ok([before?, behind?])
                };
                Some(FeedForward::Experts(ExpertMatrices {
                    router: get(&at("mlp.gate.weight"))?,
                    correction: corrected.then(|| get(&correction(&at("mlp")))).transpose()?,
                    latent: (experts.latent_size > 0).then(latent).transpose()?,
                    gate_up: matrix(&at(&format!("mlp.experts.0.{gate_up}.weight")))?,
                    down: matrix(&at("mlp.experts.0.down_proj.weight"))?,
                    shared: shared
                        .then(|| dense("mlp.shared_experts", inner, false))
                        .transpose()?,
                    shared_gate: experts
                        .shared_gate
                        .then(|| get(&shared_gate(&at("mlp"))))
                        .transpose()?,
                    biases: match experts.bias {
                        false => None,
                        true => Some(ExpertBiases {
                            router: get(&router_bias(&at("mlp")))?,
                            gate_up: get(&at(&format!("mlp.experts.0.{gate_up}.bias")))?,
                            down: get(&at("mlp.experts.0.down_proj.bias"))?,
                        }),
                    },
                    beside,
                }))
            }
            FeedShape::Dense(of) => {
                Some(FeedForward::Dense(dense("mlp", of.intermediate_size, of.bias)?))
            }
            FeedShape::None => None,
        };
        layers.push(Layer {
            attention: parts.kind_of[layer],
            recurrence,
            beside,
            latent,
            keys_of: shape.layers[layer].keys_of.map(usize::from),
            parallel: placement == NormPlacement::Parallel,
            input_norm: input?,
            attended_norm: attended?,
            fed_norm: fed?,
            sinks: bias(attention.is_some_and(|of| of.sinks), "self_attn.sinks")?,
            qkv: products.map(|_| weight(&first)).transpose()?,
            qkv_bias,
            head_norms,
            output: products.map(|_| weight(last)).transpose()?,
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
