//! Numbers as 8-bit integer codes with a scale. Quantised weights are stored in this form, and
//! activations are converted to it.
//!
//! Weights are stored as unsigned codes and activations as signed ones, since the processors' dot
//! products of bytes take these. The offset of unsigned codes adds to each product the offset times
//! the sum of the activations. So each row stores these sums, and they are subtracted. Integer sums
//! are exact, so nothing is lost.

use crate::element::Element;
use crate::vector::{LANES, Vector};

/// The number of inner positions that share a scale in the GGUF formats. All inner dimensions of
/// quantised matrices are multiples of it.
pub(crate) const SHARED: usize = 32;
/// The largest code of activations.
pub(crate) const LARGEST: f32 = 127.0;

/// The factor that maps numbers of magnitude up to `largest` to codes. The factor, and so every
/// code, is 0 if `largest` is zero, NaN, or so small that the inverse would be infinite.
#[inline(always)]
pub(crate) fn inverse_of(largest: f32) -> f32 {
    if largest > 1e-36 { LARGEST / largest } else { 0.0 }
}

/// The number format of a quantised matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// 8 bits, one scale per output.
    Int8,
    /// 8 bits, a scale per [`SHARED`] positions: GGUF's `Q8_0`.
    Q8_0,
    /// 4 bits, a scale per [`SHARED`] positions: GGUF's `Q4_0`.
    Q4_0,
    /// 4 bits, a scale and a minimum per [`SHARED`] positions: GGUF's `Q4_1`.
    Q4_1,
    /// 4-bit floats with a scale, a power of 2, per [`SHARED`] positions: `MXFP4` (OCP, 2023).
    Mxfp4,
    /// 4 bits that index a table of integers, with a scale per [`SHARED`] positions: GGUF's
    /// `IQ4_NL`.
    Iq4Nl,
}

/// The values of the 4-bit floats, doubled, with the offset added.
const HALVES_OF_FLOATS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// The integers of `IQ4_NL`, with the offset added.
const UNEVEN: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

impl Format {
    /// The code of zero.
    pub(crate) const fn offset(self) -> i32 {
        match self {
            Self::Int8 | Self::Q8_0 | Self::Iq4Nl => 128,
            Self::Q4_0 => 8,
            Self::Q4_1 => 0,
            Self::Mxfp4 => 12,
        }
    }

    /// The values that 4-bit codes index, with the offset added. `None` if codes are the values
    /// themselves.
    pub(crate) const fn table(self) -> Option<&'static [u8; 16]> {
        match self {
            Self::Mxfp4 => Some(&HALVES_OF_FLOATS),
            Self::Iq4Nl => Some(&UNEVEN),
            _ => None,
        }
    }

    /// The largest unsigned byte that enters a dot product.
    pub(crate) const fn largest(self) -> u8 {
        match self {
            Self::Int8 | Self::Q8_0 => u8::MAX,
            Self::Q4_0 | Self::Q4_1 => 15,
            Self::Mxfp4 => HALVES_OF_FLOATS[7],
            Self::Iq4Nl => UNEVEN[15],
        }
    }

    /// Decodes a panel's 16-bit scale: a half-precision float, or the upper half of an `f32`.
    #[inline(always)]
    pub(crate) fn scale_of(self, bits: u16) -> f32 {
        match self {
            Self::Mxfp4 => f32::from_bits(u32::from(bits) << 16),
            _ => half_to_f32(bits),
        }
    }

    /// True if two codes share a byte.
    pub(crate) const fn is_narrow(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Mxfp4 | Self::Iq4Nl)
    }

    /// The number of inner positions that share a scale, for an inner dimension of `k`.
    #[inline(always)]
    pub(crate) const fn shared(self, k: usize) -> usize {
        match self {
            Self::Int8 => k,
            _ => SHARED,
        }
    }
}

/// Activations as codes: each row has `inputs` codes, and a scale and a sum for each group of them.
#[derive(Clone, Copy)]
pub(crate) struct Codes {
    pub(crate) codes: *const i8,
    pub(crate) scales: *const f32,
    pub(crate) sums: *const i32,
    pub(crate) count: usize,
}

