//! The innermost loops for instructions that multiply and add a whole group of elements.

use std::arch::x86_64::*;

use super::sums::{ask, begin_to_load, decayed, keep, keep_columns, start};
use crate::element::Element;
use crate::tile::{BLOCK, GROUP, GROUPS, MAX_ROWS, NR, Outputs};
use crate::vector::LANES;

/// Elements as these loops read them: [`LANES`] dwords per vector, where a dword is a group of
/// `PAIR` elements.
pub(in crate::isa) trait Dot: Element {
    /// # Safety
    /// `at` must be valid for reads of [`LANES`] dwords. The processor must have the instructions
    /// (here and below).
    #[inline(always)]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: the caller upholds the contract; loads may be unaligned.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }

    /// Broadcasts one dword to all lanes.
    ///
    /// # Safety
    /// `at` must be valid for a read of a dword.
    #[inline(always)]
    unsafe fn splat(at: *const Self) -> __m512 {
        // SAFETY: the caller upholds the contract.
        unsafe { _mm512_set1_ps(at.cast::<f32>().read_unaligned()) }
    }

    /// Computes `sum + a · b`, dword by dword.
    unsafe fn dot(sum: __m512, a: __m512, b: __m512) -> __m512;

    /// # Safety
    /// `to` must be valid for writes of [`LANES`] elements.
    unsafe fn store(values: __m512, to: *mut Self);
}

impl Dot for f32 {
    #[inline(always)]
    unsafe fn dot(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the processor has the instruction.
        unsafe { _mm512_fmadd_ps(a, b, sum) }
    }

    #[inline(always)]
    unsafe fn store(values: __m512, to: *mut Self) {
        // SAFETY: the caller upholds the contract.
        unsafe { _mm512_storeu_ps(to, values) }
    }
}

/// Rounds to elements and stores them.
///
/// # Safety
/// See [`Dot::store`].
#[inline(always)]
pub(in crate::isa) unsafe fn store<E: Dot>(values: __m512, to: *mut E) {
    // SAFETY: the caller upholds the contract.
    unsafe { E::store(values, to) }
}

/// # Safety
/// `from` must be valid for reads, and `to` for writes, of `k` elements.
#[inline(always)]
pub(in crate::isa) unsafe fn copy<E: Dot>(from: *const E, k: usize, to: *mut E) {
    // SAFETY: the caller upholds the contract.
    unsafe { std::ptr::copy_nonoverlapping(from, to, k) }
}

/// # Safety
/// `to` must have room for [`LANES`] numbers.
#[inline(always)]
pub(in crate::isa) unsafe fn number<E: Dot>(values: __m512, to: *mut E) {
    // SAFETY: the caller upholds the contract.
    unsafe { E::store(values, to) }
}

/// Writes one dword of each row.
///
/// # Safety
/// `to` must have room for a dword of each of `rows` rows, of which there may be at most [`LANES`].
#[inline(always)]
pub(in crate::isa) unsafe fn put<E: Dot>(dwords: __m512i, rows: usize, to: *mut E) {
    let mask = ((1u32 << rows) - 1) as u16;
    // SAFETY: the caller upholds the contract.
    unsafe { _mm512_mask_storeu_epi32(to.cast(), mask, dwords) }
}

/// Multiplies `M` rows by a panel: two vectors of outputs per row.
#[inline(always)]
pub(in crate::isa) unsafe fn tile<E: Dot, const M: usize, const LINES: usize>(
    numbers: *const E,
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
            let left = E::load(panel.add(at));
            let right = E::load(panel.add(at + LANES * E::PAIR));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = E::splat(numbers.add(inner * M + r * E::PAIR));
                sums[0] = E::dot(sums[0], x, left);
                sums[1] = E::dot(sums[1], x, right);
            }
        }
        keep(&sums, out);
    }
}

/// Computes the scores of `M` queries for `G` groups of keys. Rows of `out` are [`BLOCK`] apart.
#[inline(always)]
pub(in crate::isa) unsafe fn scores<E: Dot, const M: usize, const G: usize>(
    queries: *const E,
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
            let mut groups = [_mm512_setzero_ps(); G];
            for (group, (keys, ahead)) in groups.iter_mut().zip(keys.iter().zip(ahead)) {
                *group = E::load(keys.add(inner * GROUP));
                ask(ahead.wrapping_add(inner * GROUP));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = E::splat(queries.add(inner * M + r * E::PAIR));
                for (sum, group) in sums.iter_mut().zip(groups) {
                    *sum = E::dot(*sum, x, group);
                }
            }
        }
        keep_columns(&sums, out, BLOCK);
    }
}

/// Computes `C` vectors of the output's columns, from `column` on.
#[inline(always)]
pub(in crate::isa) unsafe fn mix<E: Dot, const M: usize, const C: usize>(
    weights: *const E,
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
                let mut columns = [_mm512_setzero_ps(); C];
                for (c, columns) in columns.iter_mut().enumerate() {
                    let at = at + c * LANES * E::PAIR;
                    *columns = E::load(values.add(at));
                    ask(ahead.wrapping_add(at));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = E::splat(weights.add(r * BLOCK + group * GROUP + position));
                    for (sum, columns) in sums.iter_mut().zip(&columns) {
                        *sum = E::dot(*sum, x, *columns);
                    }
                }
            }
        }
        keep_columns(&sums, out, dim);
    }
}
