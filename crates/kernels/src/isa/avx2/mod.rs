//! [`Kernel`] with AVX2 and FMA, for both element types.

pub(super) mod bytes;
pub(crate) mod codes;
pub(super) mod dots;
mod loops;
mod vector;

use std::arch::x86_64::*;

use crate::tile::{Ahead, GROUPS, Kernel, MAX_ROWS, NR, Outputs, Scores};
use crate::vector::{LANES, Vector};
use loops::{HALF_LANES, Wide};
use vector::Ymms;

/// The kernel for `f32`, and for bfloat16 multiplied as `f32`.
pub(crate) struct Avx2;

/// Calls the function for `M` rows (the last one if there are more), each with `C` vectors of
/// columns at a time. The 2 `M` `C` sums take at most 12 of 16 registers, which leaves some for
/// weights and a row's number. If possible they take at least 8, so that no addition waits for the
/// previous one to the same sum.
macro_rules! by_rows {
    ($rows:expr, $function:ident $arguments:tt, $last:tt, $($few:literal $columns:literal),* | $most:literal $fewest:literal) => {
        match $rows {
            $($few => $function::<E, $few, $columns, $last> $arguments,)*
            _ => $function::<E, $most, $fewest, $last> $arguments,
        }
    };
}

/// Adds `M` rows times a panel, `C` halves of the panel per pass.
#[target_feature(enable = "avx2,fma")]
unsafe fn tiles<E: Wide, const M: usize, const C: usize, const LINES: usize>(
    numbers: *const f32,
    panel: *const E,
    k: usize,
    ahead: *const E,
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract of `Kernel::tile`.
    unsafe { loops::tile::<E, M, C, LINES>(numbers, panel, k, ahead, out) }
}

/// Computes the scores of `M` queries, `C` groups of keys per pass.
#[target_feature(enable = "avx2,fma")]
unsafe fn scored<E: Wide, const M: usize, const C: usize, const G: usize>(
    queries: *const f32,
    keys: &[*const E; G],
    ahead: &[*const E; G],
    dim: usize,
    out: &mut Scores,
) {
    // SAFETY: the caller upholds the contract of `Kernel::scores`.
    unsafe {
        loops::scores::<E, M, C>(queries, (keys, ahead), dim, out.as_flattened_mut().as_mut_ptr())
    }
}

/// Computes `C` vectors of `M` output rows, from `column` on.
#[target_feature(enable = "avx2,fma")]
unsafe fn mixed<E: Wide, const M: usize, const C: usize, const Q: usize>(
    weights: *const f32,
    values: &[*const E],
    ahead: &[*const E; GROUPS],
    columns: (usize, usize),
    decay: &[f32; Q],
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract of `Kernel::mix`.
    unsafe { loops::mix::<E, M, C>(weights, (values, ahead), columns, decay, out) }
}

// SAFETY (of every block): callers detect the features, and uphold the trait's contracts.
unsafe impl<E: Wide> Kernel<E> for Avx2 {
    const ROWS: usize = 6;
    type Vector = Ymms;
    type Number = f32;

    #[inline(always)]
    unsafe fn arrange(a: *const E, rows: usize, k: usize, numbers: *mut f32) {
        unsafe { arranged::<E>(a, rows, k, numbers) }
    }

