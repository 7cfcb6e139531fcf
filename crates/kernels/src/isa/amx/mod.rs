//! Products of bfloat16 and of bytes with Intel's matrix extensions (AMX), in tiles.
//!
//! A tile is 16 rows of 64 bytes. One instruction multiplies a tile of rows with a tile of weights
//! and adds the result to a tile of sums. Panels, groups of keys and groups of values are already
//! stored in the layout of a weight tile. Each tile row is a group of pairs, or of quads, of 16
//! outputs.
//!
//! An instruction adds up 32 inner positions. It sums the even and the odd positions separately,
//! then adds both to the sum so far (Intel's manual, `TDPBF16PS`). The order is the same for every
//! number of rows, so a row's result does not depend on the rows beside it. Denormal numbers are
//! treated as zero.

mod few;
pub(crate) mod hardware;
pub(crate) mod unit;

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use std::arch::x86_64::*;

use self::hardware::Hardware;
use self::unit::{HIGH, Shape, Tiles, WIDE};
use super::avx512::sums::ask;
use super::avx512::vector::Zmm;
use super::avx512::vnni::{Vnni, scale};
use super::avx512_bf16::Avx512Bf16;
use super::operands::Operands;
use crate::codes::{Codes, Format};
use crate::dots::{Dots, QUAD, quad_bytes};
use crate::element::{Bf16, Element};
use crate::tile::{Ahead, BLOCK, GROUP, GROUPS, Kernel, MAX_ROWS, NR, Outputs, Scores, Tile};
use crate::vector::LANES;

/// The number of bfloat16 inner positions that an instruction adds up.
const INNER: usize = WIDE / size_of::<Bf16>();
/// The number of inner positions of bytes that an instruction adds up.
const INNER_BYTES: usize = WIDE;

/// The largest number of rows of bytes for which vector dot products are faster than tiles. Integer
/// sums are exact, so the bits are the same.
const FEW_BYTES: usize = 8;

/// The bfloat16 kernel with tiles.
pub(crate) struct AmxBf16<U = Hardware>(PhantomData<U>);
/// The kernel with tiles for codes with one scale per output. [`Vnni`] computes few rows, and
/// formats with more scales.
pub(crate) struct AmxDots<U = Hardware>(PhantomData<U>);

/// Prefetches `lines` cache lines from an address that may be invalid.
#[inline(always)]
fn ask_lines<E>(address: *const E, lines: usize) {
    for line in 0..lines {
        ask(address.cast::<u8>().wrapping_add(line * 64));
    }
}

/// Multiplies up to 32 rows by a panel, `width` inner positions at a time. There are at most two
/// tiles of rows and two of outputs; their sums are tiles 0 to 3.
///
/// # Safety
/// The tiles must have the [`Shape::product`] of `rows` and `width`. `numbers` and `panel` must
/// have `steps` times `width` positions, and `out` room for the rows.
#[inline(always)]
unsafe fn strip<U: Tiles>(
    (numbers, rows, width): (*const Bf16, usize, usize),
    (panel, steps): (*const Bf16, usize),
    ahead: Ahead<Bf16>,
    more: bool,
    out: *mut Outputs,
) {
    const PITCH: usize = NR * 4;
    let pitch = width * size_of::<Bf16>();
    let two = rows > HIGH;
    // SAFETY: accesses stay inside the rows, the panel and the sums, by the function's contract.
    unsafe {
        let left = out.cast::<u8>();
        let (right, low) = (left.add(WIDE), left.wrapping_add(HIGH * PITCH));
        let low_right = low.wrapping_add(WIDE);
        if more {
            U::load::<0>(left, PITCH);
            U::load::<1>(right, PITCH);
        } else {
            U::zero::<0>();
            U::zero::<1>();
        }
        if two && more {
            U::load::<2>(low, PITCH);
            U::load::<3>(low_right, PITCH);
        } else if two {
            U::zero::<2>();
            U::zero::<3>();
        }
        for step in 0..steps {
            let at = step * width;
            let weights = panel.add(at * NR).cast::<u8>();
            let mine = numbers.add(at * rows).cast::<u8>();
            match ahead {
                Ahead::Nothing => {}
                Ahead::Half(next) => {
                    ask_lines(next.wrapping_add(at * NR / 2), width * NR / 64);
                }
                Ahead::Whole(next) => {
                    ask_lines(next.wrapping_add(at * NR), width * NR / 32);
                }
            }
            U::load::<6>(weights, PITCH);
            U::load::<7>(weights.add(WIDE), PITCH);
            U::load::<4>(mine, pitch);
            U::pairs::<0, 4, 6>();
            U::pairs::<1, 4, 7>();
            if two {
                U::load::<5>(mine.add(HIGH * pitch), pitch);
                U::pairs::<2, 5, 6>();
                U::pairs::<3, 5, 7>();
            }
        }
        U::store::<0>(left, PITCH);
        U::store::<1>(right, PITCH);
        if two {
            U::store::<2>(low, PITCH);
            U::store::<3>(low_right, PITCH);
        }
    }
}

