//! Mixtures of experts: the part of a layer in which each token goes to some of many gated
//! feed-forward parts ([ADR 52](../../../docs/adr/0052-experts-in-the-compiled-kernels.md)).
//!
//! A token's logits, its choice and the order in which its experts' results are added depend on it
//! alone. Rows that go to one expert are computed together, and every row is computed as in any
//! other product: in an order that does not depend on its neighbours.

mod routing;
mod sorted;

use std::ffi::c_void;

use crate::codes::Format;
use crate::element::{Element, vector};
use crate::matmul::Matrix;
use crate::memory::grow;
use crate::pack::{packed_len, padded_outputs};
use crate::quantise::quantised_bytes;
use crate::team::FEW;
use crate::tile::MAX_ROWS;

use routing::Chooser;
pub use routing::RoutingSpec;
pub(crate) use sorted::{Active, RowTile, Sorted};

/// The experts of one layer, as the caller describes them; all null in a layer that has none.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExpertsSpec {
    /// `[experts, hidden]`, as in the checkpoint.
    pub(crate) router: *const c_void,
    /// `[experts]`: numbers that are added to scores for the choice only; null: there are none.
    pub(crate) correction: *const f32,
    /// Gates and their values of each expert, `[2 * intermediate, hidden]`, interleaved and packed
    /// one expert behind the other.
    pub(crate) gate_up: *const c_void,
    /// Packed, one expert behind the other: `[hidden, intermediate]`.
    pub(crate) down: *const c_void,
    /// The formats of the two matrices, see [`Format::of`].
    pub(crate) formats: [u32; 2],
    /// `[hidden]`: its product with a token is the logit of the shared expert's factor; null: the
    /// factor is 1.
    pub(crate) shared_gate: *const c_void,
    /// `[experts]`: terms of logits; null: there are none.
    pub(crate) router_bias: *const c_void,
    /// The biases of gates and then of their values, `[experts, 2 * intermediate]`; null: there are
    /// none.
    pub(crate) gate_up_bias: *const c_void,
    /// `[experts, hidden]`; null: there are none.
    pub(crate) down_bias: *const c_void,
}

impl ExpertsSpec {
    /// No experts.
    pub const NONE: Self = Self {
        router: std::ptr::null(),
        correction: std::ptr::null(),
        gate_up: std::ptr::null(),
        down: std::ptr::null(),
        formats: [0; 2],
        shared_gate: std::ptr::null(),
        router_bias: std::ptr::null(),
        gate_up_bias: std::ptr::null(),
        down_bias: std::ptr::null(),
    };

    pub(crate) fn is_there(&self) -> bool {
        !self.router.is_null()
    }
}

/// The same matrix of all experts, packed, one behind the other.
pub(crate) struct Stack<E> {
    panels: *const E,
    pub(crate) format: Option<Format>,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// From one expert's to the next one's, in elements, or bytes of a quantised matrix.
    apart: usize,
    /// `[experts, outputs]`; empty: there are none.
    biases: Vec<f32>,
}

impl<E: Element> Stack<E> {
    /// # Safety
    /// `biases` is null, or has so many for each of `count` experts.
    unsafe fn new(
        (panels, format): (*const c_void, u32),
        (biases, count): (*const c_void, usize),
        (outputs, inputs): (usize, usize),
        interleaved: bool,
    ) -> Self {
        let format = Format::of(format);
        let apart = match format {
            None => packed_len(padded_outputs(outputs, interleaved), inputs),
            Some(format) => quantised_bytes(format, outputs, inputs, interleaved),
        };
        // SAFETY: the contract.
        let biases = unsafe { vector::<E>(biases, count * outputs) };
        Self { panels: panels.cast(), format, outputs, inputs, apart, biases }
    }

    #[inline(always)]
    pub(crate) fn of(&self, expert: usize) -> Matrix<'_, E> {
        let &Self { panels, format, outputs, inputs, apart, ref biases } = self;
        let panels = match format {
            None => panels.wrapping_add(expert * apart),
            Some(_) => panels.wrapping_byte_add(expert * apart),
        };
        let bias = biases.get(expert * outputs..(expert + 1) * outputs).unwrap_or_default();
        Matrix { panels, format, outputs, inputs, bias }
    }
}

/// The experts of one layer.
pub(crate) struct Mixture<E> {
    pub(crate) router: *const c_void,
    pub(crate) correction: Vec<f32>,
    /// Terms of logits; empty: there are none.
    pub(crate) router_bias: Vec<f32>,
    pub(crate) gate_up: Stack<E>,
    pub(crate) down: Stack<E>,
    /// Empty: the shared expert has no gate.
    pub(crate) shared_gate: Vec<f32>,
}

impl<E: Element> Mixture<E> {
    /// # Safety
    /// `spec` describes what is there, and it stays there.
    pub(crate) unsafe fn new(spec: &ExpertsSpec, routing: &RoutingSpec, hidden: usize) -> Self {
        let (inner, count) = (routing.intermediate as usize, routing.count as usize);
        let gate_up = (spec.gate_up, spec.formats[0]);
        let down = (spec.down, spec.formats[1]);
        // SAFETY: the caller's description.
        unsafe {
            Self {
                router: spec.router,
                correction: vector::<f32>(spec.correction.cast(), count),
                router_bias: vector::<E>(spec.router_bias, count),
                gate_up: Stack::new(gate_up, (spec.gate_up_bias, count), (2 * inner, hidden), true),
                down: Stack::new(down, (spec.down_bias, count), (hidden, inner), false),
                shared_gate: vector::<E>(spec.shared_gate, hidden),
            }
        }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.gate_up.format.is_some() || self.down.format.is_some()
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
    /// The output of each row, `[rows, hidden]`.
    terms: Vec<f32>,
    own: Vec<Own<E>>,
}

/// Buffers of one member.
#[derive(Default)]
pub(crate) struct Own<E> {
    pub(crate) sorted: Sorted,
    pub(crate) chooser: Chooser,
    /// The rows of one tile.
    pub(crate) gathered: Vec<E>,
}

/// The same, while a step is computed.
#[derive(Clone, Copy)]
pub(crate) struct Buffers<E> {
    pub(crate) logits: *mut f32,
    pub(crate) ids: *mut u32,
    pub(crate) weights: *mut f32,
    pub(crate) terms: *mut f32,
    pub(crate) own: *mut Own<E>,
}

impl<E: Element> Work<E> {
    /// Has room for a step of so many tokens.
    pub(crate) fn make_room(
        &mut self,
        routing: &RoutingSpec,
        (tokens, hidden, members): (usize, usize, usize),
    ) {
        let (count, per_token) = (routing.count as usize, routing.per_token as usize);
        let choices = tokens.max(members * FEW) * per_token;
        grow(&mut self.logits, tokens * count, 0.0);
        grow(&mut self.ids, choices, 0);
        grow(&mut self.weights, choices, 0.0);
        grow(&mut self.terms, tokens * per_token * hidden, 0.0);
        self.own.resize_with(members, Own::default);
        for own in &mut self.own {
            grow(&mut own.gathered, MAX_ROWS * hidden, E::default());
        }
    }

    pub(crate) fn buffers(&mut self) -> Buffers<E> {
        Buffers {
            logits: self.logits.as_mut_ptr(),
            ids: self.ids.as_mut_ptr(),
            weights: self.weights.as_mut_ptr(),
            terms: self.terms.as_mut_ptr(),
            own: self.own.as_mut_ptr(),
        }
    }
}

#[cfg(test)]
mod tests;
