//! A vector of sixteen floats in one register.

use std::arch::x86_64::*;

use crate::vector::{Vector, VectorWork};

/// The register of the vector.
#[derive(Clone, Copy)]
pub(crate) struct Zmm(pub(in crate::isa) __m512);

/// Reduces all lanes by halving.
macro_rules! fold {
    ($vector:expr, $work:ident) => {{
        let v = $vector;
        let v = $work(v, _mm512_shuffle_f32x4::<0x4e>(v, v));
        let v = $work(v, _mm512_shuffle_f32x4::<0xb1>(v, v));
        let v = $work(v, _mm512_shuffle_ps::<0x4e>(v, v));
        _mm512_cvtss_f32($work(v, _mm512_shuffle_ps::<0xb1>(v, v)))
    }};
}

// SAFETY (of every block): a vector is used only where the processor has the instructions.
impl Vector for Zmm {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn fused(self, factor: Self, term: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    // If one operand is NaN, these instructions return the second operand, so the order of operands
    // matters.
    #[inline(always)]
    fn at_least(self, bound: f32) -> Self {
        Self(unsafe { _mm512_max_ps(_mm512_set1_ps(bound), self.0) })
    }
    #[inline(always)]
    fn at_most(self, bound: f32) -> Self {
        Self(unsafe { _mm512_min_ps(_mm512_set1_ps(bound), self.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(unsafe { _mm512_roundscale_ps::<0>(self.0) })
    }
    #[inline(always)]
    fn times_power(self, n: Self) -> Self {
        // Denormal results would cost hundreds of cycles, so they become 0.
        unsafe {
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(n.0, _mm512_set1_ps(-126.0));
            Self(_mm512_maskz_scalef_ps(normal, self.0, n.0))
        }
    }
    #[inline(always)]
    fn only(self, count: usize) -> Self {
        let mask = ((1u32 << count) - 1) as u16;
        Self(unsafe { _mm512_mask_blend_ps(mask, _mm512_set1_ps(f32::NEG_INFINITY), self.0) })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { fold!(self.0, _mm512_add_ps) }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { fold!(self.0, _mm512_max_ps) }
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        // The classes are infinities, and quiet and signalling NaN.
        unsafe { _mm512_fpclass_ps_mask::<0x99>(self.0) == 0 }
    }
    #[inline(always)]
    unsafe fn store_codes(self, to: *mut i8) {
        unsafe {
            let codes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self.0));
            _mm_storeu_si128(to.cast(), codes);
        }
    }
    #[inline(always)]
    unsafe fn load_codes(from: *const i8) -> Self {
        Self(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) })
    }
    #[inline(never)]
    unsafe fn compute<W: VectorWork>(work: W) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn run<W: VectorWork>(work: W) {
            // SAFETY: the caller upholds the contract, here and below.
            unsafe { work.compute::<Zmm>() }
        }
        unsafe { run(work) }
    }
}