/// Computes the scores of up to 16 queries for the groups of a block, `width` inner positions at a
/// time.
///
/// # Safety
/// The tiles must be shaped for `width` positions. Queries and keys must have `steps` times as
/// many.
#[inline(always)]
unsafe fn score<U: Tiles>(
    (queries, rows, width): (*const Bf16, usize, usize),
    (keys, ahead): (&[*const Bf16; GROUPS], &[*const Bf16; GROUPS]),
    (first, steps): (usize, usize),
    out: &mut Scores,
) {
    const PITCH: usize = BLOCK * size_of::<f32>();
    macro_rules! groups {
        ($($group:literal)*) => {
            // SAFETY: accesses stay inside the queries, the keys and the scores, by the function's
            // contract.
            unsafe {
                let out = out.as_mut_ptr().cast::<u8>();
                $(if first == 0 {
                    U::zero::<$group>();
                } else {
                    U::load::<$group>(out.add($group * WIDE), PITCH);
                })*
                for step in 0..steps {
                    let at = first + step * width;
                    let pitch = width * size_of::<Bf16>();
                    U::load::<4>(queries.add(at * rows).cast(), pitch);
                    $(
                        ask_lines(ahead[$group].wrapping_add(at * GROUP), width / 2);
                        U::load::<5>(keys[$group].add(at * GROUP).cast(), WIDE);
                        U::pairs::<$group, 4, 5>();
                    )*
                }
                $(U::store::<$group>(out.add($group * WIDE), PITCH);)*
            }
        };
    }
    const { assert!(GROUPS == 4, "every group is named") };
    groups!(0 1 2 3);
}

/// Computes `C` tiles of the output's columns, from `column` on.
///
/// # Safety
/// See [`Kernel::mix`]; the tiles must have the shape of [`Shape::attention`].
#[inline(always)]
unsafe fn mix<U: Tiles, const C: usize>(
    weights: *const Bf16,
    values: &[*const Bf16],
    ahead: &[*const Bf16; GROUPS],
    (dim, column): (usize, usize),
    out: *mut f32,
) {
    macro_rules! columns {
        ($($c:literal)*) => {
            // SAFETY: accesses stay inside the weights, the values and the output, by the
            // function's contract.
            unsafe {
                let pitch = dim * size_of::<f32>();
                let out = out.add(column).cast::<u8>();
                $(if $c < C { U::load::<$c>(out.add($c * WIDE), pitch); })*
                for (group, (values, ahead)) in values.iter().zip(ahead).enumerate() {
                    let mine = weights.add(group * GROUP).cast();
                    U::load::<6>(mine, BLOCK * size_of::<Bf16>());
                    $(if $c < C {
                        let at = (column + $c * LANES) * Bf16::PAIR;
                        ask_lines(ahead.wrapping_add(at * GROUP / 2), GROUP / 2);
                        U::load::<7>(values.add(at).cast(), dim * 4);
                        U::pairs::<$c, 6, 7>();
                    })*
                }
                $(if $c < C { U::store::<$c>(out.add($c * WIDE), pitch); })*
            }
        };
    }
    const { assert!(C <= 4, "every tile is named") };
    columns!(0 1 2 3);
}

/// Computes the scores of up to 16 queries.
///
/// # Safety
/// See [`Kernel::scores`].
#[inline(always)]
unsafe fn tiled_scores<U: Tiles>(
    (queries, rows): (*const Bf16, usize),
    keys: (&[*const Bf16; GROUPS], &[*const Bf16; GROUPS]),
    dim: usize,
    out: &mut Scores,
) {
    let whole = dim / INNER * INNER;
    // SAFETY: the caller upholds the contract.
    unsafe {
        if whole > 0 {
            U::shape(Shape::attention(rows, INNER));
            score::<U>((queries, rows, INNER), keys, (0, whole / INNER), out);
        }
        if whole < dim {
            U::shape(Shape::attention(rows, dim - whole));
            score::<U>((queries, rows, dim - whole), keys, (whole, 1), out);
        }
    }
}