/// Memory for activations as codes.
#[derive(Clone, Copy)]
pub(crate) struct CodesRoom {
    pub(crate) codes: *mut i8,
    pub(crate) scales: *mut f32,
    pub(crate) sums: *mut i32,
}

impl CodesRoom {
    /// The memory from `row` on, where each row has `inputs` positions and `shared` positions per
    /// scale.
    #[inline(always)]
    pub(crate) fn from(self, row: usize, inputs: usize, shared: usize) -> Self {
        let scales = inputs / shared;
        Self {
            codes: self.codes.wrapping_add(row * inputs),
            scales: self.scales.wrapping_add(row * scales),
            sums: self.sums.wrapping_add(row * scales),
        }
    }

    #[inline(always)]
    pub(crate) fn filled(self, count: usize) -> Codes {
        Codes { codes: self.codes, scales: self.scales, sums: self.sums, count }
    }
}

/// The largest magnitude of the elements; NaN if one of them is not finite.
///
/// # Safety
/// `from` must be valid for reads of `count` elements, a multiple of [`LANES`].
#[inline(always)]
pub(crate) unsafe fn largest_of<E: Element, V: Vector>(from: *const E, count: usize) -> f32 {
    let mut largest = V::splat(0.0);
    let mut finite = true;
    for at in (0..count).step_by(LANES) {
        // SAFETY: by the function's contract, there is a whole vector at `at`.
        let x: V = unsafe { widened(from.add(at)) };
        finite &= x.is_finite();
        largest = largest.larger(x).larger(V::splat(0.0).sub(x));
    }
    if finite { largest.largest() } else { f32::NAN }
}

/// Quantises one row of activations with one scale per `shared` positions. The scaling is
/// symmetric; the largest element is exact, others are rounded to the nearest code. A group with an
/// element that is not finite gets a scale of NaN.
///
/// # Safety
/// `from` must have `inputs` elements, and `to` must have room for their codes. Both `inputs` and
/// `shared` must be multiples of [`SHARED`].
#[inline(always)]
pub(crate) unsafe fn encode<E: Element, V: Vector>(
    from: *const E,
    inputs: usize,
    shared: usize,
    to: CodesRoom,
) {
    // SAFETY: by the function's contract, all reads and writes are of whole vectors within the row.
    unsafe {
        for index in 0..inputs / shared {
            let (from, codes) = (from.add(index * shared), to.codes.add(index * shared));
            let largest = largest_of::<E, V>(from, shared);
            let inverse = inverse_of(largest);
            let mut sum = V::splat(0.0);
            for at in (0..shared).step_by(LANES) {
                let x: V = if largest.is_nan() { V::splat(0.0) } else { widened(from.add(at)) };
                let x = x.mul(V::splat(inverse)).at_least(-LARGEST).at_most(LARGEST).round();
                x.store_codes(codes.add(at));
                sum = sum.add(x);
            }
            *to.scales.add(index) = largest / LARGEST;
            // Sums of integers are exact in floats up to 2^24.
            *to.sums.add(index) = sum.sum() as i32;
        }
    }
}

/// Loads a vector of elements as floats.
///
/// # Safety
/// `from` must be valid for reads of [`LANES`] elements.
#[inline(always)]
pub(crate) unsafe fn widened<E: Element, V: Vector>(from: *const E) -> V {
    // SAFETY: the caller guarantees a whole vector.
    unsafe {
        let values: [f32; LANES] = std::array::from_fn(|lane| (*from.add(lane)).to_f32());
        V::load(values.as_ptr())
    }
}

