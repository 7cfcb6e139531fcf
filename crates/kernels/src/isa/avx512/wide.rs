//! The innermost loops for bfloat16 multiplied as `f32`: for processors without dot products of
//! bfloat16 pairs, or with slow ones.
//!
//! A vector of weights is converted to two of `f32` once for all rows of a tile. The rows' numbers
//! are converted to `f32` once for all panels. Products are exact, and are added pair by pair, the
//! even element of a pair first.

use std::arch::asm;
use std::arch::x86_64::*;

use super::sums::{ask, begin_to_load, decayed, keep, keep_columns, start};
use crate::element::Element;
use crate::tile::{BLOCK, GROUP, GROUPS, MAX_ROWS, NR, Outputs};
use crate::vector::LANES;

/// An element type whose pairs are converted to `f32` without rounding.
pub(super) trait Wide: Element {
    /// Converts the even or the odd elements of [`LANES`] pairs.
    ///
    /// # Safety
    /// The processor must have the instructions (here and below).
    unsafe fn half_of<const ODD: bool>(pairs: __m512i) -> __m512;

    /// Loads the pairs at an address, and converts half of their elements with [`Self::half_of`].
    ///
    /// # Safety
    /// `at` must be valid for reads of [`LANES`] pairs.
    #[inline(always)]
    unsafe fn every_other<const ODD: bool>(at: *const Self) -> __m512 {
        // SAFETY: the caller upholds the contract.
        unsafe { Self::half_of::<ODD>(_mm512_loadu_si512(at.cast())) }
    }

    /// Converts the first `count` of [`LANES`] elements; the other lanes are zero.
    ///
    /// # Safety
    /// `at` must be valid for reads of `count` elements.
    unsafe fn widen(at: *const Self, count: usize) -> __m512;

    /// # Safety
    /// `to` must be valid for writes of [`LANES`] elements.
    unsafe fn narrow(values: __m512, to: *mut Self);
}

impl Wide for crate::element::Bf16 {
    #[inline(always)]
    unsafe fn half_of<const ODD: bool>(pairs: __m512i) -> __m512 {
        // SAFETY: the caller upholds the contract.
        unsafe {
            _mm512_castsi512_ps(if ODD {
                _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()))
            } else {
                _mm512_slli_epi32::<16>(pairs)
            })
        }
    }

    #[inline(always)]
    unsafe fn widen(at: *const Self, count: usize) -> __m512 {
        // SAFETY: the caller upholds the contract; masked lanes are not read.
        unsafe {
            let mask = ((1u32 << count.min(LANES)) - 1) as u16;
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn narrow(values: __m512, to: *mut Self) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let bits = _mm512_castps_si512(values);
            let high = _mm512_srli_epi32::<16>(bits);
            let even = _mm512_and_si512(high, _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            // Rounding could turn NaN into infinity or zero.
            let odd = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
            let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
            let narrow = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, odd, quiet));
            _mm256_storeu_si256(to.cast(), narrow);
        }
    }
}

/// Rounds to elements and stores them.
///
/// # Safety
/// See [`Wide::narrow`].
#[inline(always)]
pub(super) unsafe fn store<E: Wide>(values: __m512, to: *mut E) {
    // SAFETY: the caller upholds the contract.
    unsafe { E::narrow(values, to) }
}

/// Adds the product of row `R`'s number and the columns to the sums. The rows' numbers are `APART`
/// floats apart.
///
/// With two columns, each multiplication reads the number from memory, which the compiler would do
/// only for a number that is used once. This saves an instruction per row, which matters on a core
/// with two hardware threads.
///
/// # Safety
/// The number must be valid for reads.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_row<const R: usize, const APART: usize, const C: usize>(
    numbers: *const f32,
    columns: &[__m512; C],
    sums: &mut [__m512; C],
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if C == 2 {
            for (sum, column) in sums.iter_mut().zip(columns) {
                asm!(
                    "vfmadd231ps {sum}, {column}, dword ptr [{numbers} + {at}]{{1to16}}",
                    sum = inout(zmm_reg) *sum,
                    column = in(zmm_reg) *column,
                    numbers = in(reg) numbers,
                    at = const R * APART * size_of::<f32>(),
                    options(pure, readonly, nostack, preserves_flags)
                );
            }
        } else {
            let x = _mm512_set1_ps(*numbers.add(R * APART));
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = _mm512_fmadd_ps(x, *column, *sum);
            }
        }
    }
}

/// Adds each row's number times the columns to the row's sums. The numbers are `APART` floats
/// apart.
///
/// # Safety
/// The number of each row must be valid for reads.
#[inline(always)]
unsafe fn add<const M: usize, const APART: usize, const C: usize>(
    numbers: *const f32,
    columns: [__m512; C],
    sums: &mut [[__m512; C]; M],
) {
    macro_rules! rows {
        ($($row:literal)*) => {
            // SAFETY: the caller upholds the contract.
            $(if $row < M {
                unsafe { add_row::<$row, APART, C>(numbers, &columns, &mut sums[$row]) };
            })*
        };
    }
    const { assert!(M <= 12, "every row is named") };
    rows!(0 1 2 3 4 5 6 7 8 9 10 11);
}

