//! Dot products of bytes of 256 bits.
//!
//! AVX2's own products of bytes add pairs at 16 bits, and saturate. Of 4-bit codes no sum is that
//! large, not even those of a whole block. 32 positions are 8 quads of two pairs, of at most 2 · 15
//! · 127 each, and a lane becomes 32 bits once a block. 8-bit codes would saturate, so both sides
//! become 16 bits, even and odd positions of a quad by themselves. The weights are converted once
//! for all rows of a tile, the rows before. Integers are the same as everywhere.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::loops::again;
use crate::codes::{LARGEST, SHARED};
use crate::dots::{QUAD, quad_bytes};
use crate::vnni::format;

/// AVX2 alone.
pub(crate) struct Avx2Dots;
/// The dot products of AVX-VNNI.
pub(crate) struct AvxVnni;

/// Inner positions of a pass over rows that have one scale: as 16 bits, they and the panel's fit
/// into the first cache.
pub(super) const CHUNK: usize = 256;
/// Room for codes of `M` rows as 16 bits, two to a dword: of each quad the even ones, then of each
/// the odd ones.
pub(super) type Room<const M: usize> = [[[MaybeUninit<i32>; CHUNK / QUAD]; 2]; M];
/// Dot products of `M` rows with two vectors of outputs.
pub(super) type Sums<const M: usize> = [[__m256i; 2]; M];

// What is said above of 4-bit codes.
const _: () = assert!(SHARED / QUAD * 2 * 15 * LARGEST as usize <= i16::MAX as usize);

/// Dwords of rows, `apart` dwords apart: a quad's codes, or as [`Room`] has them.
#[derive(Clone, Copy)]
pub(super) struct Quads {
    first: *const i32,
    apart: usize,
}

impl Quads {
    /// A row's dword in every lane.
    ///
    /// # Safety
    /// It is there; the processor has AVX2 (here and below).
    #[inline(always)]
    unsafe fn splat(self, row: usize, quad: usize) -> __m256i {
        // SAFETY: the contract.
        unsafe { _mm256_set1_epi32(self.first.add(row * self.apart + quad).read_unaligned()) }
    }
}

/// The way to make dot products of bytes.
pub(super) trait Bytes {
    /// The first `count` codes of `M` rows that are `stride` apart, as [`Self::add`] wants them.
    ///
    /// # Safety
    /// They are there, `count` at most [`CHUNK`] and a multiple of [`SHARED`]; they and the room
    /// stay. The processor has the instructions (here and below).
    #[inline(always)]
    unsafe fn quads<const FORMAT: u32, const M: usize>(
        codes: *const i8,
        stride: usize,
        _count: usize,
        _room: &mut Room<M>,
    ) -> Quads {
        Quads { first: codes.cast(), apart: stride / QUAD }
    }

    /// Adds `count` quads, of 4-bit codes at most a block's, to the dot products with a part of a
    /// panel, and begins to load what is `ahead` bytes on.
    ///
    /// # Safety
    /// Rows and the panel, whose part's first quad is at `from`, have as many.
    unsafe fn add<const FORMAT: u32, const M: usize>(
        rows: Quads,
        count: usize,
        from: *const u8,
        ahead: usize,
        dots: &mut Sums<M>,
    );
}

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

impl Bytes for AvxVnni {
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
            for quad in 0..count {
                let from = from.add(quad * quad_bytes(format(FORMAT)));
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
                let weights = load::<FORMAT>(from);
                for (r, dots) in dots.iter_mut().enumerate() {
                    let x = rows.splat(r, quad);
                    for (dot, weights) in dots.iter_mut().zip(weights) {
                        *dot = _mm256_dpbusd_avx_epi32(*dot, weights, x);
                    }
                }
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

/// A part's weights of a quad: of two registers, or of the halves of one's bytes.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn load<const FORMAT: u32>(from: *const u8) -> [__m256i; 2] {
    // SAFETY: the contract.
    unsafe {
        let first = _mm256_loadu_si256(from.cast());
        if format(FORMAT).is_narrow() {
            let mask = _mm256_set1_epi8(15);
            let high = _mm256_srli_epi16::<4>(first);
            [_mm256_and_si256(first, mask), _mm256_and_si256(high, mask)]
        } else {
            [first, _mm256_loadu_si256(from.add(size_of::<__m256i>()).cast())]
        }
    }
}