    #[inline(always)]
    unsafe fn tile(
        numbers: *const f32,
        rows: usize,
        panel: *const E,
        k: usize,
        ahead: Ahead<E>,
        more: bool,
        out: *mut Outputs,
    ) {
        let out = out.cast::<f32>();
        unsafe {
            if !more {
                out.write_bytes(0, rows * NR);
            }
            match ahead {
                Ahead::Nothing => {
                    by_rows!(rows, tiles(numbers, panel, k, panel, out), 0,
                                                            1 2, 2 2, 3 1, 4 1, 5 1 | 6 1)
                }
                Ahead::Half(ahead) => {
                    by_rows!(rows, tiles(numbers, panel, k, ahead, out), 1,
                                                            1 2, 2 2, 3 1, 4 1, 5 1 | 6 1)
                }
                Ahead::Whole(ahead) => {
                    by_rows!(rows, tiles(numbers, panel, k, ahead, out), 2,
                                                            1 2, 2 2, 3 1, 4 1, 5 1 | 6 1)
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn scores(
        queries: *const f32,
        rows: usize,
        keys: &[*const E; GROUPS],
        ahead: &[*const E; GROUPS],
        dim: usize,
        out: &mut Scores,
    ) {
        unsafe {
            by_rows!(rows, scored(queries, keys, ahead, dim, out), GROUPS, 1 4, 2 2, 3 1, 4 1, 5 1 | 6 1)
        }
    }

    #[inline(always)]
    unsafe fn mix(
        weights: *const f32,
        rows: usize,
        values: &[*const E],
        ahead: &[*const E; GROUPS],
        dim: usize,
        decay: &[f32; MAX_ROWS],
        out: *mut f32,
    ) {
        let width = match rows {
            1 => 4 * LANES,
            2 => 2 * LANES,
            _ => LANES,
        };
        let wide = dim / width * width;
        unsafe {
            for column in (0..wide).step_by(width) {
                by_rows!(rows, mixed(weights, values, ahead, (dim, column), decay, out), MAX_ROWS,
                                                            1 4, 2 2, 3 1, 4 1, 5 1 | 6 1);
            }
            for column in (wide..dim).step_by(LANES) {
                by_rows!(rows, mixed(weights, values, ahead, (dim, column), decay, out), MAX_ROWS,
                                                            1 1 | 2 1);
            }
        }
    }

    #[inline(always)]
    unsafe fn number(values: Ymms, to: *mut f32) {
        unsafe { values.store(to) }
    }

    #[inline(always)]
    unsafe fn pack_rows(rows: &[*const E; LANES], k: usize, panel: *mut E, pitch: usize) {
        let count = k / E::PAIR;
        for half in [0, HALF_LANES] {
            let mut dwords = [std::ptr::null(); HALF_LANES];
            for (dwords, row) in dwords.iter_mut().zip(&rows[half..]) {
                *dwords = row.cast::<i32>();
            }
            unsafe { transpose_rows(&dwords, count, panel.cast::<i32>().add(half), pitch) };
        }
    }

    #[inline(always)]
    unsafe fn narrow(values: Ymms, to: *mut E) {
        unsafe { E::narrow(values.0, to) }
    }

    #[inline(always)]
    fn prefetch(address: *const E) {
        // SAFETY: prefetching an invalid address has no effect.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
}

/// Implements [`Kernel::arrange`].
#[target_feature(enable = "avx2")]
unsafe fn arranged<E: Wide>(a: *const E, rows: usize, k: usize, numbers: *mut f32) {
    let count = k / E::PAIR;
    // Missing rows are replaced by the last row.
    let mut each = [a.wrapping_add((rows - 1) * k).cast::<i32>(); HALF_LANES];
    for (r, each) in each.iter_mut().enumerate().take(rows) {
        *each = a.wrapping_add(r * k).cast();
    }
    // SAFETY: reads stay inside the rows, and writes inside the numbers.
    unsafe {
        for first in (0..count).step_by(HALF_LANES) {
            let width = (count - first).min(HALF_LANES);
            let block = transposed(&each, first, width);
            for (d, &column) in block.iter().enumerate().take(width) {
                let at = (first + d) * E::PAIR;
                put(E::half_of::<false>(column), rows, numbers.add(at * rows), k - at);
                if E::PAIR == 2 {
                    let odd = numbers.add((at + 1) * rows);
                    put(E::half_of::<true>(column), rows, odd, k - at - 1);
                }
            }
        }
    }
}

/// Writes the first `rows` lanes of a register. It also writes the other lanes where later writes
/// overwrite them, since masked stores are slow on some processors.
///
/// # Safety
/// `to` must have room for `left` times `rows` floats, and `rows` must be at most [`HALF_LANES`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn put(values: __m256, rows: usize, to: *mut f32, left: usize) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if left * rows >= HALF_LANES {
            _mm256_storeu_ps(to, values);
        } else {
            let mut last = [0.0; HALF_LANES];
            _mm256_storeu_ps(last.as_mut_ptr(), values);
            std::ptr::copy_nonoverlapping(last.as_ptr(), to, rows);
        }
    }
}

/// Sets `panel[d * pitch + r] = rows[r][d]` for dwords, for `d < count`.
#[target_feature(enable = "avx2")]
unsafe fn transpose_rows(
    rows: &[*const i32; HALF_LANES],
    count: usize,
    panel: *mut i32,
    pitch: usize,
) {
    for first in (0..count).step_by(HALF_LANES) {
        let width = (count - first).min(HALF_LANES);
        // SAFETY: only the `width` remaining dwords of each row are read.
        let block = unsafe { transposed(rows, first, width) };
        for (d, vector) in block.iter().enumerate().take(width) {
            // SAFETY: the write stays inside the panel, because first + d < count.
            unsafe { _mm256_storeu_si256(panel.add((first + d) * pitch).cast(), *vector) };
        }
    }
}

/// Loads `width` dwords of each row from `first` on, and transposes them.
///
/// # Safety
/// The dwords must be readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transposed(
    rows: &[*const i32; HALF_LANES],
    first: usize,
    width: usize,
) -> [__m256i; HALF_LANES] {
    let mut block = [_mm256_setzero_si256(); HALF_LANES];
    for (vector, row) in block.iter_mut().zip(rows) {
        // SAFETY: the caller upholds the contract.
        *vector = unsafe { loops::load_dwords(row.add(first), width) };
    }
    transpose(&mut block);
    block
}

/// Transposes 8 x 8 dwords.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(block: &mut [__m256i; 8]) {
    let mut t = *block;
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_epi32(block[2 * i], block[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(block[2 * i], block[2 * i + 1]);
    }
    let mut u = t;
    for i in 0..2 {
        u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // Half `l` of u[4 i + j] holds rows 4 i .. 4 i + 4 of column 4 l + j.
    for j in 0..4 {
        block[j] = _mm256_permute2x128_si256::<0x20>(u[j], u[4 + j]);
        block[4 + j] = _mm256_permute2x128_si256::<0x31>(u[j], u[4 + j]);
    }
}
