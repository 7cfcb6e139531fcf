//! Attention of few queries with `f32` vectors, adding in the same order as tiles.
//!
//! A tile of few rows takes as long as a full one to load and to store. Vector multiply-adds give
//! the same bits: even and odd positions are summed separately, then both sums are added to the
//! earlier sum. The exception is denormal numbers, which tiles treat as zero: they are smaller than
//! the rounding error of the sum.

use std::arch::x86_64::*;

use crate::element::{Bf16, Element};
use crate::isa::avx512::sums::ask;
use crate::tile::{BLOCK, GROUP, GROUPS};
use crate::vector::LANES;

/// The largest number of queries for which vectors are faster than tiles.
pub(super) const MOST: usize = 6;
/// The largest number of queries for which the sums of four groups, or of four vectors of a head,
/// fit into registers.
const NARROW: usize = 3;

/// Returns the even and the odd elements of [`LANES`] pairs.
///
/// # Safety
/// The processor must have the instructions (here and below), and `at` must be readable for
/// [`LANES`] pairs.
#[inline(always)]
unsafe fn halves(at: *const Bf16) -> [__m512; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe { split(_mm512_loadu_si512(at.cast())) }
}

/// Broadcasts a pair to all lanes: its even element and its odd one.
///
/// # Safety
/// `at` must be readable for a pair.
#[inline(always)]
unsafe fn splat(at: *const Bf16) -> [__m512; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe { split(_mm512_set1_epi32(at.cast::<i32>().read_unaligned())) }
}

#[inline(always)]
unsafe fn split(pairs: __m512i) -> [__m512; 2] {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
    }
}

/// Even and odd sums of `M` rows, `C` vectors each.
type Sums<const M: usize, const C: usize> = [[[__m512; 2]; C]; M];

/// Adds to `sums` the product of one pair of each row and the pairs of each column. Rows are
/// `pitch` elements apart.
///
/// # Safety
/// The pairs of all rows and columns must be readable.
#[inline(always)]
unsafe fn add_pair<const M: usize, const C: usize>(
    rows: *const Bf16,
    pitch: usize,
    columns: [*const Bf16; C],
    sums: &mut Sums<M, C>,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut mine = [[_mm512_setzero_ps(); 2]; M];
        for (r, mine) in mine.iter_mut().enumerate() {
            *mine = splat(rows.add(r * pitch));
        }
        for (c, column) in columns.iter().enumerate() {
            let column = halves(*column);
            for (sums, mine) in sums.iter_mut().zip(&mine) {
                for (half, sum) in sums[c].iter_mut().enumerate() {
                    *sum = _mm512_fmadd_ps(mine[half], column[half], *sum);
                }
            }
        }
    }
}

/// Adds both sums of each row and column to the output, or to zero. Output rows are `pitch` floats
/// apart.
///
/// # Safety
/// `out` must have room for all rows and columns.
#[inline(always)]
unsafe fn keep<const M: usize, const C: usize>(
    sums: &Sums<M, C>,
    more: bool,
    out: *mut f32,
    pitch: usize,
) {
    for (r, sums) in sums.iter().enumerate() {
        for (c, [even, odd]) in sums.iter().enumerate() {
            // SAFETY: the caller upholds the contract.
            unsafe {
                let to = out.add(r * pitch + c * LANES);
                let before = if more { _mm512_loadu_ps(to) } else { _mm512_setzero_ps() };
                _mm512_storeu_ps(to, _mm512_add_ps(before, _mm512_add_ps(*even, *odd)));
            }
        }
    }
}

