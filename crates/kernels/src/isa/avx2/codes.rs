//! Codes with AVX2 alone.
//!
//! Its own products of bytes add pairs at 16 bits, and saturate. Of 4-bit codes no sum is that
//! large, not even those of a whole block. 32 positions are 8 quads of two pairs, of at most 2 · 15
//! · 127 each, and a lane becomes 32 bits once a block. 8-bit codes would saturate, so both sides
//! become 16 bits, even and odd positions of a quad by themselves. The weights are converted once
//! for all rows of a tile, the rows before. Integers are the same as everywhere.

use std::arch::x86_64::*;

use super::bytes::{Bytes, CHUNK, Quads, Room, Sums, load};
use super::dots::dots;
use super::loops::again;
use crate::codes::{LARGEST, SHARED};
use crate::dots::{QUAD, quad_bytes};
use crate::isa::operands::format;

/// Codes with AVX2 alone.
pub(crate) struct Avx2Dots;

// What is said above of 4-bit codes.
const _: () = assert!(SHARED / QUAD * 2 * 15 * LARGEST as usize <= i16::MAX as usize);

impl Bytes for Avx2Dots {
    #[inline(always)]
    unsafe fn quads<const FORMAT: u32, const M: usize>(
        codes: *const i8,
        stride: usize,
        count: usize,
        room: &mut Room<M>,
    ) -> Quads {
        if format(FORMAT).is_narrow() {
            return Quads { first: codes.cast(), apart: stride / QUAD };
        }
        for (r, [even, odd]) in room.iter_mut().enumerate() {
            for at in (0..count).step_by(SHARED) {
                // SAFETY: inside the row, and the room.
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
        // SAFETY: the contract; a prefetch of a wrong address does nothing.
        unsafe {
            if format(FORMAT).is_narrow() {
                let mut words = [[_mm256_setzero_si256(); 2]; M];
                for quad in 0..count {
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
                for (dots, words) in dots.as_flattened_mut().iter_mut().zip(words.as_flattened()) {
                    let sum = _mm256_madd_epi16(*words, _mm256_set1_epi16(1));
                    *dots = _mm256_add_epi32(*dots, sum);
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

/// Adds products of weights and rows that are 16 bits.
///
/// # Safety
/// Rows have the dword; the processor has AVX2 (here and below).
#[inline(always)]
unsafe fn add_words<const M: usize>(
    rows: Quads,
    at: usize,
    weights: [__m256i; 2],
    dots: &mut Sums<M>,
) {
    // SAFETY: the contract.
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
