//! [`Dots`] with AVX-512's byte dot products (VNNI).

use std::arch::x86_64::*;

use crate::codes::{Codes, Format, SHARED};
use crate::dots::{Dots, QUAD, quad_bytes, scale_bytes};
use crate::isa::operands::{INT8, IQ4_NL, MXFP4, Operands, Q4_0, Q4_1, Q8_0, format};
use crate::tile::{NR, Tile};
use crate::vector::LANES;

/// Products of codes with 512-bit VNNI.
pub(crate) struct Vnni;

/// Scales the dot products of a row with half of a panel whose outputs have one scale each.
///
/// # Safety
/// The row must exist in `given` and `out`. The processor must have AVX-512.
#[inline(always)]
pub(in crate::isa) unsafe fn scale(
    given: &Operands,
    (row, half): (usize, usize),
    dots: __m512i,
    own: __m512,
    out: &mut Tile,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let scale = _mm512_mul_ps(own, _mm512_set1_ps(*given.scales.add(row)));
        let total = _mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale);
        _mm512_storeu_ps(out[row].as_mut_ptr().add(half * LANES), total);
    }
}

/// Adds to `dots` the dot products of `M` rows with `quads` quads of a panel.
///
/// # Safety
/// The rows, which are `stride` codes apart, and the panel must have `quads` quads. The processor
/// must have the instructions.
#[inline(always)]
unsafe fn add_quads<const FORMAT: u32, const M: usize, const AHEAD: bool>(
    codes: *const i8,
    stride: usize,
    (panel, ahead): (*const u8, usize),
    quads: usize,
    dots: &mut [[__m512i; 2]; M],
) {
    // SAFETY: the caller upholds the contract; prefetching an invalid address has no effect.
    unsafe {
        for quad in 0..quads {
            let from = panel.add(quad * quad_bytes(format(FORMAT)));
            if AHEAD {
                let ahead = from.wrapping_add(ahead);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                if !format(FORMAT).is_narrow() {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64).cast());
                }
            }
            let first = _mm512_loadu_si512(from.cast());
            let (left, right) = if format(FORMAT).is_narrow() {
                let mask = _mm512_set1_epi8(15);
                let high = _mm512_srli_epi16::<4>(first);
                let codes = (_mm512_and_si512(first, mask), _mm512_and_si512(high, mask));
                match format(FORMAT).table() {
                    None => codes,
                    Some(table) => {
                        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                        // Not a closure, which would be compiled without the target features of
                        // this code.
                        (_mm512_shuffle_epi8(table, codes.0), _mm512_shuffle_epi8(table, codes.1))
                    }
                }
            } else {
                (first, _mm512_loadu_si512(from.add(64).cast()))
            };
            for (r, dots) in dots.iter_mut().enumerate() {
                let x = codes.add(r * stride + quad * QUAD).cast::<i32>().read_unaligned();
                let x = _mm512_set1_epi32(x);
                dots[0] = _mm512_dpbusd_epi32(dots[0], left, x);
                dots[1] = _mm512_dpbusd_epi32(dots[1], right, x);
            }
        }
    }
}

/// Multiplies `M` rows by a panel whose outputs have one scale each.
///
/// # Safety
/// See [`Dots::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn whole<const FORMAT: u32, const M: usize, const AHEAD: bool>(
    given: Operands,
    out: &mut Tile,
) {
    let Operands { codes, sums, panel, k, ahead, .. } = given;
    let offset = format(FORMAT).offset();
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut dots = [[_mm512_setzero_si512(); 2]; M];
        for (r, dots) in dots.iter_mut().enumerate() {
            *dots = [_mm512_set1_epi32((*sums.add(r)).wrapping_mul(-offset)); 2];
        }
        let quads = k / QUAD;
        add_quads::<FORMAT, M, AHEAD>(codes, k, (panel, ahead), quads, &mut dots);
        let own = panel.add(quads * quad_bytes(format(FORMAT))).cast::<f32>();
        for (half, own) in
            [_mm512_loadu_ps(own), _mm512_loadu_ps(own.add(LANES))].iter().enumerate()
        {
            for (r, dots) in dots.iter().enumerate() {
                scale(&given, (r, half), dots[half], *own, out);
            }
        }
    }
}

