//! A layer of a decoder: as the caller describes it, and as a step reads it.

use std::ffi::c_void;

use crate::codes::Format;
use crate::element::{Element, vector};
use crate::experts::{ExpertsSpec, Mixture, RoutingSpec};
use crate::matmul::Matrix;
use crate::pages::{Pool, Shape};
use crate::recurrence::{Recurrence, RecurrenceSpec};

/// A kind of attention that some layers have, as the caller describes it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct AttentionSpec {
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    /// The number of first elements of a head that positions rotate; 0: none.
    pub(crate) rotary_dim: u32,
    /// The last positions that a query sees, its own among them; 0: all.
    pub(crate) window: u32,
    /// Positions of a chunk, of which a query sees those of its own; 0: there are no chunks.
    pub(crate) chunk: u32,
    /// 1: norms of queries and of keys are over all heads of a position. 0: each head has its own.
    pub(crate) norm_rows: u32,
    /// The factor of attention scores.
    pub(crate) scale: f32,
    /// The bound that scores approach; 0: there is none.
    pub(crate) cap: f32,
    /// 1: the layer's first product has gates of the output, as many as queries, behind the values.
    /// 0: it has none.
    pub(crate) gate: u32,
    /// float32 `[positions, rotary_dim / 2]`.
    pub(crate) cos: *const f32,
    pub(crate) sin: *const f32,
}

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
    /// The norm in front of the feed-forward part.
    pub(crate) post_norm: *const c_void,
    pub(crate) gate_up: *const c_void,
    pub(crate) gate_up_bias: *const c_void,
    pub(crate) down: *const c_void,
    pub(crate) down_bias: *const c_void,
    /// `[entries, kv_heads, head_dim]`, or codes of as many numbers with their scales.
    pub(crate) keys: *mut c_void,
    pub(crate) values: *mut c_void,
    /// The norm behind the attention, before it is added.
    pub(crate) attended_norm: *const c_void,
    /// The norm behind the feed-forward part, before it is added.
    pub(crate) fed_norm: *const c_void,
    /// `[heads]`: scores that take weight and give nothing.
    pub(crate) sinks: *const c_void,
    /// The formats of the four matrices in the order above, see [`Format::of`].
    pub(crate) formats: [u32; 4],
    /// The number of the layer's kind of attention.
    pub(crate) attention: u32,
    /// 1: both parts read the states in front of the layer, normalised once. 0: one after the
    /// other.
    pub(crate) parallel: u32,
    /// A layer that has them need not have `gate_up` and `down`, which are then what all tokens
    /// share.
    pub(crate) experts: ExpertsSpec,
    /// Null: the layer attends.
    pub(crate) recurrence: *const RecurrenceSpec,
}

/// Elements of a token on its way through a layer.
#[derive(Clone, Copy)]
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    /// Between the two products that all tokens have.
    pub(crate) inner: usize,
}

/// Reads the norms of layers: elements of the model's type, or float32.
#[derive(Clone, Copy)]
pub(crate) struct Norms {
    pub(crate) wide: bool,
}

impl Norms {
    /// # Safety
    /// `from` is null, or has so many numbers.
    pub(crate) unsafe fn read<E: Element>(self, from: *const c_void, length: usize) -> Vec<f32> {
        // SAFETY: the contract.
        unsafe { if self.wide { vector::<f32>(from, length) } else { vector::<E>(from, length) } }
    }
}

/// A layer. An empty norm is not there.
pub(crate) struct Layer<E> {
    /// The number of its kind of attention.
    pub(crate) attention: usize,
    pub(crate) parallel: bool,
    pub(crate) input_norm: Vec<f32>,
    pub(crate) attended_norm: Vec<f32>,
    pub(crate) fed_norm: Vec<f32>,
    pub(crate) sinks: Vec<f32>,
    pub(crate) qkv: Owned<E>,
    pub(crate) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(crate) output: Owned<E>,
    pub(crate) post_norm: Vec<f32>,
    pub(crate) mixture: Option<Mixture<E>>,
    /// The dense part for all tokens: beside experts, or in place of them.
    pub(crate) feed: Option<[Owned<E>; 2]>,
    pub(crate) pool: Pool<E>,
    /// What the layer has in place of attention; `None`: it attends.
    pub(crate) recurrence: Option<Recurrence>,
}

impl<E: Element> Layer<E> {
    /// # Safety
    /// `spec` describes what is there, and it stays there.
    pub(crate) unsafe fn new(
        spec: &LayerSpec,
        routing: &RoutingSpec,
        (shape, kind): (&Shape, &AttentionSpec),
        (norms, Widths { hidden, inner }): (Norms, Widths),
    ) -> Self {
        let dim = shape.head_dim;
        let (queries, keys) = (shape.heads * dim, shape.kv_heads * dim);
        // SAFETY: the caller's description.
        let recurrence = unsafe { spec.recurrence.as_ref() };
        let attending = ((1 + kind.gate as usize) * queries + 2 * keys, queries);
        let (projected, mixed) =
            recurrence.map_or(attending, |spec| (spec.projected(), spec.values()));
        let of_heads = if kind.norm_rows == 1 { (queries, keys) } else { (dim, dim) };
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
                attention: spec.attention as usize,
                parallel: spec.parallel == 1,
                input_norm: norms.read::<E>(spec.input_norm, hidden),
                attended_norm: norms.read::<E>(spec.attended_norm, hidden),
                fed_norm: norms.read::<E>(spec.fed_norm, hidden),
                sinks: vector::<E>(spec.sinks, shape.heads),
                qkv: Owned::new((spec.qkv, of_qkv), (projected, hidden), spec.qkv_bias),
                qk_norm: (!spec.q_norm.is_null()).then(|| {
                    let keys = norms.read::<E>(spec.k_norm, of_heads.1);
                    (norms.read::<E>(spec.q_norm, of_heads.0), keys)
                }),
                output: Owned::new((spec.output, of_output), (hidden, mixed), spec.output_bias),
                post_norm: norms.read::<E>(spec.post_norm, hidden),
                mixture: spec
                    .experts
                    .is_there()
                    .then(|| Mixture::new(&spec.experts, routing, hidden)),
                feed: (!spec.gate_up.is_null()).then(feed),
                pool: Pool { keys: spec.keys.cast(), values: spec.values.cast() },
                recurrence: recurrence.map(|spec| Recurrence::new::<E>(spec)),
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
