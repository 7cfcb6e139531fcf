//! Mixtures of experts: the part of a layer in which each token goes to some of many feed-forward
//! parts (ADR 52).
//!
//! A token's router logits, its experts and the order of their sum depend on the token alone. Rows
//! of one expert are computed together. As in any other product, a row's order of computation does
//! not depend on its neighbours.

mod routing;
mod sorted;

use crate::codes::Format;
use crate::element::{Element, widened};
use crate::matmul::Matrix;
use crate::memory::grow;
use crate::owned::Owned;
use crate::sizes::{ExpertSizes, Sizes};
use crate::team::FEW;
use crate::tile::MAX_ROWS;
use crate::weights::{self, BesideWeights, Bytes, ExpertMatrices};

use routing::Chooser;
pub(crate) use sorted::{Active, RowTile, Sorted};

/// The same matrix of all experts, or of all heads, packed, one behind the other.
pub(crate) struct Stack {
    packed: Bytes,
    pub(crate) format: Option<Format>,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// Bytes from one expert's to the next one's.
    apart: usize,
    /// `[experts, outputs]`; empty: there are none.
    biases: Vec<f32>,
}

impl Stack {
    /// The matrix of `count` experts, which was checked. Biases are of the type `E`.
    pub(crate) fn new<E: Element>(
        (matrix, count): (&weights::Matrix, usize),
        (outputs, inputs): (usize, usize),
        biases: Option<&Bytes>,
    ) -> Self {
        let (packed, format) = (matrix.packed.clone(), matrix.storage.format());
        let apart = packed.len() / count;
        let biases = biases.map(|biases| widened::<E>(biases)).unwrap_or_default();
        Self { packed, format, outputs, inputs, apart, biases }
    }

    #[inline(always)]
    pub(crate) fn of<E>(&self, expert: usize) -> Matrix<'_, E> {
        let &Self { ref packed, format, outputs, inputs, apart, ref biases } = self;
        let panels = packed.as_ptr().wrapping_add(expert * apart).cast();
        let bias = biases.get(expert * outputs..(expert + 1) * outputs).unwrap_or_default();
        Matrix { panels, format, outputs, inputs, bias }
    }
}

/// The experts of one layer.
pub(crate) struct Mixture {
    pub(crate) sizes: ExpertSizes,
    /// `[experts, hidden]`, as in the checkpoint.
    pub(crate) router: Bytes,
    /// Numbers that are added to the scores only for the choice; may be empty.
    pub(crate) correction: Vec<f32>,
    /// Terms of logits; empty: there are none.
    pub(crate) router_bias: Vec<f32>,
    /// The products before and after the experts; `None`: experts read and write the stream's
    /// states.
    pub(crate) latent: Option<[Owned; 2]>,
    /// Gates and values of each expert, interleaved: `[2 * intermediate, states]`. Without gates
    /// `[intermediate, states]`.
    pub(crate) gate_up: Stack,
    /// `[states, intermediate]`
    pub(crate) down: Stack,
    /// The product of this vector and a token is the logit of the shared expert's factor. Empty:
    /// the factor is 1.
    pub(crate) shared_gate: Vec<f32>,
    /// Norms and factors of experts that run beside a dense part; `None`: the layer has only
    /// experts.
    pub(crate) beside: Option<Beside>,
}

/// The norms and factors of experts beside a dense part.
pub(crate) struct Beside {
    /// The norm of the router's inputs: its factors, times the root of 1 / hidden.
    pub(crate) router: Vec<f32>,
    /// Factors of experts' weights.
    pub(crate) factors: Vec<f32>,
    pub(crate) before: Vec<f32>,
    pub(crate) behind_dense: Vec<f32>,
    pub(crate) behind: Vec<f32>,
}

impl Beside {
    fn new<E: Element>(of: &BesideWeights, sizes: &Sizes) -> Self {
        let root = 1.0 / (sizes.hidden as f32).sqrt();
        let norm = |it: &Bytes| sizes.read_norm::<E>(it);
        Self {
            router: widened::<E>(&of.router_factors).into_iter().map(|it| it * root).collect(),
            factors: widened::<E>(&of.expert_factors),
            before: norm(&of.before),
            behind_dense: norm(&of.behind_dense),
            behind: norm(&of.behind),
        }
    }
}

