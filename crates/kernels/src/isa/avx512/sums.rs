//! The common part of AVX-512 products, for all element types.

use std::arch::x86_64::*;

use crate::element::Element;
use crate::tile::{MAX_ROWS, Outputs};
use crate::vector::LANES;

/// Two vectors of outputs per row.
pub(in crate::isa) type Sums<const M: usize> = [[__m512; 2]; M];

/// Returns the initial sums: zeros, or the content of `out`.
///
/// # Safety
/// `out` must have `M` rows. The processor must have the instructions (here and below).
#[inline(always)]
pub(in crate::isa) unsafe fn start<const M: usize>(more: bool, out: *const Outputs) -> Sums<M> {
    // SAFETY: the caller upholds the contract; a row of `out` is two whole vectors.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        if more {
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = out.add(r).cast::<f32>();
                *sums = [_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(LANES))];
            }
        }
        sums
    }
}

/// # Safety
/// `out` must have room for `M` rows.
#[inline(always)]
pub(in crate::isa) unsafe fn keep<const M: usize>(sums: &Sums<M>, out: *mut Outputs) {
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: the caller upholds the contract; a row of `out` is two whole vectors.
        unsafe {
            let row = out.add(r).cast::<f32>();
            _mm512_storeu_ps(row, sums[0]);
            _mm512_storeu_ps(row.add(LANES), sums[1]);
        }
    }
}

/// Loads `C` vectors of each of `M` rows that are `pitch` apart, multiplied by the rows' decay.
///
/// # Safety
/// `out` must have these rows with `C` vectors each.
#[inline(always)]
pub(in crate::isa) unsafe fn decayed<const M: usize, const C: usize>(
    out: *const f32,
    pitch: usize,
    decay: &[f32; MAX_ROWS],
) -> [[__m512; C]; M] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); C]; M];
        for (r, (sums, &decay)) in sums.iter_mut().zip(decay).enumerate() {
            let decay = _mm512_set1_ps(decay);
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_mul_ps(_mm512_loadu_ps(out.add(r * pitch + c * LANES)), decay);
            }
        }
        sums
    }
}

/// # Safety
/// See [`decayed`].
#[inline(always)]
pub(in crate::isa) unsafe fn keep_columns<const M: usize, const C: usize>(
    sums: &[[__m512; C]; M],
    out: *mut f32,
    pitch: usize,
) {
    for (r, sums) in sums.iter().enumerate() {
        for (c, &sum) in sums.iter().enumerate() {
            // SAFETY: the caller upholds the contract.
            unsafe { _mm512_storeu_ps(out.add(r * pitch + c * LANES), sum) };
        }
    }
}

/// Prefetches a cache line that is read later, into the L2 cache, since the L1 cache is full of
/// current data.
#[inline(always)]
pub(in crate::isa) fn ask<E>(address: *const E) {
    // SAFETY: prefetching an invalid address has no effect.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}

/// Prefetches the data `ahead` of the two vectors that are read at `at`: all of it if `LINES` is 2,
/// half of it if `LINES` is 1.
///
/// # Safety
/// The processor must have the instructions. `ahead` may be invalid: then the prefetch has no
/// effect.
#[inline(always)]
pub(in crate::isa) unsafe fn begin_to_load<E: Element, const LINES: usize>(
    ahead: *const E,
    at: usize,
) {
    // SAFETY: prefetching an invalid address has no effect.
    unsafe {
        if LINES == 1 {
            ask(ahead.wrapping_add(at / 2));
        } else if LINES == 2 {
            let ahead = ahead.wrapping_add(at);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(LANES * E::PAIR).cast());
        }
    }
}
