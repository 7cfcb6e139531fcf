//! Products of codes with AVX2 alone.
//!
//! AVX2's byte multiply adds pairs in 16 bits, and saturates. Products of small codes can be summed
//! in 16 bits for several quads: for codes up to 15 over a whole block, for `MXFP4` over half a
//! block. Larger codes could saturate in one instruction. So both operands are widened to 16 bits,
//! the even and the odd positions of a quad separately. The weights are widened once for all rows
//! of a tile; the rows are widened earlier. The integers are the same as at every other instruction
//! level.

use std::arch::x86_64::*;

use super::bytes::{Bytes, CHUNK, Quads, Room, Sums, load};
use super::dots::dots;
use super::loops::again;
use crate::codes::{Format, LARGEST, SHARED};
use crate::dots::{QUAD, quad_bytes};
use crate::isa::operands::format;

/// Products of codes with AVX2 alone.
pub(crate) struct Avx2Dots;

/// The number of quads that can be summed in 16 bits: as many as a block has, half as many, or 0.
const fn quads_of_16_bits(format: Format) -> usize {
    let of_block = SHARED / QUAD;
    match i16::MAX as usize / (2 * format.largest() as usize * LARGEST as usize) {
        most if most >= of_block => of_block,
        most if most >= of_block / 2 => of_block / 2,
        _ => 0,
    }
}

// Checks the statements of the module's documentation.
const _: () = assert!(quads_of_16_bits(Format::Q4_1) == SHARED / QUAD);
const _: () = assert!(quads_of_16_bits(Format::Mxfp4) == SHARED / QUAD / 2);
const _: () = assert!(quads_of_16_bits(Format::Iq4Nl) == 0);

impl Bytes for Avx2Dots {
    #[inline(always)]
    unsafe fn quads<const FORMAT: u32, const M: usize>(
        codes: *const i8,
        stride: usize,
        count: usize,
        room: &mut Room<M>,
    ) -> Quads {
        if quads_of_16_bits(format(FORMAT)) > 0 {
            return Quads { first: codes.cast(), apart: stride / QUAD };
        }
        for (r, [even, odd]) in room.iter_mut().enumerate() {
            for at in (0..count).step_by(SHARED) {
                // SAFETY: reads stay inside the row, and writes inside the room.
                unsafe {
                    let (even, odd) = (even.as_mut_ptr(), odd.as_mut_ptr());
                    let both = _mm256_loadu_si256(codes.add(r * stride + at).cast());
                    let low = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(both));
                    _mm256_storeu_si256(even.add(at / QUAD).cast(), low);
                    _mm256_storeu_si256(odd.add(at / QUAD).cast(), _mm256_srai_epi16::<8>(both));
                }
            }
        }
        Quads { first: room.as_ptr().cast(), apart: 2 * CHUNK / QUAD }
    }

    #[inline(always)]
    unsafe fn add<const FORMAT: u32, const M: usize>(
        rows: Quads,
        count: usize,
        from: *const u8,
        ahead: usize,
        dots: &mut Sums<M>,
    ) {
        // SAFETY: the caller upholds the contract; prefetching an invalid address has no effect.
        unsafe {
            let together = const { quads_of_16_bits(format(FORMAT)) };
            if together > 0 {
                for first in (0..count).step_by(together) {
                    let mut words = [[_mm256_setzero_si256(); 2]; M];
                    for quad in first..(first + together).min(count) {
                        let from = from.add(quad * quad_bytes(format(FORMAT)));
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
                        let weights = load::<FORMAT>(from);
                        for (r, words) in words.iter_mut().enumerate() {
                            let x = rows.splat(r, quad);
                            for (sum, weights) in words.iter_mut().zip(weights) {
                                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(weights, x));
                            }
                        }
                    }
                    let sums = dots.as_flattened_mut().iter_mut().zip(words.as_flattened());
                    for (dots, words) in sums {
                        let sum = _mm256_madd_epi16(*words, _mm256_set1_epi16(1));
                        *dots = _mm256_add_epi32(*dots, sum);
                    }
                }
                return;
            }
            for quad in 0..count {
                let from = from.add(quad * quad_bytes(format(FORMAT)));
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
                let [first, second] = load::<FORMAT>(from);
                let mask = _mm256_set1_epi16(255);
                let even = [_mm256_and_si256(first, mask), _mm256_and_si256(second, mask)];
                add_words(rows, quad, even, dots);
                let [first, second] = load::<FORMAT>(again(from));
                let odd = [_mm256_srli_epi16::<8>(first), _mm256_srli_epi16::<8>(second)];
                add_words(rows, CHUNK / QUAD + quad, odd, dots);
            }
        }
    }
}

/// Adds products of weights and rows that were widened to 16 bits.
///
/// # Safety
/// The rows must have the dword `at`, and the processor must have AVX2 (here and below).
#[inline(always)]
unsafe fn add_words<const M: usize>(
    rows: Quads,
    at: usize,
    weights: [__m256i; 2],
    dots: &mut Sums<M>,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        for (r, dots) in dots.iter_mut().enumerate() {
            let x = rows.splat(r, at);
            for (dot, weights) in dots.iter_mut().zip(weights) {
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(weights, x));
            }
        }
    }
}

dots!(Avx2Dots, "avx2,fma,f16c");
