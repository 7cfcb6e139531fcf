//! The innermost loops: a few rows times one packed panel, for each kind of processor.

use crate::element::{Bf16, Element};
use crate::pack::NR;

/// Results of a tile: one array of outputs a row.
pub(crate) type Tile = [[f32; NR]; MAX_ROWS];
/// Rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 12;

/// A processor's way of computing with elements `E`.
///
/// # Safety
/// Implementations may use instructions that not every processor has: their methods may be called only where those were detected.
pub(crate) unsafe trait Kernel<E: Element>: 'static {
    /// Rows that a tile may have, at most [`MAX_ROWS`].
    const ROWS: usize;

    /// `out[r] = a[r * stride ..][.. k] · panel` for `r < rows`.
    ///
    /// # Safety
    /// `a` has `rows` rows of `k` elements, `stride` apart; `panel` is a packed panel of `k` inner positions, `k` a multiple of `E::PAIR`;
    /// `1 <= rows <= Self::ROWS`.
    unsafe fn tile(
        a: *const E,
        stride: usize,
        rows: usize,
        panel: *const E,
        k: usize,
        out: &mut Tile,
    );

    /// Packs [`NR`] rows of `k` elements, as [`crate::pack::pack`] does one panel.
    ///
    /// # Safety
    /// Each of `rows` can be read for `k` elements, `panel` written for `k * NR`; `k` is a multiple of `E::PAIR`.
    unsafe fn pack_rows(rows: &[*const E; NR], k: usize, panel: *mut E);

    /// Packs `width` columns of [`NR`] rows as a panel whose inner dimension is the row; zeros in the columns from `width` on stay zeros.
    ///
    /// # Safety
    /// Each of `rows` can be read for `width` elements, at most [`NR`]; `panel` can be written for `NR * NR`.
    unsafe fn pack_columns(rows: &[*const E; NR], width: usize, panel: *mut E);

    /// Begins to load the cache line at `address`, which need not be valid.
    fn prefetch(address: *const E);
}

/// Plain loops, which the compiler turns into the vectors of whatever processor the caller is compiled for.
pub(crate) struct Plain;

// SAFETY: no special instructions.
unsafe impl<E: Element> Kernel<E> for Plain {
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn tile(
        a: *const E,
        stride: usize,
        rows: usize,
        panel: *const E,
        k: usize,
        out: &mut Tile,
    ) {
        for (r, sums) in out.iter_mut().enumerate().take(rows) {
            let mut sum = [0.0; NR];
            for group in 0..k / E::PAIR {
                for within in 0..E::PAIR {
                    // SAFETY: inside row r, by the contract.
                    let x = unsafe { (*a.add(r * stride + group * E::PAIR + within)).to_f32() };
                    for (column, sum) in sum.iter_mut().enumerate() {
                        let at = (group * NR + column) * E::PAIR + within;
                        // SAFETY: inside the panel, by the contract.
                        *sum += x * unsafe { (*panel.add(at)).to_f32() };
                    }
                }
            }
            *sums = sum;
        }
    }

    #[inline(always)]
    unsafe fn pack_rows(rows: &[*const E; NR], k: usize, panel: *mut E) {
        for (column, &row) in rows.iter().enumerate() {
            for inner in 0..k {
                let at = (inner / E::PAIR * NR + column) * E::PAIR + inner % E::PAIR;
                // SAFETY: inside the row and the panel, by the contract.
                unsafe { *panel.add(at) = *row.add(inner) };
            }
        }
    }

    #[inline(always)]
    unsafe fn pack_columns(rows: &[*const E; NR], width: usize, panel: *mut E) {
        for (inner, &row) in rows.iter().enumerate() {
            for column in 0..width {
                let at = (inner / E::PAIR * NR + column) * E::PAIR + inner % E::PAIR;
                // SAFETY: inside the row and the panel, by the contract.
                unsafe { *panel.add(at) = *row.add(column) };
            }
        }
    }

