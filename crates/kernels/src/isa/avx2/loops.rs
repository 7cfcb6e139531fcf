//! The innermost loops with AVX2, for `f32`, and for bfloat16 multiplied as `f32`.
//!
//! As in [`wide`](crate::isa::avx512), a vector of bfloat16 weights is converted to two of `f32`
//! once for all rows of a tile; the rows' numbers are `f32` already. With 16 registers, the sums of
//! six rows and 16 columns leave room for operands. More columns need further passes over the rows.
//! Each sum stays in one register and takes pair by pair, the even element first. So the result
//! does not depend on the number of other rows and columns.

use std::arch::asm;
use std::arch::x86_64::*;

use crate::element::{Bf16, Element};
use crate::tile::{BLOCK, GROUP, GROUPS, NR};
use crate::vector::LANES;

/// Lanes of a register.
pub(super) const HALF_LANES: usize = LANES / 2;
/// Sums of `M` rows and `C` vectors of columns.
type Sums<const M: usize, const C: usize> = [[[__m256; 2]; C]; M];

/// An element type that is converted to `f32` without rounding.
pub(crate) trait Wide: Element {
    /// Converts the even or the odd elements of [`HALF_LANES`] pairs, given as dwords. Without
    /// pairs, converts the elements.
    ///
    /// # Safety
    /// The processor must have the instructions (here and below).
    unsafe fn half_of<const ODD: bool>(pairs: __m256i) -> __m256;

    /// Converts with [`Self::half_of`] the pairs at an address.
    ///
    /// # Safety
    /// All pairs at `at` must be readable.
    #[inline(always)]
    unsafe fn every_other<const ODD: bool>(at: *const Self) -> __m256 {
        // SAFETY: the caller upholds the contract.
        unsafe { Self::half_of::<ODD>(_mm256_loadu_si256(at.cast())) }
    }

    /// # Safety
    /// `to` must have room for [`LANES`] elements.
    unsafe fn narrow(values: [__m256; 2], to: *mut Self);
}

impl Wide for f32 {
    #[inline(always)]
    unsafe fn half_of<const ODD: bool>(dwords: __m256i) -> __m256 {
        // SAFETY: the processor has the instruction.
        unsafe { _mm256_castsi256_ps(dwords) }
    }

    #[inline(always)]
    unsafe fn narrow(values: [__m256; 2], to: *mut Self) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            _mm256_storeu_ps(to, values[0]);
            _mm256_storeu_ps(to.add(HALF_LANES), values[1]);
        }
    }
}

/// Loads the first `count` of [`HALF_LANES`] dwords; the other lanes are zero.
///
/// # Safety
/// `count` dwords at `at` must be readable, and the processor must have the instructions.
#[inline(always)]
pub(super) unsafe fn load_dwords(at: *const i32, count: usize) -> __m256i {
    // SAFETY: the caller upholds the contract; masked lanes are not read.
    unsafe {
        if count >= HALF_LANES {
            return _mm256_loadu_si256(at.cast());
        }
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_maskload_epi32(at, _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes))
    }
}

impl Wide for Bf16 {
    #[inline(always)]
    unsafe fn half_of<const ODD: bool>(pairs: __m256i) -> __m256 {
        // SAFETY: the processor has the instructions.
        unsafe {
            _mm256_castsi256_ps(if ODD {
                _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()))
            } else {
                _mm256_slli_epi32::<16>(pairs)
            })
        }
    }

    #[inline(always)]
    unsafe fn narrow(values: [__m256; 2], to: *mut Self) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let (low, high) = (rounded(values[0]), rounded(values[1]));
            // The instruction packs each half of a register separately; the permutation restores
            // the order.
            let words = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), words);
        }
    }
}

/// Rounds to bfloat16, as dwords.
#[inline(always)]
unsafe fn rounded(values: __m256) -> __m256i {
    // SAFETY: the processor has the instructions.
    unsafe {
        let bits = _mm256_castps_si256(values);
        let high = _mm256_srli_epi32::<16>(bits);
        let even = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
        // Rounding could turn NaN into infinity or zero.
        let odd = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        _mm256_blendv_epi8(rounded, quiet, odd)
    }
}

/// Returns the same address, but hides from the compiler that it is the same. Otherwise the
/// compiler would keep the values of even halves until it computes the odd ones from them. Too few
/// registers are left for these values, and sums would spill to memory.
#[expect(clippy::pointers_in_nomem_asm_block, reason = "nothing is read at the address")]
#[inline(always)]
pub(super) fn again<T>(mut address: *const T) -> *const T {
    // SAFETY: the assembly is empty.
    unsafe {
        asm!("/* {0} */", inout(reg) address, options(pure, nomem, nostack, preserves_flags));
    }
    address
}

