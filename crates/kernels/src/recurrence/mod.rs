//! The recurrence of a layer, as the computation of a step uses it.

mod advance;

use crate::element::{Element, widened};
use crate::memory::Room;
use crate::owned::Owned;
use crate::sizes::RecurrenceSizes;
use crate::weights::{Bytes, RecurrenceWeights};

pub(crate) use advance::{Advance, Gating, Sigmoids, StateRow};

/// The recurrence of a layer, in place of attention. The outputs of the layer's `qkv` are queries,
/// keys and values, then gates, decays and strengths. The inputs of `output` are values. With low
/// ranks, `qkv` yields the low ranks of gates and decays in place of both. Without heads, `qkv`
/// yields the gate after the convolution, the gate before it, and the values.
pub(crate) struct Recurrence {
    pub(crate) sizes: RecurrenceSizes,
    /// `[rows, taps - 1, channels]`: the last inputs of the convolution.
    pub(crate) inputs: *mut f32,
    /// `[rows, heads, key_dim, value_dim]`
    pub(crate) states: *mut f32,
    /// `[taps, channels]`
    pub(crate) conv: Vec<f32>,
    /// `[channels]`
    pub(crate) conv_bias: Vec<f32>,
    /// `[heads]`: the logarithm of the decay for a step of 1, always negative.
    pub(crate) decay: Vec<f32>,
    /// A bias for each decay.
    pub(crate) step_bias: Vec<f32>,
    /// The up projections from the low ranks of gates and of decays. `None` if there are no low
    /// ranks.
    pub(crate) low: Option<[Owned; 2]>,
    /// The factors of the values that are added directly to the output; empty if there are none.
    pub(crate) skip: Vec<f32>,
    /// `[value_dim]` with the delta rule, otherwise `[heads * value_dim]`; empty if there is no
    /// norm.
    pub(crate) norm_weight: Vec<f32>,
}

impl Recurrence {
    /// Creates a recurrence whose states are in the tables. It does not keep the tables alive.
    pub(crate) fn new<E: Element>(
        of: &RecurrenceWeights,
        [inputs, states]: &mut [Room; 2],
    ) -> Self {
        let (channels, taps) = (of.sizes.channels(), of.sizes.taps);
        let conv = widened::<E>(&of.conv);
        let turned = |at: usize| conv[at % channels * taps + at / channels];
        let wide = |it: &Option<Bytes>| it.as_ref().map(|it| widened::<f32>(it));
        let numbers = |it: &Option<Bytes>| it.as_ref().map(|it| widened::<E>(it));
        let low = of.low.as_ref().map(|[gates, decays]| {
            let (values, rank) = (of.sizes.values(), of.sizes.low_rank);
            [
                Owned::new::<E>(gates, (values, rank), None),
                Owned::new::<E>(decays, (of.sizes.decays(), rank), None),
            ]
        });
        Self {
            sizes: of.sizes,
            inputs: inputs.as_mut_ptr().cast(),
            states: states.as_mut_ptr().cast(),
            conv: (0..channels * taps).map(turned).collect(),
            conv_bias: numbers(&of.conv_bias).unwrap_or_else(|| vec![0.0; channels]),
            decay: wide(&of.decay).unwrap_or_default().iter().map(|decay| -decay.exp()).collect(),
            step_bias: wide(&of.step_bias).unwrap_or_default(),
            low,
            skip: wide(&of.skip).unwrap_or_default(),
            norm_weight: numbers(&of.norm).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests;
