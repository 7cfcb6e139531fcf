//! Recurrent layers, as a step reads them.

mod advance;

use crate::element::{Element, widened};
use crate::memory::Room;
use crate::owned::Owned;
use crate::sizes::RecurrenceSizes;
use crate::weights::{Bytes, RecurrenceWeights};

pub(crate) use advance::{Advance, Gating, Sigmoids, StateRow};

/// The recurrence of a layer in place of attention. The layer's `qkv` has the rows of queries, keys
/// and values, of gates, of decays and of strengths, and `output` has the values as its inputs.
/// With low ranks, `qkv` has the low ranks of gates and decays in their place. Without heads the
/// rows are the gate behind the convolution, the one in front of it, and the values.
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
    /// `[heads]`: below 0.
    pub(crate) decay: Vec<f32>,
    /// One for each decay.
    pub(crate) step_bias: Vec<f32>,
    /// The products that follow the low ranks of gates and of decays; `None`: there are no low
    /// ranks.
    pub(crate) low: Option<[Owned; 2]>,
    /// Empty: no values are added to the output.
    pub(crate) skip: Vec<f32>,
    /// `[value_dim]` with the delta rule, otherwise `[heads * value_dim]`; empty: there is no norm.
    pub(crate) norm_weight: Vec<f32>,
}

impl Recurrence {
    /// A recurrence whose states lie in the tables. It does not keep them alive.
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
