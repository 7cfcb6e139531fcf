//! The element types of weights, activations and KV pages.

/// A bfloat16 number, stored as its bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

/// An element in memory; arithmetic is done in `f32`.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    /// The number of adjacent inner positions that a packed panel stores side by side. The
    /// dot-product instruction determines this number.
    const PAIR: usize;
    /// Converts to `f32`, which is exact.
    fn to_f32(self) -> f32;
    /// Converts from `f32`, rounded to the nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const PAIR: usize = 1;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for Bf16 {
    const PAIR: usize = 2;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could turn a NaN into infinity or zero.
        Self(if value.is_nan() { (bits >> 16) | 0x40 } else { rounded } as u16)
    }
}

/// Converts a vector of a checkpoint, given as bytes of elements `E`, to `f32`.
pub(crate) fn widened<E: Element>(bytes: &[u8]) -> Vec<f32> {
    let numbers = bytes.chunks_exact(size_of::<E>());
    // SAFETY: each chunk has the element's size, and all bit patterns are valid.
    numbers.map(|it| unsafe { it.as_ptr().cast::<E>().read_unaligned() }.to_f32()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bfloat16_rounds_to_nearest_even_and_keeps_specials() {
        for (value, bits) in [
            (1.0, 0x3f80),
            (-2.5, 0xc020),
            (1.0 + 1.0 / 256.0, 0x3f80),
            (1.0 + 3.0 / 256.0, 0x3f82),
            (f32::INFINITY, 0x7f80),
            (f32::MAX, 0x7f80),
            (0.0, 0),
        ] {
            assert_eq!(Bf16::from_f32(value).0, bits, "{value}");
        }
        assert!(Bf16::from_f32(f32::from_bits(0x7f80_0001)).to_f32().is_nan());
        for bits in 0..=u16::MAX {
            let value = Bf16(bits).to_f32();
            assert!(value.is_nan() || Bf16::from_f32(value).0 == bits);
        }
    }
}
