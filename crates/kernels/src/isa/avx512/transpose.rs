//! Transposes rows of dwords into columns.

use std::arch::x86_64::*;

use crate::vector::LANES;

/// Sets `panel[d * pitch + r] = rows[r][d]` for dwords, for `d < count`.
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::isa) unsafe fn transpose_rows(
    rows: &[*const i32; LANES],
    count: usize,
    panel: *mut i32,
    pitch: usize,
) {
    for first in (0..count).step_by(LANES) {
        let width = (count - first).min(LANES);
        // SAFETY: only the `width` remaining dwords of each row are read.
        let block = unsafe { transposed(rows, first, width) };
        for (d, vector) in block.iter().enumerate().take(width) {
            // SAFETY: the write stays inside the panel, because first + d < count.
            unsafe { _mm512_storeu_si512(panel.add((first + d) * pitch).cast(), *vector) };
        }
    }
}

/// Returns up to [`LANES`] columns of a matrix of dwords `[rows, count]`, from `first` on.
///
/// # Safety
/// `a` must be such a matrix, with at most [`LANES`] rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(in crate::isa) unsafe fn columns(
    a: *const i32,
    (rows, count): (usize, usize),
    first: usize,
) -> [__m512i; LANES] {
    // If there are fewer than [`LANES`] rows, the last row also takes the place of the missing
    // ones.
    let mut each = [a.wrapping_add((rows - 1) * count); LANES];
    for (r, row) in each.iter_mut().enumerate().take(rows) {
        *row = a.wrapping_add(r * count);
    }
    // SAFETY: reads stay inside the rows.
    unsafe { transposed(&each, first, (count - first).min(LANES)) }
}

/// Loads `width` dwords of each row from `first` on, and transposes them.
///
/// # Safety
/// The dwords must be valid for reads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transposed(rows: &[*const i32; LANES], first: usize, width: usize) -> [__m512i; LANES] {
    let mask = ((1u32 << width) - 1) as u16;
    let mut block = [_mm512_setzero_si512(); LANES];
    for (vector, row) in block.iter_mut().zip(rows) {
        // SAFETY: masked lanes are not read.
        *vector = unsafe { _mm512_maskz_loadu_epi32(mask, row.add(first)) };
    }
    transpose(&mut block);
    block
}

/// Transposes 16 x 16 dwords.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transpose(block: &mut [__m512i; 16]) {
    let mut t = *block;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(block[2 * i], block[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(block[2 * i], block[2 * i + 1]);
    }
    let mut u = t;
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    // Lane `l` of u[4 i + j] holds rows 4 i .. 4 i + 4 of column 4 l + j.
    for j in 0..4 {
        let low01 = _mm512_shuffle_i32x4::<0x88>(u[j], u[4 + j]);
        let high01 = _mm512_shuffle_i32x4::<0xdd>(u[j], u[4 + j]);
        let low23 = _mm512_shuffle_i32x4::<0x88>(u[8 + j], u[12 + j]);
        let high23 = _mm512_shuffle_i32x4::<0xdd>(u[8 + j], u[12 + j]);
        block[j] = _mm512_shuffle_i32x4::<0x88>(low01, low23);
        block[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low01, low23);
        block[4 + j] = _mm512_shuffle_i32x4::<0x88>(high01, high23);
        block[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high01, high23);
    }
}