impl Mixture {
    /// The experts `of` a layer, which were checked; `None`: the sizes have none. The model's type
    /// is `E`.
    pub(crate) fn new<E: Element>(of: &ExpertMatrices, all: &Sizes) -> Option<Self> {
        let (sizes, hidden) = (all.experts?, all.hidden);
        let ExpertSizes { count, intermediate: inner, .. } = sizes;
        let (states, first) = (sizes.states(hidden), all.fed(inner));
        let numbers = |it: Option<&Bytes>| it.map(|it| widened::<E>(it)).unwrap_or_default();
        let biases = of.biases.as_ref();
        Some(Self {
            sizes,
            router: of.router.clone(),
            correction: of.correction.as_ref().map(|it| widened::<f32>(it)).unwrap_or_default(),
            router_bias: numbers(biases.map(|biases| &biases.router)),
            latent: of.latent.as_ref().map(|[before, behind]| {
                [
                    Owned::new::<E>(before, (states, hidden), None),
                    Owned::new::<E>(behind, (hidden, states), None),
                ]
            }),
            gate_up: Stack::new::<E>(
                (&of.gate_up, count),
                (first, states),
                biases.map(|biases| &biases.gate_up),
            ),
            down: Stack::new::<E>(
                (&of.down, count),
                (states, inner),
                biases.map(|biases| &biases.down),
            ),
            shared_gate: numbers(of.shared_gate.as_ref()),
            beside: of.beside.as_ref().map(|it| Beside::new::<E>(it, all)),
        })
    }

    pub(crate) fn is_quantised(&self) -> bool {
        let latent = self.latent.iter().flatten().any(Owned::is_quantised);
        latent || self.gate_up.format.is_some() || self.down.format.is_some()
    }
}

/// Buffers of the experts of a layer, kept from step to step.
#[derive(Default)]
pub(crate) struct Work<E> {
    /// `[tokens, experts]`.
    logits: Vec<f32>,
    /// `[tokens, per_token]`, of few tokens once a member.
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// The output of each row, `[rows, states]`.
    terms: Vec<f32>,
    /// The sum of a token's outputs, `[tokens, states]`, beside a dense part or of latent states.
    sums: Vec<f32>,
    /// The latent states of tokens `[tokens, states]`, and then the sums of their outputs.
    latents: Vec<E>,
    own: Vec<Own<E>>,
}

/// Buffers of one member.
#[derive(Default)]
pub(crate) struct Own<E> {
    pub(crate) sorted: Sorted,
    pub(crate) chooser: Chooser,
    /// The rows of one tile.
    pub(crate) gathered: Vec<E>,
    /// The weight of each row, for models that multiply the expert's inputs by it.
    pub(crate) row_weights: Vec<f32>,
}

/// The same, while a step is computed.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<E> {
    pub(crate) logits: *mut f32,
    pub(crate) ids: *mut u32,
    pub(crate) weights: *mut f32,
    pub(crate) terms: *mut f32,
    pub(crate) sums: *mut f32,
    pub(crate) latents: *mut E,
    pub(crate) own: *mut Own<E>,
}

impl<E: Element> Work<E> {
    /// Has room for a step of so many tokens.
    pub(crate) fn make_room(
        &mut self,
        routing: &ExpertSizes,
        (tokens, hidden, members): (usize, usize, usize),
    ) {
        let &ExpertSizes { count, per_token, .. } = routing;
        let choices = tokens.max(members * FEW) * per_token;
        grow(&mut self.logits, tokens * count, 0.0);
        grow(&mut self.ids, choices, 0);
        grow(&mut self.weights, choices, 0.0);
        let states = routing.states(hidden);
        grow(&mut self.terms, tokens * per_token * states, 0.0);
        if routing.beside || routing.latent > 0 {
            grow(&mut self.sums, tokens * states, 0.0);
        }
        grow(&mut self.latents, tokens * routing.latent, E::default());
        self.own.resize_with(members, Own::default);
        for own in &mut self.own {
            grow(&mut own.gathered, MAX_ROWS * states, E::default());
        }
    }

    pub(crate) fn buffers(&mut self) -> Buffers<E> {
        Buffers {
            logits: self.logits.as_mut_ptr(),
            ids: self.ids.as_mut_ptr(),
            weights: self.weights.as_mut_ptr(),
            terms: self.terms.as_mut_ptr(),
            sums: self.sums.as_mut_ptr(),
            latents: self.latents.as_mut_ptr(),
            own: self.own.as_mut_ptr(),
        }
    }
}

#[cfg(test)]
mod tests;
