//! [`Dots`](crate::dots::Dots) with 256 bits, generic over the byte multiply.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::bytes::{Bytes, CHUNK, Room};
use super::loops::HALF_LANES;
use crate::codes::{Format, SHARED};
use crate::dots::{QUAD, quad_bytes, scale_bytes};
use crate::isa::operands::{MXFP4, Operands, Q4_1, format};
use crate::tile::{NR, Tile};
use crate::vector::LANES;

/// Bytes of a quad that precede a part; a part is half of a panel's outputs.
const fn part_bytes(format: Format, part: usize) -> usize {
    part * quad_bytes(format) / 2
}

/// The first outputs of a part's two vectors: adjacent outputs, or two outputs that share bytes.
const fn outputs(format: Format, part: usize) -> [usize; 2] {
    match format.is_narrow() {
        true => [part * HALF_LANES, LANES + part * HALF_LANES],
        false => [part * LANES, part * LANES + HALF_LANES],
    }
}

/// Multiplies `M` rows by a panel whose outputs have one scale each.
///
/// # Safety
/// See [`Dots::tile`](crate::dots::Dots::tile).
#[inline(always)]
pub(in crate::isa) unsafe fn whole<B: Bytes, const FORMAT: u32, const M: usize>(
    given: Operands,
    out: &mut Tile,
) {
    let Operands { codes, scales, sums, panel, k, ahead } = given;
    let format = format(FORMAT);
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut found = [[0i32; NR]; M];
        for (r, found) in found.iter_mut().enumerate() {
            *found = [(*sums.add(r)).wrapping_mul(-format.offset()); NR];
        }
        let mut room: Room<M> = [[[MaybeUninit::uninit(); CHUNK / QUAD]; 2]; M];
        for first in (0..k).step_by(CHUNK) {
            let count = CHUNK.min(k - first);
            let rows = B::quads::<FORMAT, M>(codes.add(first), k, count, &mut room);
            for part in 0..2 {
                let [output, _] = outputs(format, part);
                let mut dots = [[_mm256_setzero_si256(); 2]; M];
                for (dots, found) in dots.iter_mut().zip(&found) {
                    let from = found.as_ptr().add(output).cast::<__m256i>();
                    *dots = [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))];
                }
                let from = panel.add(first / QUAD * quad_bytes(format) + part_bytes(format, part));
                B::add::<FORMAT, M>(rows, count / QUAD, from, ahead, &mut dots);
                for (dots, found) in dots.iter().zip(&mut found) {
                    let to = found.as_mut_ptr().add(output).cast::<__m256i>();
                    _mm256_storeu_si256(to, dots[0]);
                    _mm256_storeu_si256(to.add(1), dots[1]);
                }
            }
        }
        let own = panel.add(k / QUAD * quad_bytes(format)).cast::<f32>();
        for (r, (found, out)) in found.iter().zip(out).enumerate() {
            let scale = _mm256_set1_ps(*scales.add(r));
            for at in (0..NR).step_by(HALF_LANES) {
                let dot = _mm256_cvtepi32_ps(_mm256_loadu_si256(found.as_ptr().add(at).cast()));
                let scale = _mm256_mul_ps(_mm256_loadu_ps(own.add(at)), scale);
                _mm256_storeu_ps(out.as_mut_ptr().add(at), _mm256_mul_ps(dot, scale));
            }
        }
    }
}

/// Loads eight 16-bit scales.
#[inline(always)]
unsafe fn halves<const FORMAT: u32>(from: *const u16) -> __m256 {
    // SAFETY: the caller guarantees eight scales.
    unsafe {
        let halves = _mm_loadu_si128(from.cast());
        if FORMAT == MXFP4 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        } else {
            _mm256_cvtph_ps(halves)
        }
    }
}

