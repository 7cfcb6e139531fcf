//! Recurrent layers: as the caller describes them, and as a step reads them.

mod advance;

use std::ffi::c_void;

use crate::element::{Element, vector};

pub(crate) use advance::{Advance, Gating, Sigmoids, StateRow};

/// The recurrence of a layer in place of attention, as the caller describes it. The layer's `qkv`
/// has the rows of queries, keys and values, of gates, of decays and of strengths, and `output` has
/// the values as its inputs. Without heads the rows are the gate behind the convolution, the one in
/// front of it, and the values.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RecurrenceSpec {
    /// 0: there is a convolution only.
    pub(crate) heads: u32,
    pub(crate) key_heads: u32,
    pub(crate) key_dim: u32,
    pub(crate) value_dim: u32,
    /// 0: a key head is that of heads that follow one another. 1: their distance is the number of
    /// key heads.
    pub(crate) tiled: u32,
    /// 1: a state's old value for a key is taken away first. 0: it stays.
    pub(crate) delta: u32,
    pub(crate) taps: u32,
    /// The place of the norm's gate: 0, there is no norm; 1, behind it; 2, in front of it.
    pub(crate) norm: u32,
    /// Elements that have a mean of their own.
    pub(crate) norm_size: u32,
    /// `[channels, taps]`
    pub(crate) conv: *const c_void,
    /// `[channels]`, or null.
    pub(crate) conv_bias: *const c_void,
    /// float32 `[heads]`: logarithms of decays without the step.
    pub(crate) decay: *const f32,
    /// float32 `[heads]`
    pub(crate) step_bias: *const f32,
    /// float32 `[heads]`, or null.
    pub(crate) skip: *const f32,
    /// `[value_dim]` with the delta rule, otherwise `[heads * value_dim]`; null: there is none.
    pub(crate) norm_weight: *const c_void,
    /// float32 `[rows, taps - 1, channels]`: the last inputs of the convolution.
    pub(crate) inputs: *mut f32,
    /// float32 `[rows, heads, key_dim, value_dim]`
    pub(crate) states: *mut f32,
}

impl RecurrenceSpec {
    pub(crate) fn keys(&self) -> usize {
        self.key_heads as usize * self.key_dim as usize
    }

    pub(crate) fn values(&self) -> usize {
        self.heads.max(1) as usize * self.value_dim as usize
    }

    /// The key head of a head.
    pub(crate) fn key_of(&self, head: usize) -> usize {
        let keys = self.key_heads as usize;
        if self.tiled == 1 { head % keys } else { head / (self.heads as usize / keys) }
    }

    pub(crate) fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// The first of the gates among the outputs of the first product.
    pub(crate) fn gates(&self) -> usize {
        if self.heads == 0 { 0 } else { self.channels() }
    }

    /// Outputs of the first product.
    pub(crate) fn projected(&self) -> usize {
        match self.heads as usize {
            0 => 3 * self.values(),
            heads => self.channels() + self.values() + (1 + self.delta as usize) * heads,
        }
    }
}

/// The recurrence of a layer.
pub(crate) struct Recurrence {
    pub(crate) spec: RecurrenceSpec,
    /// `[taps, channels]`
    pub(crate) conv: Vec<f32>,
    /// `[channels]`
    pub(crate) conv_bias: Vec<f32>,
    /// `[heads]`: below 0.
    pub(crate) decay: Vec<f32>,
    pub(crate) step_bias: Vec<f32>,
    pub(crate) skip: Vec<f32>,
    pub(crate) norm_weight: Vec<f32>,
}

impl Recurrence {
    /// # Safety
    /// `spec` describes what is there, and the states stay there.
    pub(crate) unsafe fn new<E: Element>(spec: &RecurrenceSpec) -> Self {
        let (channels, taps) = (spec.channels(), spec.taps as usize);
        let heads = spec.heads as usize;
        let of_norm = if spec.delta == 1 { spec.value_dim as usize } else { spec.values() };
        // SAFETY: the caller's description.
        unsafe {
            let conv = vector::<E>(spec.conv, channels * taps);
            let turned = |at: usize| conv[at % channels * taps + at / channels];
            let decay = vector::<f32>(spec.decay.cast(), heads);
            let bias = vector::<E>(spec.conv_bias, channels);
            Self {
                spec: *spec,
                conv: (0..channels * taps).map(turned).collect(),
                conv_bias: if bias.is_empty() { vec![0.0; channels] } else { bias },
                decay: decay.iter().map(|decay| -decay.exp()).collect(),
                step_bias: vector::<f32>(spec.step_bias.cast(), heads),
                skip: vector::<f32>(spec.skip.cast(), heads),
                norm_weight: vector::<E>(spec.norm_weight, of_norm),
            }
        }
    }
}