/// The memory layout of the rows' numbers.
trait Numbers {
    /// Distance in floats from one row to the next.
    const ROW: usize;
    /// Distance in floats from one position to the next, for `M` rows.
    fn position<const M: usize>() -> usize;
}

/// Each row's [`BLOCK`] numbers are contiguous.
struct ByRow;
/// The numbers are in the order of [`Kernel::arrange`](crate::tile::Kernel::arrange).
struct Arranged;

impl Numbers for ByRow {
    const ROW: usize = BLOCK;
    #[inline(always)]
    fn position<const M: usize>() -> usize {
        1
    }
}

impl Numbers for Arranged {
    const ROW: usize = 1;
    #[inline(always)]
    fn position<const M: usize>() -> usize {
        M
    }
}

/// Multiplies each row's number at one position by each column, and adds the products to the sums.
/// Uses the odd elements of the columns' pairs if `ODD`, otherwise the even ones. Of rows and
/// columns, the operand with fewer values stays in registers. The values of the other operand are
/// loaded one by one.
///
/// # Safety
/// Every row must have a number at the position, and every column must have [`LANES`] pairs.
#[inline(always)]
unsafe fn add<E: Wide, N: Numbers, const ODD: bool, const M: usize, const C: usize>(
    numbers: *const f32,
    columns: &[*const E; C],
    sums: &mut Sums<M, C>,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if M > 2 * C {
            let mut weights = [[_mm256_setzero_ps(); 2]; C];
            for (weights, column) in weights.iter_mut().zip(columns) {
                weights[0] = E::every_other::<ODD>(*column);
                weights[1] = E::every_other::<ODD>(column.add(HALF_LANES * E::PAIR));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_broadcast_ss(&*numbers.add(r * N::ROW));
                for (sums, weights) in sums.iter_mut().zip(&weights) {
                    sums[0] = _mm256_fmadd_ps(x, weights[0], sums[0]);
                    sums[1] = _mm256_fmadd_ps(x, weights[1], sums[1]);
                }
            }
        } else {
            let mut x = [_mm256_setzero_ps(); M];
            for (r, x) in x.iter_mut().enumerate() {
                *x = _mm256_broadcast_ss(&*numbers.add(r * N::ROW));
            }
            for (c, column) in columns.iter().enumerate() {
                for half in 0..2 {
                    let column = column.add(half * HALF_LANES * E::PAIR);
                    let weights = E::every_other::<ODD>(column);
                    for (sums, x) in sums.iter_mut().zip(&x) {
                        sums[c][half] = _mm256_fmadd_ps(*x, weights, sums[c][half]);
                    }
                }
            }
        }
    }
}

/// Adds the rows' numbers times columns to `out` `[M, width]`. Each of the `runs` of columns has
/// `pairs` pairs, which are `pitch` elements apart. For each run, the data at `ahead` is
/// prefetched: as much as the run's columns have if `LINES` is 2, half as much if `LINES` is 1.
///
/// # Safety
/// `numbers` and the columns must cover all pairs of all runs, and `out` must have room for the
/// results. The processor must have the instructions.
#[target_feature(enable = "avx2,fma")]
unsafe fn add_runs<E: Wide, N: Numbers, const M: usize, const C: usize, const LINES: usize>(
    mut numbers: *const f32,
    (runs, pairs, pitch): (&[[*const E; C]], usize, usize),
    ahead: &[[*const E; C]],
    (out, width): (*mut f32, usize),
) {
    // SAFETY: the caller upholds the contract; prefetching an invalid address has no effect.
    unsafe {
        let mut sums = [[[_mm256_setzero_ps(); 2]; C]; M];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (at, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
                *sum = _mm256_loadu_ps(out.add(r * width + at * HALF_LANES));
            }
        }
        for (columns, ahead) in runs.iter().zip(ahead) {
            for pair in 0..pairs {
                let at = pair * pitch;
                if LINES == 1 {
                    // This data is used later, so it is not prefetched into the L1 cache, which is
                    // full of current data.
                    _mm_prefetch::<_MM_HINT_T1>(ahead[0].wrapping_add(at / 2).cast());
                }
                let mut here = *columns;
                for (c, here) in here.iter_mut().enumerate() {
                    *here = here.add(at);
                    if LINES == 2 {
                        _mm_prefetch::<_MM_HINT_T0>(ahead[c].wrapping_add(at).cast());
                    }
                }
                add::<E, N, false, M, C>(numbers, &here, &mut sums);
                if E::PAIR == 2 {
                    for here in &mut here {
                        *here = again(*here);
                    }
                    let odd = numbers.add(N::position::<M>());
                    add::<E, N, true, M, C>(odd, &here, &mut sums);
                }
                numbers = numbers.add(E::PAIR * N::position::<M>());
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (at, sum) in sums.as_flattened().iter().enumerate() {
                _mm256_storeu_ps(out.add(r * width + at * HALF_LANES), *sum);
            }
        }
    }
}