/// Multiplies `M` rows by a panel with a scale per [`SHARED`] positions.
///
/// # Safety
/// See [`Dots::tile`](crate::dots::Dots::tile).
#[inline(always)]
pub(in crate::isa) unsafe fn blocks<B: Bytes, const FORMAT: u32, const M: usize>(
    given: Operands,
    out: &mut Tile,
) {
    let Operands { codes, scales, sums, panel, k, ahead } = given;
    let format = format(FORMAT);
    let code_bytes = SHARED / QUAD * quad_bytes(format);
    let count = k / SHARED;
    // SAFETY: the caller upholds the contract; prefetching an invalid address has no effect.
    unsafe {
        out[..M].fill([0.0; NR]);
        let mut room: Room<M> = [[[MaybeUninit::uninit(); CHUNK / QUAD]; 2]; M];
        for index in 0..count {
            let block = panel.add(index * (code_bytes + scale_bytes(format)));
            let own = block.add(code_bytes).cast::<u16>();
            let later = own.cast::<u8>().wrapping_add(ahead);
            _mm_prefetch::<_MM_HINT_T0>(later.cast());
            if FORMAT == Q4_1 {
                _mm_prefetch::<_MM_HINT_T0>(later.wrapping_add(64).cast());
            }
            let rows = B::quads::<FORMAT, M>(codes.add(index * SHARED), k, SHARED, &mut room);
            for part in 0..2 {
                let mut dots = [[_mm256_setzero_si256(); 2]; M];
                for (r, dots) in dots.iter_mut().enumerate() {
                    let sum = (*sums.add(r * count + index)).wrapping_mul(-format.offset());
                    *dots = [_mm256_set1_epi32(sum); 2];
                }
                let from = block.add(part_bytes(format, part));
                B::add::<FORMAT, M>(rows, SHARED / QUAD, from, ahead, &mut dots);
                for (half, output) in outputs(format, part).into_iter().enumerate() {
                    let scales = scales.add(index);
                    let weights = halves::<FORMAT>(own.add(output));
                    let least = match FORMAT {
                        Q4_1 => halves::<FORMAT>(own.add(NR + output)),
                        _ => weights,
                    };
                    for (r, (dots, out)) in dots.iter().zip(&mut *out).enumerate() {
                        let scale = *scales.add(r * count);
                        let factor = _mm256_mul_ps(weights, _mm256_set1_ps(scale));
                        let to = out.as_mut_ptr().add(output);
                        let dot = _mm256_cvtepi32_ps(dots[half]);
                        let mut total = _mm256_fmadd_ps(dot, factor, _mm256_loadu_ps(to));
                        if FORMAT == Q4_1 {
                            let sum = *sums.add(r * count + index) as f32 * scale;
                            total = _mm256_fmadd_ps(least, _mm256_set1_ps(sum), total);
                        }
                        _mm256_storeu_ps(to, total);
                    }
                }
            }
        }
    }
}

/// Calls the function for this number of rows; for larger numbers, the last function.
macro_rules! by_rows {
    ($function:ident, $format:ident, $count:expr, $given:expr, $out:expr) => {
        match $count {
            1 => $function::<$format, 1>($given, $out),
            2 => $function::<$format, 2>($given, $out),
            3 => $function::<$format, 3>($given, $out),
            4 => $function::<$format, 4>($given, $out),
            5 => $function::<$format, 5>($given, $out),
            _ => $function::<$format, 6>($given, $out),
        }
    };
}

/// Implements [`Dots`](crate::dots::Dots), compiled for `$features`.
macro_rules! dots {
    ($name:ident, $features:literal) => {
        const _: () = {
            use $crate::codes::{Codes, Format};
            use $crate::dots::Dots;
            use $crate::isa::avx2::dots::{blocks, by_rows, whole};
            use $crate::isa::operands::{INT8, IQ4_NL, MXFP4, Operands, Q4_0, Q4_1, Q8_0};
            use $crate::tile::Tile;

            #[target_feature(enable = $features)]
            unsafe fn whole_tile<const FORMAT: u32, const M: usize>(
                given: Operands,
                out: &mut Tile,
            ) {
                // SAFETY: the caller upholds the contract, here and below.
                unsafe { whole::<$name, FORMAT, M>(given, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn tile_of_blocks<const FORMAT: u32, const M: usize>(
                given: Operands,
                out: &mut Tile,
            ) {
                unsafe { blocks::<$name, FORMAT, M>(given, out) }
            }

            // SAFETY: callers detect the features.
            unsafe impl Dots for $name {
                #[inline(always)]
                fn rows(_: Format) -> usize {
                    6
                }

                #[inline(always)]
                unsafe fn tile(
                    format: Format,
                    rows: &Codes,
                    which: (usize, usize),
                    panel: *const u8,
                    k: usize,
                    ahead: usize,
                    out: &mut Tile,
                ) {
                    unsafe {
                        let given = Operands::new(format, rows, which.0, (panel, ahead), k);
                        let count = which.1;
                        match format {
                            Format::Int8 => by_rows!(whole_tile, INT8, count, given, out),
                            Format::Q8_0 => by_rows!(tile_of_blocks, Q8_0, count, given, out),
                            Format::Q4_0 => by_rows!(tile_of_blocks, Q4_0, count, given, out),
                            Format::Q4_1 => by_rows!(tile_of_blocks, Q4_1, count, given, out),
                            Format::Mxfp4 => by_rows!(tile_of_blocks, MXFP4, count, given, out),
                            Format::Iq4Nl => by_rows!(tile_of_blocks, IQ4_NL, count, given, out),
                        }
                    }
                }
            }
        };
    };
}

pub(in crate::isa) use {by_rows, dots};