    #[inline(always)]
    fn prefetch(_: *const E) {}
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx512, Avx512Bf16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Bf16, Kernel, NR, Tile};

    /// `f32` with AVX-512.
    pub(crate) struct Avx512;
    /// bfloat16 with AVX-512's dot products of pairs.
    pub(crate) struct Avx512Bf16;

    macro_rules! dispatch {
        ($rows:expr, $function:ident ( $($argument:expr),* )) => {
            match $rows {
                1 => $function::<1>($($argument),*),
                2 => $function::<2>($($argument),*),
                3 => $function::<3>($($argument),*),
                4 => $function::<4>($($argument),*),
                5 => $function::<5>($($argument),*),
                6 => $function::<6>($($argument),*),
                7 => $function::<7>($($argument),*),
                8 => $function::<8>($($argument),*),
                9 => $function::<9>($($argument),*),
                10 => $function::<10>($($argument),*),
                11 => $function::<11>($($argument),*),
                _ => $function::<12>($($argument),*),
            }
        };
    }

    // SAFETY: callers detect avx512f and avx512bw.
    unsafe impl Kernel<f32> for Avx512 {
        const ROWS: usize = 12;

        #[inline(always)]
        unsafe fn tile(
            a: *const f32,
            stride: usize,
            rows: usize,
            panel: *const f32,
            k: usize,
            out: &mut Tile,
        ) {
            // SAFETY: the caller's contract.
            unsafe { dispatch!(rows, tile_f32(a, stride, panel, k, out)) }
        }

        #[inline(always)]
        unsafe fn pack_rows(rows: &[*const f32; NR], k: usize, panel: *mut f32) {
            // SAFETY: the caller's contract; an f32 is a dword.
            unsafe { transpose_rows(&rows.map(<*const f32>::cast), k, panel.cast()) }
        }

        #[inline(always)]
        unsafe fn pack_columns(rows: &[*const f32; NR], width: usize, panel: *mut f32) {
            for (inner, row) in rows.iter().enumerate() {
                // SAFETY: inside the row and the panel, by the contract.
                unsafe { std::ptr::copy_nonoverlapping(*row, panel.add(inner * NR), width) };
            }
        }

        #[inline(always)]
        fn prefetch(address: *const f32) {
            // SAFETY: a prefetch of a wrong address does nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
        }
    }

    // SAFETY: callers detect avx512f, avx512bw and avx512bf16.
    unsafe impl Kernel<Bf16> for Avx512Bf16 {
        const ROWS: usize = 12;

        #[inline(always)]
        unsafe fn tile(
            a: *const Bf16,
            stride: usize,
            rows: usize,
            panel: *const Bf16,
            k: usize,
            out: &mut Tile,
        ) {
            // SAFETY: the caller's contract.
            unsafe { dispatch!(rows, tile_bf16(a, stride, panel, k, out)) }
        }

        #[inline(always)]
        unsafe fn pack_rows(rows: &[*const Bf16; NR], k: usize, panel: *mut Bf16) {
            // SAFETY: the caller's contract; a pair is a dword.
            unsafe { transpose_rows(&rows.map(<*const Bf16>::cast), k / 2, panel.cast()) }
        }

        #[inline(always)]
        unsafe fn pack_columns(rows: &[*const Bf16; NR], width: usize, panel: *mut Bf16) {
            // SAFETY: the caller's contract.
            unsafe { interleave_rows(rows, width, panel) }
        }

        #[inline(always)]
        fn prefetch(address: *const Bf16) {
            // SAFETY: a prefetch of a wrong address does nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn tile_f32<const M: usize>(
        a: *const f32,
        stride: usize,
        panel: *const f32,
        k: usize,
        out: &mut Tile,
    ) {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        for inner in 0..k {
            // SAFETY: inside the panel and the rows, by the contract of `Kernel::tile`.
            unsafe {
                let left = _mm512_loadu_ps(panel.add(inner * NR));
                let right = _mm512_loadu_ps(panel.add(inner * NR + 16));
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(r * stride + inner));
                    sum[0] = _mm512_fmadd_ps(x, left, sum[0]);
                    sum[1] = _mm512_fmadd_ps(x, right, sum[1]);
                }
            }
        }
        store(&sums, out);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn tile_bf16<const M: usize>(
        a: *const Bf16,
        stride: usize,
        panel: *const Bf16,
        k: usize,
        out: &mut Tile,
    ) {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        for pair in 0..k / 2 {
            // SAFETY: inside the panel and the rows, by the contract of `Kernel::tile`; loads may be unaligned.
            unsafe {
                let at = panel.add(pair * 2 * NR).cast::<i32>();
                let left: __m512bh = std::mem::transmute(_mm512_loadu_si512(at.cast()));
                let right: __m512bh = std::mem::transmute(_mm512_loadu_si512(at.add(16).cast()));
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = a.add(r * stride + 2 * pair).cast::<i32>().read_unaligned();
                    let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(x));
                    sum[0] = _mm512_dpbf16_ps(sum[0], x, left);
                    sum[1] = _mm512_dpbf16_ps(sum[1], x, right);
                }
            }
        }
        store(&sums, out);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn store<const M: usize>(sums: &[[__m512; 2]; M], out: &mut Tile) {
        for (sum, row) in sums.iter().zip(out) {
            // SAFETY: a row holds two vectors.
            unsafe {
                _mm512_storeu_ps(row.as_mut_ptr(), sum[0]);
                _mm512_storeu_ps(row.as_mut_ptr().add(16), sum[1]);
            }
        }
    }

    /// `panel[(i * NR + c) * 2 + j] = rows[2 * i + j][c]` for `c < width`.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn interleave_rows(rows: &[*const Bf16; NR], width: usize, panel: *mut Bf16) {
        // Words 0 to 31 are the first row's, 32 to 63 the second's.
        let order: [[i16; 32]; 2] = std::array::from_fn(|half| {
            std::array::from_fn(|at| (half * 16 + at / 2 + at % 2 * 32) as i16)
        });
        let mask = if width == NR { u32::MAX } else { (1u32 << width) - 1 };
        // SAFETY: only what the mask names is read, inside the rows; the panel has NR / 2 pairs of NR columns.
        unsafe {
            let [left, right] = order.map(|order| _mm512_loadu_si512(order.as_ptr().cast()));
            for (pair, rows) in rows.chunks_exact(2).enumerate() {
                let first = _mm512_maskz_loadu_epi16(mask, rows[0].cast());
                let second = _mm512_maskz_loadu_epi16(mask, rows[1].cast());
                let to = panel.add(pair * 2 * NR);
                _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(first, left, second));
                _mm512_storeu_si512(
                    to.add(NR).cast(),
                    _mm512_permutex2var_epi16(first, right, second),
                );
            }
        }
    }

    /// `panel[d * NR + r] = rows[r][d]` for dwords, `d < count`.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn transpose_rows(rows: &[*const i32; NR], count: usize, panel: *mut i32) {
        for (half, rows) in rows.chunks_exact(16).enumerate() {
            for first in (0..count).step_by(16) {
                let width = (count - first).min(16);
                let mask = ((1u32 << width) - 1) as u16;
                let mut block = [_mm512_setzero_si512(); 16];
                for (vector, row) in block.iter_mut().zip(rows) {
                    // SAFETY: only what the mask names is read, and that is inside the row.
                    *vector = unsafe { _mm512_maskz_loadu_epi32(mask, row.add(first)) };
                }
                transpose(&mut block);
                for (d, vector) in block.iter().enumerate().take(width) {
                    // SAFETY: inside the panel: first + d < count.
                    unsafe {
                        _mm512_storeu_si512(
                            panel.add((first + d) * NR + half * 16).cast(),
                            *vector,
                        );
                    }
                }
            }
        }
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
        // u[4 i + j] lane l holds rows 4 i .. 4 i + 4 of column 4 l + j.
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
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pack::{pack, packed_len};

    fn numbers<E: Element>(count: usize, seed: u32) -> Vec<E> {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            E::from_f32(state as f32 / u32::MAX as f32 - 0.5)
        };
        (0..count).map(|_| next()).collect()
    }

    fn check<E: Element + std::fmt::Debug + PartialEq, K: Kernel<E>>(
        k: usize,
        rows: usize,
        seed: u32,
    ) {
        let weights: Vec<E> = numbers(NR * k, seed);
        let mut panel = vec![E::default(); packed_len(NR, k)];
        // SAFETY: plain loops.
        unsafe { pack::<E, Plain>(&weights, NR, k, false, &mut panel) };
        let pointers: [*const E; NR] = std::array::from_fn(|r| weights[r * k..].as_ptr());
        let mut again = vec![E::default(); panel.len()];
        // SAFETY: whole rows of k, and a panel of k.
        unsafe { K::pack_rows(&pointers, k, again.as_mut_ptr()) };
        assert_eq!(panel, again);
        let width = k.min(NR);
        let (mut plain, mut fast) = (vec![E::default(); NR * NR], vec![E::default(); NR * NR]);
        // SAFETY: rows of k, at least width; panels of NR rows.
        unsafe {
            Plain::pack_columns(&pointers, width, plain.as_mut_ptr());
            K::pack_columns(&pointers, width, fast.as_mut_ptr());
        }
        for (at, (plain, fast)) in plain.iter().zip(&fast).enumerate() {
            assert!(at / E::PAIR % NR >= width || plain == fast, "element {at}");
        }
        let rows = rows.min(K::ROWS);
        let a: Vec<E> = numbers(rows * (k + 3), !seed);
        let mut out = [[f32::NAN; NR]; MAX_ROWS];
        // SAFETY: rows of k + 3 elements, a panel of k.
        unsafe { K::tile(a.as_ptr(), k + 3, rows, panel.as_ptr(), k, &mut out) };
        for (r, row) in out.iter().enumerate().take(rows) {
            for (column, &found) in row.iter().enumerate() {
                let exact: f64 = (0..k)
                    .map(|i| {
                        f64::from(a[r * (k + 3) + i].to_f32())
                            * f64::from(weights[column * k + i].to_f32())
                    })
                    .sum();
                assert!(
                    (f64::from(found) - exact).abs() < 1e-5 * (k as f64).sqrt(),
                    "{found} {exact}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn tiles_are_products(k in 1usize..100, rows in 1usize..=MAX_ROWS, seed: u32) {
            check::<f32, Plain>(k, rows, seed);
            check::<Bf16, Plain>(2 * k, rows, seed);
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx512bw") {
                    check::<f32, Avx512>(k, rows, seed);
                }
                if is_x86_feature_detected!("avx512bf16") {
                    check::<Bf16, Avx512Bf16>(2 * k, rows, seed);
                }
            }
        }
    }
}