/// Adds the products of the weights of up to 16 queries with the values.
///
/// # Safety
/// See [`Kernel::mix`].
#[inline(always)]
unsafe fn tiled_mix<U: Tiles>(
    (weights, rows): (*const Bf16, usize),
    (values, ahead): (&[*const Bf16], &[*const Bf16; GROUPS]),
    dim: usize,
    out: *mut f32,
) {
    let wide = dim / (4 * LANES) * (4 * LANES);
    // SAFETY: the caller upholds the contract.
    unsafe {
        U::shape(Shape::attention(rows, INNER));
        for column in (0..wide).step_by(4 * LANES) {
            mix::<U, 4>(weights, values, ahead, (dim, column), out);
        }
        for column in (wide..dim).step_by(LANES) {
            mix::<U, 1>(weights, values, ahead, (dim, column), out);
        }
    }
}

// SAFETY: callers detect AMX, and AVX-512 with bfloat16.
unsafe impl<U: Tiles> Kernel<Bf16> for AmxBf16<U> {
    const ROWS: usize = 2 * HIGH;
    const QUERIES: usize = HIGH;
    const INNER: usize = INNER;
    const CHUNK: usize = 512;
    const BLOCK_ROWS: usize = 256;
    type Vector = Zmm;
    type Number = Bf16;

    #[inline(always)]
    unsafe fn arrange(a: *const Bf16, rows: usize, k: usize, numbers: *mut Bf16) {
        for first in (0..k).step_by(INNER) {
            let width = INNER.min(k - first);
            for row in 0..rows {
                // SAFETY: reads stay inside the rows, and `numbers` has the same size.
                unsafe {
                    let (from, to) =
                        (a.add(row * k + first), numbers.add(first * rows + row * width));
                    if width == INNER {
                        _mm512_storeu_si512(to.cast(), _mm512_loadu_si512(from.cast()));
                    } else {
                        std::ptr::copy_nonoverlapping(from, to, width);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile(
        numbers: *const Bf16,
        rows: usize,
        panel: *const Bf16,
        k: usize,
        ahead: Ahead<Bf16>,
        more: bool,
        out: *mut Outputs,
    ) {
        let whole = k / INNER * INNER;
        // SAFETY: the caller upholds the contract; the remainder follows the whole tiles.
        unsafe {
            if whole > 0 {
                U::shape(Shape::product(rows, INNER));
                let steps = whole / INNER;
                strip::<U>((numbers, rows, INNER), (panel, steps), ahead, more, out);
            }
            if whole < k {
                let rest = (numbers.add(whole * rows), rows, k - whole);
                U::shape(Shape::product(rows, k - whole));
                let panel = (panel.add(whole * NR), 1);
                strip::<U>(rest, panel, Ahead::Nothing, more || whole > 0, out);
            }
        }
    }

    #[inline(always)]
    unsafe fn scores(
        queries: *const Bf16,
        rows: usize,
        keys: &[*const Bf16; GROUPS],
        ahead: &[*const Bf16; GROUPS],
        dim: usize,
        out: &mut Scores,
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            if rows > few::MOST {
                return tiled_scores::<U>((queries, rows), (keys, ahead), dim, out);
            }
            let whole = dim / INNER;
            let rest = dim % INNER;
            let out = out.as_flattened_mut().as_mut_ptr();
            few::scores((queries, rows), (0, INNER, whole), keys, ahead, out);
            if rest > 0 {
                few::scores((queries, rows), (whole * INNER, rest, 1), keys, ahead, out);
            }
        }
    }

    #[inline(always)]
    unsafe fn mix(
        weights: *const Bf16,
        rows: usize,
        values: &[*const Bf16],
        ahead: &[*const Bf16; GROUPS],
        dim: usize,
        decay: &[f32; MAX_ROWS],
        out: *mut f32,
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            for (row, &decay) in decay.iter().enumerate().take(rows) {
                if decay.to_bits() == 1f32.to_bits() {
                    continue;
                }
                let decay = _mm512_set1_ps(decay);
                for at in (0..dim).step_by(LANES) {
                    let at = out.add(row * dim + at);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), decay));
                }
            }
            if rows > few::MOST {
                return tiled_mix::<U>((weights, rows), (values, ahead), dim, out);
            }
            few::mix((weights, rows), values, ahead, dim, out);
        }
    }

