//! A layer of a decoder: as the caller describes it, and as a step reads it.

use std::ffi::c_void;

use crate::codes::Format;
use crate::element::Element;
use crate::experts::{ExpertsSpec, Mixture, RoutingSpec};
use crate::matmul::Matrix;
use crate::pages::{Pool, Shape};

/// One layer, as the caller describes it. Matrices are packed, vectors as in the checkpoint; a null
/// pointer stands for a part that the layer lacks.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LayerSpec {
    pub(crate) input_norm: *const c_void,
    pub(crate) qkv: *const c_void,
    pub(crate) qkv_bias: *const c_void,
    pub(crate) q_norm: *const c_void,
    pub(crate) k_norm: *const c_void,
    pub(crate) output: *const c_void,
    pub(crate) output_bias: *const c_void,
    pub(crate) post_norm: *const c_void,
    pub(crate) gate_up: *const c_void,
    pub(crate) gate_up_bias: *const c_void,
    pub(crate) down: *const c_void,
    pub(crate) down_bias: *const c_void,
    /// `[entries, kv_heads, head_dim]`, or codes of as many numbers with their scales.
    pub(crate) keys: *mut c_void,
    pub(crate) values: *mut c_void,
    /// The formats of the four matrices in the order above, see [`Format::of`].
    pub(crate) formats: [u32; 4],
    /// A layer that has them need not have `gate_up` and `down`, which are then what all tokens
    /// share.
    pub(crate) experts: ExpertsSpec,
}

/// Elements of a token on its way through a layer.
#[derive(Clone, Copy)]
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    /// Between the two products that all tokens have.
    pub(crate) inner: usize,
}

pub(crate) struct Layer<E> {
    pub(crate) input_norm: Vec<f32>,
    pub(crate) qkv: Owned<E>,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) output: Owned<E>,
    pub(crate) post_norm: Vec<f32>,
    pub(crate) mixture: Option<Mixture<E>>,
    /// The dense part for all tokens: beside experts, or in place of them.
    pub(crate) feed: Option<[Owned<E>; 2]>,
    pub(crate) pool: Pool<E>,
}

impl<E: Element> Layer<E> {
    /// # Safety
    /// `spec` describes what is there, and it stays there.
    pub(crate) unsafe fn new(
        spec: &LayerSpec,
        routing: &RoutingSpec,
        shape: &Shape,
        Widths { hidden, inner }: Widths,
    ) -> Self {
        let (dim, queries) = (shape.head_dim, shape.heads * shape.head_dim);
        let projected = queries + 2 * shape.kv_heads * dim;
        let [of_qkv, of_output, of_gate_up, of_down] = spec.formats;
        // SAFETY: the caller's description.
        unsafe {
            let feed = || {
                let gate_up = (spec.gate_up, of_gate_up);
                let down = (spec.down, of_down);
                [
                    Owned::new(gate_up, (2 * inner, hidden), spec.gate_up_bias),
                    Owned::new(down, (hidden, inner), spec.down_bias),
                ]
            };
            Self {
                input_norm: vector::<E>(spec.input_norm, hidden),
                qkv: Owned::new((spec.qkv, of_qkv), (projected, hidden), spec.qkv_bias),
                qk_norm: (!spec.q_norm.is_null())
                    .then(|| (vector::<E>(spec.q_norm, dim), vector::<E>(spec.k_norm, dim))),
                output: Owned::new((spec.output, of_output), (hidden, queries), spec.output_bias),
                post_norm: vector::<E>(spec.post_norm, hidden),
                mixture: spec
                    .experts
                    .is_there()
                    .then(|| Mixture::new(&spec.experts, routing, hidden)),
                feed: (!spec.gate_up.is_null()).then(feed),
                pool: Pool { keys: spec.keys.cast(), values: spec.values.cast() },
            }
        }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        [&self.qkv, &self.output]
            .into_iter()
            .chain(self.feed.iter().flatten())
            .any(Owned::is_quantised)
            || self.mixture.as_ref().is_some_and(Mixture::is_quantised)
    }
}

/// A packed matrix, which stays where the caller has it, and its bias.
pub(crate) struct Owned<E> {
    panels: *const E,
    format: Option<Format>,
    pub(crate) outputs: usize,
    inputs: usize,
    bias: Vec<f32>,
}

impl<E: Element> Owned<E> {
    /// # Safety
    /// `panels` and `bias` are what the numbers say, and the first stays there.
    pub(crate) unsafe fn new(
        (panels, format): (*const c_void, u32),
        (outputs, inputs): (usize, usize),
        bias: *const c_void,
    ) -> Self {
        let format = Format::of(format);
        // SAFETY: the contract.
        let bias = unsafe { vector::<E>(bias, outputs) };
        Self { panels: panels.cast(), format, outputs, inputs, bias }
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.format.is_some()
    }

    pub(crate) fn matrix(&self) -> Matrix<'_, E> {
        let Self { panels, format, outputs, inputs, ref bias } = *self;
        Matrix { panels, format, outputs, inputs, bias }
    }
}

/// The vector `[length]` of a checkpoint, or nothing if it has none.
///
/// # Safety
/// `from` is null, or has so many elements.
pub(crate) unsafe fn vector<E: Element>(from: *const c_void, length: usize) -> Vec<f32> {
    if from.is_null() {
        return Vec::new();
    }
    // SAFETY: the contract.
    let values = unsafe { std::slice::from_raw_parts(from.cast::<E>(), length) };
    values.iter().map(|value| value.to_f32()).collect()
}
