//! The common part of 256-bit byte dot products, independent of the multiply instruction.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use crate::dots::QUAD;
use crate::isa::operands::format;

/// The number of inner positions that are multiplied at a time if a row has one scale. Even as
/// 16-bit numbers, the rows' and the panel's codes of these positions fit into the L1 cache.
pub(super) const CHUNK: usize = 256;
/// Memory for the codes of `M` rows as 16-bit numbers, two per dword: the even codes of each quad,
/// then the odd ones.
pub(in crate::isa) type Room<const M: usize> = [[[MaybeUninit<i32>; CHUNK / QUAD]; 2]; M];
/// Dot products of `M` rows with two vectors of outputs.
pub(in crate::isa) type Sums<const M: usize> = [[__m256i; 2]; M];

/// Dwords of rows, `apart` dwords from row to row. A dword is a quad of codes, or two numbers of a
/// [`Room`].
#[derive(Clone, Copy)]
pub(in crate::isa) struct Quads {
    pub(super) first: *const i32,
    pub(super) apart: usize,
}

impl Quads {
    /// Broadcasts a row's dword to all lanes.
    ///
    /// # Safety
    /// The dword must exist, and the processor must have AVX2 (here and below).
    #[inline(always)]
    pub(in crate::isa) unsafe fn splat(self, row: usize, quad: usize) -> __m256i {
        // SAFETY: the caller upholds the contract.
        unsafe { _mm256_set1_epi32(self.first.add(row * self.apart + quad).read_unaligned()) }
    }
}

/// A method of computing byte dot products.
pub(in crate::isa) trait Bytes {
    /// Returns the first `count` codes of `M` rows in the form that [`Self::add`] takes. The rows
    /// are `stride` codes apart.
    ///
    /// # Safety
    /// The codes must exist. Neither the codes nor `_room` may move while the result is used.
    /// `count` must be at most [`CHUNK`] and a multiple of [`SHARED`](crate::codes::SHARED). The
    /// processor must have the instructions (here and below).
    #[inline(always)]
    unsafe fn quads<const FORMAT: u32, const M: usize>(
        codes: *const i8,
        stride: usize,
        _count: usize,
        _room: &mut Room<M>,
    ) -> Quads {
        Quads { first: codes.cast(), apart: stride / QUAD }
    }

    /// Adds `count` quads to the dot products with half of a panel, and prefetches the data `ahead`
    /// bytes after the quads.
    ///
    /// # Safety
    /// The rows and the panel must have `count` quads. The first quad of the panel's half must be
    /// at `from`.
    unsafe fn add<const FORMAT: u32, const M: usize>(
        rows: Quads,
        count: usize,
        from: *const u8,
        ahead: usize,
        dots: &mut Sums<M>,
    );
}

/// Loads the weights of a quad for half of a panel: two registers of bytes, or one register whose
/// low and high nibbles are unpacked to two.
///
/// # Safety
/// The weights must be readable.
#[inline(always)]
pub(in crate::isa) unsafe fn load<const FORMAT: u32>(from: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller upholds the contract.
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
