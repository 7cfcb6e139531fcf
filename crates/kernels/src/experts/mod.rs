//! Mixtures of experts: layers in which each token is routed to some of many feed-forward networks
//! (ADR 52).
//!
//! A token's router logits, its experts and the order in which their outputs are summed depend on
//! the token alone. Rows of one expert are computed together. As in any other product, a row's
//! order of computation does not depend on the rows beside it.

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

/// The packed matrices of all experts, or of all heads, concatenated.
pub(crate) struct Stack {
    packed: Bytes,
    pub(crate) format: Option<Format>,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// The distance between the starts of two consecutive matrices, in bytes.
    apart: usize,
    /// `[experts, outputs]`; empty if there are no biases.
    biases: Vec<f32>,
}

impl Stack {
    /// Creates a stack of `count` matrices that were already checked. Biases are of the type `E`.
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
    /// The router's weights `[experts, hidden]`, in the checkpoint's order.
    pub(crate) router: Bytes,
    /// Biases that are added to the scores to choose experts, but not to compute weights; empty if
    /// there are none.
    pub(crate) correction: Vec<f32>,
    /// The router's biases; empty if there are none.
    pub(crate) router_bias: Vec<f32>,
    /// The projections before and after the experts. `None` if experts read and write states of the
    /// hidden size.
    pub(crate) latent: Option<[Owned; 2]>,
    /// The gate and up projections of each expert, interleaved: `[2 * intermediate, states]`.
    /// Without gates, the up projections `[intermediate, states]`.
    pub(crate) gate_up: Stack,
    /// The down projections `[states, intermediate]`.
    pub(crate) down: Stack,
    /// The weights of the shared expert's gate: their product with a token is the gate's logit.
    /// Empty if the gate is always 1.
    pub(crate) shared_gate: Vec<f32>,
    /// The norms and factors of experts beside a dense network. `None` if the layer has only
    /// experts.
    pub(crate) beside: Option<Beside>,
}

/// The norms and factors of experts in a layer that also has a dense network.
pub(crate) struct Beside {
    /// The weights of the norm of the router's inputs, times the square root of 1 / hidden.
    pub(crate) router: Vec<f32>,
    /// A factor per expert, by which the expert's routing weight is multiplied.
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
    /// Creates the mixture from the checked experts `of` a layer; `None` if the sizes have no
    /// experts. `E` is the model's type.
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

/// Buffers for the experts of a layer, reused from step to step.
#[derive(Default)]
pub(crate) struct Work<E> {
    /// `[tokens, experts]`.
    logits: Vec<f32>,
    /// The chosen experts, `[tokens, per_token]`. If there are few tokens, each member has its own
    /// copy.
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// The output of each row, `[rows, states]`.
    terms: Vec<f32>,
    /// The sum of the experts' outputs for each token, `[tokens, states]`, if experts run beside a
    /// dense network or have latent states.
    sums: Vec<f32>,
    /// The latent states of tokens `[tokens, states]`, later replaced by the sums of the experts'
    /// outputs.
    latents: Vec<E>,
    own: Vec<Own<E>>,
}

/// Buffers of one member of the team.
#[derive(Default)]
pub(crate) struct Own<E> {
    pub(crate) sorted: Sorted,
    pub(crate) chooser: Chooser,
    /// The rows of one tile.
    pub(crate) gathered: Vec<E>,
    /// The weight of each row, for models that multiply the expert's input by it.
    pub(crate) row_weights: Vec<f32>,
}

/// Pointers to the buffers of [`Work`] while a step is computed.
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
    /// Reserves memory for a step of this many tokens.
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