/// [`add_runs`] as a separate function. If several of these loops are inlined together, or the
/// number of runs is a constant, the compiler spills registers.
#[inline(never)]
unsafe fn pass<E: Wide, N: Numbers, const M: usize, const C: usize, const LINES: usize>(
    numbers: *const f32,
    columns: (&[[*const E; C]], usize, usize),
    ahead: &[[*const E; C]],
    out: (*mut f32, usize),
) {
    // SAFETY: the caller upholds the contract.
    unsafe { add_runs::<E, N, M, C, LINES>(numbers, columns, ahead, out) }
}

/// Adds `M` rows times a panel to `out`, `C` halves of the panel per pass. `ahead`: as in
/// [`add_runs`].
///
/// # Safety
/// See [`Kernel::tile`](crate::tile::Kernel::tile), with `M` rows. `C` must be 1 or 2.
#[inline(always)]
pub(super) unsafe fn tile<E: Wide, const M: usize, const C: usize, const LINES: usize>(
    numbers: *const f32,
    panel: *const E,
    k: usize,
    ahead: *const E,
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let halves = [panel, panel.add(LANES * E::PAIR)];
        let (pairs, pitch) = (k / E::PAIR, NR * E::PAIR);
        for (index, columns) in halves.as_chunks::<C>().0.iter().enumerate() {
            let runs = (std::slice::from_ref(columns), pairs, pitch);
            let out = (out.add(index * C * LANES), NR);
            let mut ahead = [[ahead; C]];
            if LINES == 1 && index == 0 {
                pass::<E, Arranged, M, C, 1>(numbers, runs, &ahead, out);
            } else if LINES == 2 {
                for (c, ahead) in ahead[0].iter_mut().enumerate() {
                    *ahead = ahead.wrapping_add((index * C + c) * LANES * E::PAIR);
                }
                pass::<E, Arranged, M, C, 2>(numbers, runs, &ahead, out);
            } else {
                pass::<E, Arranged, M, C, 0>(numbers, runs, &ahead, out);
            }
        }
    }
}

/// Computes the scores of `M` queries, `C` groups of keys per pass. Rows of `out` are [`BLOCK`]
/// apart.
///
/// # Safety
/// See [`Kernel::scores`](crate::tile::Kernel::scores), with `M` queries. `C` must divide the
/// number of groups.
#[inline(always)]
pub(super) unsafe fn scores<E: Wide, const M: usize, const C: usize>(
    queries: *const f32,
    (keys, ahead): (&[*const E], &[*const E]),
    dim: usize,
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        out.write_bytes(0, M * BLOCK);
        let ahead = ahead.as_chunks::<C>().0;
        for (index, keys) in keys.as_chunks::<C>().0.iter().enumerate() {
            let runs = (std::slice::from_ref(keys), dim / E::PAIR, GROUP * E::PAIR);
            let out = (out.add(index * C * LANES), BLOCK);
            pass::<E, Arranged, M, C, 2>(queries, runs, &ahead[index..], out);
        }
    }
}

/// Computes `C` vectors of the output's columns, from `column` on.
///
/// # Safety
/// See [`Kernel::mix`](crate::tile::Kernel::mix), with `M` rows.
#[inline(always)]
pub(super) unsafe fn mix<E: Wide, const M: usize, const C: usize>(
    weights: *const f32,
    (values, ahead): (&[*const E], &[*const E; GROUPS]),
    (dim, column): (usize, usize),
    decay: &[f32],
    out: *mut f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let out = out.add(column);
        for (r, decay) in decay.iter().enumerate().take(M) {
            let decay = _mm256_set1_ps(*decay);
            for at in (0..C * LANES).step_by(HALF_LANES) {
                let to = out.add(r * dim + at);
                _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_loadu_ps(to), decay));
            }
        }
        let (runs, ahead) = (columns::<E, C>(values, column), columns::<E, C>(ahead, column));
        let runs = (&runs[..values.len()], GROUP / E::PAIR, dim * E::PAIR);
        pass::<E, ByRow, M, C, 2>(weights, runs, &ahead, (out, dim));
    }
}

/// The addresses of `C` vectors of columns in some groups of values, from `column` on.
#[inline(always)]
fn columns<E: Element, const C: usize>(
    groups: &[*const E],
    column: usize,
) -> [[*const E; C]; GROUPS] {
    let mut found = [[std::ptr::null(); C]; GROUPS];
    for (columns, group) in found.iter_mut().zip(groups) {
        for (c, start) in columns.iter_mut().enumerate() {
            *start = group.wrapping_add((column + c * LANES) * E::PAIR);
        }
    }
    found
}
