//! The common parts of 256-bit dot products of bytes, independent of the multiply instruction.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use crate::dots::QUAD;
use crate::isa::operands::format;

/// Inner positions of one pass over rows with one scale. As 16-bit numbers, they and the panel's
/// fit into the first cache.
pub(super) const CHUNK: usize = 256;
/// Room for the codes of `M` rows as 16-bit numbers, two per dword: the even ones of each quad,
/// then the odd ones.
pub(in crate::isa) type Room<const M: usize> = [[[MaybeUninit<i32>; CHUNK / QUAD]; 2]; M];
/// Dot products of `M` rows with two vectors of outputs.
pub(in crate::isa) type Sums<const M: usize> = [[__m256i; 2]; M];

/// Dwords of rows that are `apart` dwords apart: a quad's codes, or two numbers of a [`Room`].
#[derive(Clone, Copy)]
pub(in crate::isa) struct Quads {
    pub(super) first: *const i32,
    pub(super) apart: usize,
}

impl Quads {
    /// A row's dword in every lane.
    ///
    /// # Safety
    /// It is there; the processor has AVX2 (here and below).
    #[inline(always)]
    pub(in crate::isa) unsafe fn splat(self, row: usize, quad: usize) -> __m256i {
        // SAFETY: the contract.
        unsafe { _mm256_set1_epi32(self.first.add(row * self.apart + quad).read_unaligned()) }
    }
}

/// The way to make dot products of bytes.
pub(in crate::isa) trait Bytes {
    /// The first `count` codes of `M` rows that are `stride` apart, in the form that [`Self::add`]
    /// takes.
    ///
    /// # Safety
    /// The codes exist, and neither they nor the room move. `count` is at most [`CHUNK`] and a
    /// multiple of [`SHARED`](crate::codes::SHARED). The processor has the instructions (here and
    /// below).
    #[inline(always)]
    unsafe fn quads<const FORMAT: u32, const M: usize>(
        codes: *const i8,
        stride: usize,
        _count: usize,
        _room: &mut Room<M>,
    ) -> Quads {
        Quads { first: codes.cast(), apart: stride / QUAD }
    }

    /// Adds `count` quads to the dot products with a part of a panel, and prefetches the address
    /// `ahead` bytes later.
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

/// A part's weights of a quad: in two registers, or in the two halves of one register's bytes.
///
/// # Safety
/// They are there.
#[inline(always)]
pub(in crate::isa) unsafe fn load<const FORMAT: u32>(from: *const u8) -> [__m256i; 2] {
    // SAFETY: the contract.
    unsafe {
        let first = _mm256_loadu_si256(from.cast());
        if format(FORMAT).is_narrow() {
            let mask = _mm256_set1_epi8(15);
            let high = _mm256_srli_epi16::<4>(first);
            let codes = [_mm256_and_si256(first, mask), _mm256_and_si256(high, mask)];
            match format(FORMAT).table() {
                None => codes,
                Some(table) => {
                    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                    [_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]
                }
            }
        } else {
            [first, _mm256_loadu_si256(from.add(size_of::<__m256i>()).cast())]
        }
    }
}