/// Adds a pair of each row's numbers times the pairs of `columns`: first the even elements, then
/// the odd ones, since there are too few registers for both. A pair's odd number is `odd` floats
/// after its even one. Rows are `APART` floats apart.
///
/// # Safety
/// The pair of each row must be valid for reads, and every column must have [`LANES`] pairs.
#[inline(always)]
unsafe fn add_pair<E: Wide, const M: usize, const APART: usize, const C: usize>(
    numbers: *const f32,
    odd: usize,
    columns: [*const E; C],
    sums: &mut [[__m512; C]; M],
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        // No closures: they would be compiled without the target features of this code.
        let mut here = [_mm512_setzero_ps(); C];
        for (here, column) in here.iter_mut().zip(&columns) {
            *here = E::every_other::<false>(*column);
        }
        add::<M, APART, C>(numbers, here, sums);
        for (here, column) in here.iter_mut().zip(&columns) {
            *here = E::every_other::<true>(*column);
        }
        add::<M, APART, C>(numbers.add(odd), here, sums);
    }
}

/// Converts `k` elements to `f32`.
///
/// # Safety
/// `from` must be valid for reads, and `to` for writes, of `k` elements.
#[inline(always)]
pub(super) unsafe fn copy<E: Wide>(from: *const E, k: usize, to: *mut f32) {
    for at in (0..k).step_by(LANES) {
        let count = (k - at).min(LANES);
        // SAFETY: the caller upholds the contract; only `count` floats are written.
        unsafe {
            let mask = ((1u32 << count) - 1) as u16;
            _mm512_mask_storeu_ps(to.add(at), mask, E::widen(from.add(at), count));
        }
    }
}

/// # Safety
/// `to` must have room for [`LANES`] numbers.
#[inline(always)]
pub(super) unsafe fn number<E: Wide>(values: __m512, to: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe { _mm512_storeu_ps(to, values) }
}

/// Writes the numbers of one pair of each row: those of even positions, then those of odd ones.
///
/// # Safety
/// `to` must have room for a pair of each of `rows` rows, of which there may be at most [`LANES`].
#[inline(always)]
pub(super) unsafe fn put<E: Wide>(pairs: __m512i, rows: usize, to: *mut f32) {
    let mask = ((1u32 << rows) - 1) as u16;
    // SAFETY: the caller upholds the contract.
    unsafe {
        _mm512_mask_storeu_ps(to, mask, E::half_of::<false>(pairs));
        _mm512_mask_storeu_ps(to.add(rows), mask, E::half_of::<true>(pairs));
    }
}

/// Multiplies `M` rows by a panel: two vectors of outputs per row.
#[inline(always)]
pub(super) unsafe fn tile<E: Wide, const M: usize, const LINES: usize>(
    numbers: *const f32,
    panel: *const E,
    k: usize,
    ahead: *const E,
    more: bool,
    out: *mut Outputs,
) {
    // SAFETY: accesses stay inside the panel and the rows, by the contract of `Kernel::tile`.
    unsafe {
        let mut sums = start::<M>(more, out);
        for inner in (0..k).step_by(E::PAIR) {
            let at = inner * NR;
            begin_to_load::<E, LINES>(ahead, at);
            let halves = [panel.add(at), panel.add(at + LANES * E::PAIR)];
            add_pair::<E, M, 1, 2>(numbers.add(inner * M), M, halves, &mut sums);
        }
        keep(&sums, out);
    }
}

/// Computes the scores of `M` queries for `G` groups of keys. Rows of `out` are [`BLOCK`] apart.
#[inline(always)]
pub(super) unsafe fn scores<E: Wide, const M: usize, const G: usize>(
    queries: *const f32,
    keys: &[*const E; G],
    ahead: &[*const E; G],
    dim: usize,
    out: *mut f32,
) {
    // SAFETY: accesses stay inside the queries, the groups and the output, by the contract of
    // `Kernel::scores`.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); G]; M];
        for inner in (0..dim).step_by(E::PAIR) {
            let mut groups = *keys;
            for (group, ahead) in groups.iter_mut().zip(ahead) {
                *group = group.add(inner * GROUP);
                ask(ahead.wrapping_add(inner * GROUP));
            }
            add_pair::<E, M, 1, G>(queries.add(inner * M), M, groups, &mut sums);
        }
        keep_columns(&sums, out, BLOCK);
    }
}

/// Computes `C` vectors of the output's columns, from `column` on.
#[inline(always)]
pub(super) unsafe fn mix<E: Wide, const M: usize, const C: usize>(
    weights: *const f32,
    values: &[*const E],
    ahead: &[*const E; GROUPS],
    (dim, column): (usize, usize),
    decay: &[f32; MAX_ROWS],
    out: *mut f32,
) {
    // SAFETY: accesses stay inside the weights, the groups and the output, by the contract of
    // `Kernel::mix`.
    unsafe {
        let out = out.add(column);
        let mut sums = decayed::<M, C>(out, dim, decay);
        for (group, (values, ahead)) in values.iter().zip(ahead).enumerate() {
            for position in (0..GROUP).step_by(E::PAIR) {
                let at = position * dim + column * E::PAIR;
                let mut columns = [*values; C];
                for (c, column) in columns.iter_mut().enumerate() {
                    let at = at + c * LANES * E::PAIR;
                    *column = values.add(at);
                    ask(ahead.wrapping_add(at));
                }
                let weights = weights.add(group * GROUP + position);
                add_pair::<E, M, BLOCK, C>(weights, 1, columns, &mut sums);
            }
        }
        keep_columns(&sums, out, dim);
    }
}