/// Calls the function for `$rows` rows, at most [`MOST`].
macro_rules! dispatch {
    ($rows:expr, $function:ident::<$columns:tt> $arguments:tt) => {
        match $rows {
            1 => $function::<1, $columns> $arguments,
            2 => $function::<2, $columns> $arguments,
            3 => $function::<3, $columns> $arguments,
            4 => $function::<4, $columns> $arguments,
            5 => $function::<5, $columns> $arguments,
            _ => $function::<6, $columns> $arguments,
        }
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scored<const M: usize, const G: usize>(
    queries: *const Bf16,
    (first, width, steps): (usize, usize, usize),
    keys: &[*const Bf16; G],
    ahead: &[*const Bf16; G],
    out: *mut f32,
) {
    // SAFETY: accesses stay inside the queries, the keys and the scores, by the contract of
    // `scores`.
    unsafe {
        for step in 0..steps {
            let at = first + step * width;
            let mut sums = [[[_mm512_setzero_ps(); 2]; G]; M];
            for inner in (0..width).step_by(Bf16::PAIR) {
                let mut columns = *keys;
                for (column, ahead) in columns.iter_mut().zip(ahead) {
                    *column = column.add((at + inner) * GROUP);
                    ask(ahead.wrapping_add((at + inner) * GROUP));
                }
                add_pair::<M, G>(queries.add(at * M + inner), width, columns, &mut sums);
            }
            keep(&sums, at > 0, out, BLOCK);
        }
    }
}

/// Adds the scores of `rows` queries for some inner positions. The queries are arranged in tiles of
/// `width` positions; `steps` tiles from the position `first` on are used. The output already has
/// the scores of earlier positions.
///
/// # Safety
/// See [`crate::tile::Kernel::scores`]; `rows` must be at most [`MOST`].
#[inline(always)]
pub(super) unsafe fn scores(
    (queries, rows): (*const Bf16, usize),
    positions: (usize, usize, usize),
    keys: &[*const Bf16; GROUPS],
    ahead: &[*const Bf16; GROUPS],
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if rows <= NARROW {
            return dispatch!(rows, scored::<GROUPS>(queries, positions, keys, ahead, out));
        }
        let ahead = ahead.as_chunks::<2>().0;
        for (half, (keys, ahead)) in keys.as_chunks::<2>().0.iter().zip(ahead).enumerate() {
            let out = out.add(half * 2 * GROUP);
            dispatch!(rows, scored::<2>(queries, positions, keys, ahead, out));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn mixed<const M: usize, const C: usize>(
    weights: *const Bf16,
    values: &[*const Bf16],
    ahead: &[*const Bf16; GROUPS],
    (dim, column): (usize, usize),
    out: *mut f32,
) {
    // SAFETY: accesses stay inside the weights, the values and the output, by the contract of
    // `mix`.
    unsafe {
        for (group, (values, ahead)) in values.iter().zip(ahead).enumerate() {
            let mut sums = [[[_mm512_setzero_ps(); 2]; C]; M];
            for position in (0..GROUP).step_by(Bf16::PAIR) {
                let at = position * dim + column * Bf16::PAIR;
                let mut columns = [*values; C];
                for (c, column) in columns.iter_mut().enumerate() {
                    let at = at + c * LANES * Bf16::PAIR;
                    *column = column.add(at);
                    ask(ahead.wrapping_add(at));
                }
                let weights = weights.add(group * GROUP + position);
                add_pair::<M, C>(weights, BLOCK, columns, &mut sums);
            }
            keep(&sums, true, out.add(column), dim);
        }
    }
}

/// Adds `rows` rows of weights times the values to the output.
///
/// # Safety
/// See [`crate::tile::Kernel::mix`]; `rows` must be at most [`MOST`].
#[inline(always)]
pub(super) unsafe fn mix(
    (weights, rows): (*const Bf16, usize),
    values: &[*const Bf16],
    ahead: &[*const Bf16; GROUPS],
    dim: usize,
    out: *mut f32,
) {
    let width = if rows <= NARROW { 4 * LANES } else { 2 * LANES };
    let wide = dim / width * width;
    // SAFETY: the caller upholds the contract.
    unsafe {
        for column in (0..wide).step_by(width) {
            if rows <= NARROW {
                dispatch!(rows, mixed::<4>(weights, values, ahead, (dim, column), out));
            } else {
                dispatch!(rows, mixed::<2>(weights, values, ahead, (dim, column), out));
            }
        }
        for column in (wide..dim).step_by(LANES) {
            dispatch!(rows, mixed::<1>(weights, values, ahead, (dim, column), out));
        }
    }
}