/// Multiplies `M` rows by a panel with a scale per [`SHARED`] positions.
///
/// # Safety
/// See [`Dots::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn blocks<const FORMAT: u32, const M: usize, const AHEAD: bool>(
    given: Operands,
    out: &mut Tile,
) {
    let Operands { codes, scales, sums, panel, k, ahead } = given;
    let offset = format(FORMAT).offset();
    let code_bytes = SHARED / QUAD * quad_bytes(format(FORMAT));
    let block_bytes = code_bytes + scale_bytes(format(FORMAT));
    let count = k / SHARED;
    // SAFETY: the caller upholds the contract; prefetching an invalid address has no effect.
    unsafe {
        let mut totals = [[_mm512_setzero_ps(); 2]; M];
        for index in 0..count {
            let block = panel.add(index * block_bytes);
            let mut dots = [[_mm512_setzero_si512(); 2]; M];
            for (r, dots) in dots.iter_mut().enumerate() {
                let sum = (*sums.add(r * count + index)).wrapping_mul(-offset);
                *dots = [_mm512_set1_epi32(sum); 2];
            }
            let from = codes.add(index * SHARED);
            let quads = SHARED / QUAD;
            add_quads::<FORMAT, M, AHEAD>(from, k, (block, ahead), quads, &mut dots);
            let own = block.add(code_bytes);
            if AHEAD {
                let ahead = own.wrapping_add(ahead);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                if FORMAT == Q4_1 {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64).cast());
                }
            }
            let halves = |at: usize| {
                let halves = _mm256_loadu_si256(own.add(at * LANES * size_of::<u16>()).cast());
                if FORMAT == MXFP4 {
                    let upper = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves));
                    _mm512_castsi512_ps(upper)
                } else {
                    _mm512_cvtph_ps(halves)
                }
            };
            let own = [halves(0), halves(1)];
            for (r, totals) in totals.iter_mut().enumerate() {
                let scale = _mm512_set1_ps(*scales.add(r * count + index));
                for (half, total) in totals.iter_mut().enumerate() {
                    let dot = _mm512_cvtepi32_ps(dots[r][half]);
                    *total = _mm512_fmadd_ps(dot, _mm512_mul_ps(own[half], scale), *total);
                }
            }
            if FORMAT == Q4_1 {
                let least = [halves(2), halves(3)];
                for (r, totals) in totals.iter_mut().enumerate() {
                    let at = r * count + index;
                    let sum = _mm512_set1_ps(*sums.add(at) as f32 * *scales.add(at));
                    for (total, least) in totals.iter_mut().zip(least) {
                        *total = _mm512_fmadd_ps(least, sum, *total);
                    }
                }
            }
        }
        for (totals, row) in totals.iter().zip(out) {
            _mm512_storeu_ps(row.as_mut_ptr(), totals[0]);
            _mm512_storeu_ps(row.as_mut_ptr().add(LANES), totals[1]);
        }
    }
}

/// Calls the function for this number of rows; for larger numbers, the last function.
macro_rules! by_rows {
    ($function:ident, $format:ident, $count:expr, $given:expr, $out:expr, $($few:literal)* | $most:literal) => {
        match ($count, $given.ahead > 0) {
            $(
                ($few, true) => $function::<$format, $few, true>($given, $out),
                ($few, false) => $function::<$format, $few, false>($given, $out),
            )*
            (_, true) => $function::<$format, $most, true>($given, $out),
            (_, false) => $function::<$format, $most, false>($given, $out),
        }
    };
}

// SAFETY: callers detect the features.
unsafe impl Dots for Vnni {
    #[inline(always)]
    fn rows(format: Format) -> usize {
        // With a scale per block, each row keeps sums of integers and of floats in registers, so
        // fewer rows fit.
        if format == Format::Int8 { 12 } else { 6 }
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
            let given = Operands::new(format, rows, row, (panel, ahead), k);
            match format {
                Format::Int8 => {
                    by_rows!(whole, INT8, count, given, out, 1 2 3 4 5 6 7 8 9 10 11 | 12);
                }
                Format::Q8_0 => by_rows!(blocks, Q8_0, count, given, out, 1 2 3 4 5 | 6),
                Format::Q4_0 => by_rows!(blocks, Q4_0, count, given, out, 1 2 3 4 5 | 6),
                Format::Q4_1 => by_rows!(blocks, Q4_1, count, given, out, 1 2 3 4 5 | 6),
                Format::Mxfp4 => by_rows!(blocks, MXFP4, count, given, out, 1 2 3 4 5 | 6),
                Format::Iq4Nl => by_rows!(blocks, IQ4_NL, count, given, out, 1 2 3 4 5 | 6),
            }
        }
    }
}

const _: () = assert!(NR == 2 * LANES);
