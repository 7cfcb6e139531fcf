//! Recurrent layers of a decoder for callers in Rust.

use std::ffi::c_void;

use super::{Bytes, Sizes, of_size};
use crate::memory::Room;
use crate::packing::{Unfit, unfit};
use crate::recurrence::RecurrenceSpec;

/// The place of the gate of a recurrence's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateGate {
    /// There is a gate and no norm.
    Alone,
    /// Behind the norm.
    BehindNorm,
    /// In front of the norm.
    BeforeNorm,
}

/// The sizes of a recurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrenceSizes {
    /// The number of heads of the state; 0: there is a convolution between two gates only.
    pub heads: usize,
    /// The number of heads of keys and queries.
    pub key_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head; without heads, of the convolution.
    pub value_dim: usize,
    /// True if heads that share a key head are as far apart as there are key heads; false: they
    /// follow one another.
    pub tiled: bool,
    /// True if a state's old value for a key is taken away first.
    pub delta: bool,
    /// Taps of the convolution.
    pub taps: usize,
    /// The place of the output's gate.
    pub gate: StateGate,
    /// Elements that have a mean of their own in the norm.
    pub norm_size: usize,
}

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

impl RecurrenceSizes {
    /// Bytes of one row of the states' tables: last inputs of the convolution, and heads' states.
    #[must_use]
    pub fn row_bytes(&self) -> [usize; 2] {
        let spec = self.spec();
        let inputs = (self.taps - 1) * spec.channels();
        [inputs, self.heads * self.key_dim * self.value_dim].map(|count| count * size_of::<f32>())
    }

    /// Outputs of the first product, and inputs of the second.
    #[must_use]
    pub fn widths(&self) -> (usize, usize) {
        let spec = self.spec();
        (spec.projected(), spec.values())
    }

    fn spec(&self) -> RecurrenceSpec {
        let none = std::ptr::null();
        RecurrenceSpec {
            heads: self.heads as u32,
            key_heads: self.key_heads as u32,
            key_dim: self.key_dim as u32,
            value_dim: self.value_dim as u32,
            tiled: self.tiled.into(),
            delta: self.delta.into(),
            taps: self.taps as u32,
            norm: match self.gate {
                StateGate::Alone => 0,
                StateGate::BehindNorm => 1,
                StateGate::BeforeNorm => 2,
            },
            norm_size: self.norm_size as u32,
            conv: none,
            conv_bias: none,
            decay: none.cast(),
            step_bias: none.cast(),
            skip: none.cast(),
            norm_weight: none,
            inputs: std::ptr::null_mut(),
            states: std::ptr::null_mut(),
        }
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
        if !groups || !fits || large || of.taps == 0 || values == 0 || !there {
            return unfit(format!("no kernel computes a recurrence of {of:?}"));
        }
        if normed != self.norm.is_some() {
            return unfit("a recurrence whose norm has no weight, or one that is not used");
        }
        let (channels, element) = (of.spec().channels(), sizes.dtype.bytes());
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

    /// The recurrence with its states' tables.
    pub(super) fn spec(&self, [inputs, states]: &mut [Room; 2]) -> RecurrenceSpec {
        let none = std::ptr::null::<c_void>();
        let optional = |bytes: &Option<Bytes>| {
            bytes.as_ref().map_or(none, |bytes| bytes.as_ptr().cast::<c_void>())
        };
        RecurrenceSpec {
            conv: self.conv.as_ptr().cast(),
            conv_bias: optional(&self.conv_bias),
            decay: optional(&self.decay).cast(),
            step_bias: optional(&self.step_bias).cast(),
            skip: optional(&self.skip).cast(),
            norm_weight: optional(&self.norm),
            inputs: inputs.as_mut_ptr().cast(),
            states: states.as_mut_ptr().cast(),
            ..self.sizes.spec()
        }
    }
}
