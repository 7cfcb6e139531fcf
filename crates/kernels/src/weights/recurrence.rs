//! The weights of a recurrent layer.

use super::matrix::{Bytes, of_size};
use crate::packing::{Unfit, unfit};
use crate::sizes::{RecurrenceSizes, Sizes, StateGate};

/// The weights of a recurrence besides its two products. Those that are not float32 are of the
/// model's type.
#[derive(Clone)]
pub struct RecurrenceWeights {
    /// The sizes.
    pub sizes: RecurrenceSizes,
    /// The convolution, `[channels, taps]`.
    pub conv: Bytes,
    /// The biases of the convolution, `[channels]`.
    pub conv_bias: Option<Bytes>,
    /// Logarithms of decays without the step, float32 `[heads]`.
    pub decay: Option<Bytes>,
    /// Biases of steps, float32 `[heads]`.
    pub step_bias: Option<Bytes>,
    /// Factors of values that are added to the output, float32 `[heads]`.
    pub skip: Option<Bytes>,
    /// The weight of the norm, of one head with the delta rule, and otherwise of all.
    pub norm: Option<Bytes>,
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
        if !groups || !fits || large || of.taps == 0 || values == 0 || !there {
            return unfit(format!("no kernel computes a recurrence of {of:?}"));
        }
        if normed != self.norm.is_some() {
            return unfit("a recurrence whose norm has no weight, or one that is not used");
        }
        let (channels, element) = (of.channels(), sizes.dtype.bytes());
        of_size(&self.conv, channels * of.taps * element)?;
        let heads = of.heads * size_of::<f32>();
        let others = [
            (&self.conv_bias, channels * element),
            (&self.decay, heads),
            (&self.step_bias, heads),
            (&self.skip, heads),
            (&self.norm, weight * element),
        ];
        others
            .into_iter()
            .filter_map(|(bytes, size)| Some((bytes.as_ref()?, size)))
            .try_for_each(|(bytes, size)| of_size(bytes, size))
    }
}
