//! The weights of a recurrence.

use super::matrix::{Bytes, Matrix, of_size};
use crate::packing::{Unfit, unfit};
use crate::sizes::{RecurrenceSizes, Sizes, StateGate};

/// The weights of a recurrence, except for its input and output projections. Vectors are of the
/// model's type unless they are stated to be float32.
#[derive(Clone)]
pub struct RecurrenceWeights {
    /// The sizes.
    pub sizes: RecurrenceSizes,
    /// The convolution, `[channels, taps]`.
    pub conv: Bytes,
    /// The biases of the convolution, `[channels]`.
    pub conv_bias: Option<Bytes>,
    /// `A_log`, float32 `[heads]`: the decay of a step is `exp(-exp(A_log) * step)`.
    pub decay: Option<Bytes>,
    /// The biases of steps, float32, one for each decay.
    pub step_bias: Option<Bytes>,
    /// The projections from the low ranks: of gates, `[values, low_rank]`, and of decays, `[decays,
    /// low_rank]`. `None` if there are no low ranks.
    pub low: Option<[Matrix; 2]>,
    /// The factors of values that are added directly to the output, float32 `[heads]`.
    pub skip: Option<Bytes>,
    /// The weight of the norm: for one head with the delta rule, otherwise for all heads.
    pub norm: Option<Bytes>,
}

/// A recurrence beside a layer's attention, with its projections.
#[derive(Clone)]
pub struct StatePart {
    /// The recurrence.
    pub recurrence: RecurrenceWeights,
    /// The projection of queries, keys, values, gates, decays and strengths. It reads the same
    /// states as the attention.
    pub input: Matrix,
    /// The bias of `input`, one value per output.
    pub input_bias: Option<Bytes>,
    /// The projection of the recurrence's values, `[hidden, values]`.
    pub output: Matrix,
    /// The bias of `output`, `[hidden]`.
    pub output_bias: Option<Bytes>,
}

impl StatePart {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let (hidden, dtype) = (sizes.hidden, sizes.dtype);
        let (projected, values) = self.recurrence.sizes.widths();
        self.recurrence.check(sizes)?;
        self.input.check(dtype, (projected, hidden), false)?;
        self.output.check(dtype, (hidden, values), false)?;
        let biases = [(&self.input_bias, projected), (&self.output_bias, hidden)];
        biases
            .into_iter()
            .filter_map(|(bias, size)| Some((bias.as_ref()?, size)))
            .try_for_each(|(bias, size)| of_size(bias, size * dtype.bytes()))
    }
}

impl RecurrenceWeights {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let of = &self.sizes;
        let numbers = [of.heads, of.key_heads, of.key_dim, of.value_dim, of.taps, of.norm_size];
        let groups = match (of.heads, of.key_heads) {
            (0, key_heads) => key_heads == 0 && !of.delta && of.gate == StateGate::Alone,
            (heads, key_heads) => key_heads > 0 && heads.is_multiple_of(key_heads),
        };
        let (_, values) = of.widths();
        let normed = of.gate != StateGate::Alone;
        let weight = if of.delta { of.value_dim } else { values };
        let fits = !normed
            || of.norm_size > 0
                && values.is_multiple_of(of.norm_size)
                && weight.is_multiple_of(of.norm_size);
        let large = numbers.iter().any(|&number| number > i32::MAX as usize >> 8);
        let there = of.heads == 0 || self.decay.is_some() && self.step_bias.is_some();
        let of_heads = of.heads > 0 || !of.channel_decay && !of.sigmoid_gate && of.low_rank == 0;
        let low = of.low_rank.is_multiple_of(2) && (of.low_rank > 0) == self.low.is_some();
        let parts = there && of_heads && low && (of.delta || !of.channel_decay);
        if !groups || !fits || large || of.taps == 0 || values == 0 || !parts {
            return unfit(format!("no kernel computes a recurrence of {of:?}"));
        }
        if normed != self.norm.is_some() {
            return unfit("a recurrence whose norm has no weight, or one that is not used");
        }
        if let Some([gates, decays]) = &self.low {
            gates.check(sizes.dtype, (values, of.low_rank), false)?;
            decays.check(sizes.dtype, (of.decays(), of.low_rank), false)?;
        }
        let (channels, element) = (of.channels(), sizes.dtype.bytes());
        of_size(&self.conv, channels * of.taps * element)?;
        let heads = of.heads * size_of::<f32>();
        let others = [
            (&self.conv_bias, channels * element),
            (&self.decay, heads),
            (&self.step_bias, of.decays() * size_of::<f32>()),
            (&self.skip, heads),
            (&self.norm, weight * element),
        ];
        others
            .into_iter()
            .filter_map(|(bytes, size)| Some((bytes.as_ref()?, size)))
            .try_for_each(|(bytes, size)| of_size(bytes, size))
    }
}