/// Converts a half-precision float.
#[inline(always)]
pub(crate) fn half_to_f32(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // Moves the exponent to its position in an `f32` and corrects the bias: exact for denormals
    // too.
    let value = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | special | (bits & 0x8000) << 16)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fmt::Debug;

    use proptest::prelude::*;

    use super::*;
    use crate::element::Bf16;
    use crate::isa::plain::Array;
    use crate::isa::tests::{Check, kernels};
    use crate::tile::Kernel;

    /// Rows as codes, in owned memory.
    pub(crate) struct Encoded {
        pub(crate) codes: Vec<i8>,
        pub(crate) scales: Vec<f32>,
        pub(crate) sums: Vec<i32>,
    }

    impl Encoded {
        pub(crate) fn of<E: Element, V: Vector>(x: &[E], inputs: usize, shared: usize) -> Self {
            let scales = x.len() / shared;
            let mut made =
                Self { codes: vec![99; x.len()], scales: vec![9.0; scales], sums: vec![9; scales] };
            let room = CodesRoom {
                codes: made.codes.as_mut_ptr(),
                scales: made.scales.as_mut_ptr(),
                sums: made.sums.as_mut_ptr(),
            };
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                // SAFETY: the row and the memory have the sizes that `encode` requires, and the
                // caller detected the features of `V`.
                unsafe {
                    encode::<E, V>(x.as_ptr(), inputs, shared, room.from(row, inputs, shared))
                };
            }
            made
        }

        pub(crate) fn codes(&self, count: usize) -> Codes {
            let Self { codes, scales, sums } = self;
            Codes { codes: codes.as_ptr(), scales: scales.as_ptr(), sums: sums.as_ptr(), count }
        }
    }

    fn check<V: Vector>(x: &[f32], shared: usize) {
        let narrow: Vec<Bf16> = x.iter().map(|&x| Bf16::from_f32(x)).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
        let made = Encoded::of::<Bf16, V>(&narrow, x.len(), shared);
        let same = Encoded::of::<f32, Array>(&wide, x.len(), shared);
        assert_eq!(made.codes, same.codes);
        assert_eq!(made.sums, same.sums);
        for (index, x) in wide.chunks_exact(shared).enumerate() {
            let codes = &made.codes[index * shared..][..shared];
            let scale = made.scales[index];
            assert_eq!(scale.to_bits(), same.scales[index].to_bits());
            assert_eq!(codes.iter().map(|&code| i32::from(code)).sum::<i32>(), made.sums[index]);
            if x.iter().any(|x| !x.is_finite()) {
                assert!(scale.is_nan());
                continue;
            }
            for (x, &code) in x.iter().zip(codes) {
                assert!((-127..=127).contains(&code));
                let bound = scale * 0.5001 + 1e-36;
                assert!((x - scale * f32::from(code)).abs() <= bound, "{x} {code} {scale}");
            }
        }
    }

    fn values() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => -4.0f32..4.0,
            2 => Just(0.0f32),
            1 => prop::sample::select(vec![1e30, -1e30, 1e-38, 1e-44]),
        ]
    }

    struct Nearest<'a>(&'a [f32], usize);

    impl Check for Nearest<'_> {
        fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self) {
            check::<K::Vector>(self.0, self.1);
        }
    }

    proptest! {
        #[test]
        fn codes_are_the_nearest_at_every_level(
            x in prop::collection::vec(values(), 96),
            odd in prop::option::weighted(0.2, (0usize..96, prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]))),
            little in prop::sample::select(vec![0.0f32, 1e-40, 1e-30, 1.0, 1.0, 1.0]),
        ) {
            let mut x: Vec<f32> = x.iter().map(|x| x * little).collect();
            if let Some((at, value)) = odd {
                x[at] = value;
            }
            for shared in [32, 96] {
                kernels(&Nearest(&x, shared));
            }
        }
    }

    #[test]
    fn halves_are_widened_exactly() {
        for (bits, value) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0001, 2f32.powi(-24)),
            (0x03ff, 1023.0 * 2f32.powi(-24)),
            (0x8400, -(2f32.powi(-14))),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ] {
            assert_eq!(half_to_f32(bits), value, "{bits:x}");
        }
        assert!(half_to_f32(0x7e00).is_nan());
        assert_eq!(half_to_f32(0x8000).to_bits(), 0x8000_0000);
    }
}