    #[inline(always)]
    unsafe fn number(values: Zmm, to: *mut Bf16) {
        // SAFETY: the caller upholds the contract, here and below.
        unsafe { <Avx512Bf16 as Kernel<Bf16>>::number(values, to) }
    }

    #[inline(always)]
    unsafe fn pack_rows(rows: &[*const Bf16; LANES], k: usize, panel: *mut Bf16, pitch: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe { <Avx512Bf16 as Kernel<Bf16>>::pack_rows(rows, k, panel, pitch) }
    }

    #[inline(always)]
    unsafe fn narrow(values: Zmm, to: *mut Bf16) {
        // SAFETY: the caller upholds the contract.
        unsafe { <Avx512Bf16 as Kernel<Bf16>>::narrow(values, to) }
    }

    #[inline(always)]
    fn prefetch(address: *const Bf16) {
        ask(address);
    }
}

/// Multiplies up to 32 rows by a panel whose outputs have one scale each.
///
/// # Safety
/// See [`Dots::tile`].
#[inline(always)]
unsafe fn whole<U: Tiles>(given: Operands, rows: usize, out: &mut Tile) {
    const PITCH: usize = NR * QUAD;
    let Operands { codes, sums, panel, k, ahead, .. } = given;
    let two = rows > HIGH;
    let mut dots = MaybeUninit::<[[i32; NR]; MAX_ROWS]>::uninit();
    let left = dots.as_mut_ptr().cast::<u8>();
    // SAFETY: accesses stay inside the rows, the panel and the sums, by the function's contract.
    unsafe {
        let (right, low) = (left.add(WIDE), left.add(HIGH * PITCH));
        let low_right = low.add(WIDE);
        let mut first = 0;
        while first < k {
            // The inner dimension is a multiple of half the positions of an instruction.
            let width = INNER_BYTES.min(k - first);
            U::shape(Shape::bytes(rows, width));
            let steps = (k - first) / width;
            if first == 0 {
                U::zero::<0>();
                U::zero::<1>();
                U::zero::<2>();
                U::zero::<3>();
            } else {
                U::load::<0>(left, PITCH);
                U::load::<1>(right, PITCH);
                if two {
                    U::load::<2>(low, PITCH);
                    U::load::<3>(low_right, PITCH);
                }
            }
            for at in (first..first + steps * width).step_by(width) {
                let weights = panel.add(at * NR);
                if ahead > 0 {
                    ask_lines(weights.wrapping_add(ahead), width * NR / 64);
                }
                U::load::<6>(weights, PITCH);
                U::load::<7>(weights.add(WIDE), PITCH);
                U::load::<4>(codes.add(at).cast(), k);
                U::quads::<0, 4, 6>();
                U::quads::<1, 4, 7>();
                if two {
                    U::load::<5>(codes.add(HIGH * k + at).cast(), k);
                    U::quads::<2, 5, 6>();
                    U::quads::<3, 5, 7>();
                }
            }
            U::store::<0>(left, PITCH);
            U::store::<1>(right, PITCH);
            if two {
                U::store::<2>(low, PITCH);
                U::store::<3>(low_right, PITCH);
            }
            first += steps * width;
        }
        let own = panel.add(k / QUAD * quad_bytes(Format::Int8)).cast::<f32>();
        for (half, own) in
            [_mm512_loadu_ps(own), _mm512_loadu_ps(own.add(LANES))].iter().enumerate()
        {
            for r in 0..rows {
                let begin = (*sums.add(r)).wrapping_mul(-Format::Int8.offset());
                let dots = _mm512_loadu_si512(left.add(r * PITCH + half * WIDE).cast());
                let dots = _mm512_add_epi32(dots, _mm512_set1_epi32(begin));
                scale(&given, (r, half), dots, *own, out);
            }
        }
    }
}

// SAFETY: callers detect AMX, and AVX-512 with its byte dot products.
unsafe impl<U: Tiles> Dots for AmxDots<U> {
    #[inline(always)]
    fn rows(format: Format) -> usize {
        if format == Format::Int8 { 2 * HIGH } else { Vnni::rows(format) }
    }

    #[inline(always)]
    unsafe fn tile(
        format: Format,
        rows: &Codes,
        (row, count): (usize, usize),
        panel: *const u8,
        k: usize,
        ahead: usize,
        out: &mut Tile,
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            if format != Format::Int8 || count <= FEW_BYTES {
                return Vnni::tile(format, rows, (row, count), panel, k, ahead, out);
            }
            whole::<U>(Operands::new(format, rows, row, (panel, ahead), k), count, out);
        }
    }
}

#[cfg(test)]
mod tests;
