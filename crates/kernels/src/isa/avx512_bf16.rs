//! [`Kernel`](crate::tile::Kernel) for bfloat16 with AVX-512's dot products of pairs.

use std::arch::x86_64::*;

use super::avx512::dot::{self, Dot};
use super::avx512::kernel::kernel;
use crate::element::Bf16;

/// The bfloat16 kernel with AVX-512's dot products of pairs.
pub(crate) struct Avx512Bf16;

impl Dot for Bf16 {
    #[inline(always)]
    unsafe fn dot(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the processor has the instruction; both types have the same bits.
        unsafe {
            let a = std::mem::transmute::<__m512, __m512bh>(a);
            _mm512_dpbf16_ps(sum, a, std::mem::transmute::<__m512, __m512bh>(b))
        }
    }

    #[inline(always)]
    unsafe fn store(values: __m512, to: *mut Self) {
        // SAFETY: the caller upholds the contract; both types have the same bits.
        unsafe {
            let narrow = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
            _mm256_storeu_si256(to.cast(), narrow);
        }
    }
}

kernel!(Avx512Bf16: Bf16 as Bf16, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", dot);
