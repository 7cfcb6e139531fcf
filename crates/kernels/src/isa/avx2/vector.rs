//! A vector of sixteen floats in two registers.

use std::arch::x86_64::*;

use crate::vector::{Vector, VectorWork};

/// The first eight lanes, then the last eight.
#[derive(Clone, Copy)]
pub(crate) struct Ymms(pub(super) [__m256; 2]);

/// Applies an instruction to both registers.
macro_rules! both {
    ($instruction:ident $(, $operand:expr)*) => {
        Ymms([$instruction($($operand.0[0]),*), $instruction($($operand.0[1]),*)])
    };
}

/// Reduces all lanes by halving: `$wide` for registers, `$work` for halves.
macro_rules! fold {
    ($vector:expr, $wide:ident, $work:ident) => {{
        let v = $wide($vector.0[0], $vector.0[1]);
        let v = $work(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = $work(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32($work(v, _mm_movehdup_ps(v)))
    }};
}

// SAFETY (of every block): a vector is used only where the processor has the instructions.
impl Vector for Ymms {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([unsafe { _mm256_set1_ps(value) }; 2])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, self.0[0]);
            _mm256_storeu_ps(to.add(8), self.0[1]);
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { both!(_mm256_add_ps, self, other) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        unsafe { both!(_mm256_sub_ps, self, other) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        unsafe { both!(_mm256_mul_ps, self, other) }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        unsafe { both!(_mm256_div_ps, self, other) }
    }
    #[inline(always)]
    fn fused(self, factor: Self, term: Self) -> Self {
        unsafe { both!(_mm256_fmadd_ps, self, factor, term) }
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        unsafe { both!(_mm256_max_ps, self, other) }
    }
    // If one operand is NaN, these instructions return the second operand.
    #[inline(always)]
    fn at_least(self, bound: f32) -> Self {
        unsafe { both!(_mm256_max_ps, Self::splat(bound), self) }
    }
    #[inline(always)]
    fn at_most(self, bound: f32) -> Self {
        unsafe { both!(_mm256_min_ps, Self::splat(bound), self) }
    }
    #[inline(always)]
    fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let [low, high] = self.0;
        Self(unsafe { [_mm256_round_ps::<NEAREST>(low), _mm256_round_ps::<NEAREST>(high)] })
    }
    #[inline(always)]
    fn times_power(self, n: Self) -> Self {
        let [low, high] = self.0;
        Self(unsafe { [times_power(low, n.0[0]), times_power(high, n.0[1])] })
    }
    #[inline(always)]
    fn only(self, count: usize) -> Self {
        let [low, high] = self.0;
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let least = _mm256_set1_ps(f32::NEG_INFINITY);
            let count = _mm256_set1_epi32(count as i32);
            let first = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lanes));
            let others = _mm256_add_epi32(lanes, _mm256_set1_epi32(8));
            let second = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, others));
            Self([_mm256_blendv_ps(least, low, first), _mm256_blendv_ps(least, high, second)])
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { fold!(self, _mm256_add_ps, _mm_add_ps) }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { fold!(self, _mm256_max_ps, _mm_max_ps) }
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        // x - x is 0 for finite x, and NaN for infinities and NaN.
        let Self([low, high]) = self.sub(self);
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(low, high)) == 0 }
    }
    #[inline(always)]
    unsafe fn store_codes(self, to: *mut i8) {
        unsafe {
            let [low, high] = [_mm256_cvtps_epi32(self.0[0]), _mm256_cvtps_epi32(self.0[1])];
            // The instruction packs each half of a register separately; the permutation restores
            // the order.
            let words = _mm256_permute4x64_epi64::<0xd8>(_mm256_packs_epi32(low, high));
            let (first, others) =
                (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), _mm_packs_epi16(first, others));
        }
    }
    #[inline(always)]
    unsafe fn load_codes(from: *const i8) -> Self {
        unsafe {
            let codes = _mm_loadu_si128(from.cast());
            let (low, high) = (
                _mm256_cvtepi8_epi32(codes),
                _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(codes, codes)),
            );
            Self([_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)])
        }
    }
    #[inline(never)]
    unsafe fn compute<W: VectorWork>(work: W) {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn run<W: VectorWork>(work: W) {
            // SAFETY: the caller upholds the contract, here and below.
            unsafe { work.compute::<Ymms>() }
        }
        unsafe { run(work) }
    }
}

/// [`Vector::times_power`] for one register: results below the smallest normal power become 0.
#[inline(always)]
unsafe fn times_power(x: __m256, n: __m256) -> __m256 {
    // SAFETY: the processor has the instructions.
    unsafe {
        let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
        let little = _mm256_cmp_ps::<_CMP_LT_OQ>(n, _mm256_set1_ps(-126.0));
        _mm256_andnot_ps(little, _mm256_mul_ps(x, power))
    }
}
