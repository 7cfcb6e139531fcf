//! [`Kernel`] with AVX-512.

use std::arch::x86_64::*;

use crate::element::{Bf16, Element};
use crate::pack::NR;
use crate::tile::{Ahead, BLOCK, GROUP, GROUPS, Kernel, LANES, QUERIES, Scores, Tile};
use crate::vector::Vector;

/// `f32` with AVX-512.
pub(crate) struct Avx512;
/// bfloat16 with AVX-512's dot products of pairs.
pub(crate) struct Avx512Bf16;

/// Elements as the loops want them: [`LANES`] dwords in a vector, a dword being a group of `PAIR` elements.
trait Dot: Element {
    /// # Safety
    /// `at` can be read for [`LANES`] dwords; the processor has the instructions (here and below).
    #[inline(always)]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: the contract; loads may be unaligned.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }

    /// One dword in every lane.
    ///
    /// # Safety
    /// `at` can be read for a dword.
    #[inline(always)]
    unsafe fn splat(at: *const Self) -> __m512 {
        // SAFETY: the contract.
        unsafe { _mm512_set1_ps(at.cast::<f32>().read_unaligned()) }
    }

    /// `sum + a · b`, dword by dword.
    unsafe fn dot(sum: __m512, a: __m512, b: __m512) -> __m512;

    /// # Safety
    /// `to` can be written for [`LANES`] elements.
    unsafe fn store(values: __m512, to: *mut Self);
}

impl Dot for f32 {
    #[inline(always)]
    unsafe fn dot(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the processor has it.
        unsafe { _mm512_fmadd_ps(a, b, sum) }
    }

    #[inline(always)]
    unsafe fn store(values: __m512, to: *mut Self) {
        // SAFETY: the contract.
        unsafe { _mm512_storeu_ps(to, values) }
    }
}

impl Dot for Bf16 {
    #[inline(always)]
    unsafe fn dot(sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the processor has it; the same bits as another type.
        unsafe {
            let a = std::mem::transmute::<__m512, __m512bh>(a);
            _mm512_dpbf16_ps(sum, a, std::mem::transmute::<__m512, __m512bh>(b))
        }
    }

    #[inline(always)]
    unsafe fn store(values: __m512, to: *mut Self) {
        // SAFETY: the contract; the same bits as another type.
        unsafe {
            let narrow = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
            _mm256_storeu_si256(to.cast(), narrow);
        }
    }
}

/// A whole vector.
#[derive(Clone, Copy)]
pub(crate) struct Zmm(__m512);

/// Folds by halves.
macro_rules! fold {
    ($vector:expr, $work:ident) => {{
        let v = $vector;
        let v = $work(v, _mm512_shuffle_f32x4::<0x4e>(v, v));
        let v = $work(v, _mm512_shuffle_f32x4::<0xb1>(v, v));
        let v = $work(v, _mm512_shuffle_ps::<0x4e>(v, v));
        _mm512_cvtss_f32($work(v, _mm512_shuffle_ps::<0xb1>(v, v)))
    }};
}

// SAFETY (of every block): a vector is used only where the processor has the instructions.
impl Vector for Zmm {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn fused(self, factor: Self, term: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, term.0) })
    }
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    // Of a number and what is not one, these instructions give the second.
    #[inline(always)]
    fn at_least(self, bound: f32) -> Self {
        Self(unsafe { _mm512_max_ps(_mm512_set1_ps(bound), self.0) })
    }
    #[inline(always)]
    fn at_most(self, bound: f32) -> Self {
        Self(unsafe { _mm512_min_ps(_mm512_set1_ps(bound), self.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(unsafe { _mm512_roundscale_ps::<0>(self.0) })
    }
    #[inline(always)]
    fn times_power(self, n: Self) -> Self {
        Self(unsafe { _mm512_scalef_ps(self.0, n.0) })
    }
    #[inline(always)]
    fn only(self, count: usize) -> Self {
        let mask = ((1u32 << count) - 1) as u16;
        Self(unsafe { _mm512_mask_blend_ps(mask, _mm512_set1_ps(f32::NEG_INFINITY), self.0) })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe { fold!(self.0, _mm512_add_ps) }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { fold!(self.0, _mm512_max_ps) }
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        // Infinities, and what is not a number, quiet or signalling.
        unsafe { _mm512_fpclass_ps_mask::<0x99>(self.0) == 0 }
    }
    #[inline(always)]
    unsafe fn store_codes(self, to: *mut i8) {
        unsafe {
            let codes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self.0));
            _mm_storeu_si128(to.cast(), codes);
        }
    }
}

/// `M` rows times a panel: two vectors of outputs a row.
#[inline(always)]
unsafe fn tile<E: Dot, const M: usize, const LINES: usize>(
    a: *const E,
    stride: usize,
    panel: *const E,
    k: usize,
    ahead: *const E,
    out: &mut Tile,
) {
    // SAFETY: inside the panel and the rows, by the contract of `Kernel::tile`; a prefetch of a wrong address does nothing.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        for group in 0..k / E::PAIR {
            let at = group * NR * E::PAIR;
            let left = E::load(panel.add(at));
            let right = E::load(panel.add(at + LANES * E::PAIR));
            if LINES == 1 {
                // Half as much as is read here, for later: not into the cache where it would be in the way.
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(at / 2).cast());
            } else if LINES == 2 {
                let ahead = ahead.wrapping_add(at);
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(LANES * E::PAIR).cast());
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = E::splat(a.add(r * stride + group * E::PAIR));
                sums[0] = E::dot(sums[0], x, left);
                sums[1] = E::dot(sums[1], x, right);
            }
        }
        for (sums, row) in sums.iter().zip(out) {
            _mm512_storeu_ps(row.as_mut_ptr(), sums[0]);
            _mm512_storeu_ps(row.as_mut_ptr().add(LANES), sums[1]);
        }
    }
}

#[inline(always)]
unsafe fn scores<E: Dot, const M: usize, const G: usize>(
    queries: *const E,
    keys: &[*const E; G],
    dim: usize,
    out: &mut Scores,
) {
    // SAFETY: inside the queries and the groups, by the contract of `Kernel::scores`.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); G]; M];
        for pair in 0..dim / E::PAIR {
            let mut group = [_mm512_setzero_ps(); G];
            for (group, keys) in group.iter_mut().zip(keys) {
                *group = E::load(keys.add(pair * GROUP * E::PAIR));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = E::splat(queries.add(r * dim + pair * E::PAIR));
                for (sum, group) in sums.iter_mut().zip(&group) {
                    *sum = E::dot(*sum, x, *group);
                }
            }
        }
        for (sums, row) in sums.iter().zip(out) {
            for (group, &sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(row.as_mut_ptr().add(group * GROUP), sum);
            }
        }
    }
}

/// `C` vectors of the output's columns, from `column` on.
#[inline(always)]
unsafe fn mix<E: Dot, const M: usize, const C: usize>(
    weights: *const E,
    values: &[*const E],
    (dim, column): (usize, usize),
    decay: &[f32; QUERIES],
    out: *mut f32,
) {
    // SAFETY: inside the weights, the groups and the output, by the contract of `Kernel::mix`.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); C]; M];
        for (r, sums) in sums.iter_mut().enumerate() {
            let decay = _mm512_set1_ps(decay[r]);
            for (c, sum) in sums.iter_mut().enumerate() {
                let before = _mm512_loadu_ps(out.add(r * dim + column + c * LANES));
                *sum = _mm512_mul_ps(before, decay);
            }
        }
        for (group, values) in values.iter().enumerate() {
            for pair in 0..GROUP / E::PAIR {
                let row = values.add((pair * dim + column) * E::PAIR);
                let mut columns = [_mm512_setzero_ps(); C];
                for (c, columns) in columns.iter_mut().enumerate() {
                    *columns = E::load(row.add(c * LANES * E::PAIR));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let at = r * BLOCK + group * GROUP + pair * E::PAIR;
                    let x = E::splat(weights.add(at));
                    for (sum, columns) in sums.iter_mut().zip(&columns) {
                        *sum = E::dot(*sum, x, *columns);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, &sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(out.add(r * dim + column + c * LANES), sum);
            }
        }
    }
}

/// Calls the function for as many rows, the last one if there are more; `$second` is its second constant.
macro_rules! dispatch {
    ($rows:expr, $function:ident $arguments:tt, $second:tt, $($few:literal)* | $most:literal) => {
        match $rows {
            $($few => $function::<$few, $second> $arguments,)*
            _ => $function::<$most, $second> $arguments,
        }
    };
}

/// Implements [`Kernel`] with the loops above, compiled for `$features`. Each number of rows is a function of its own: inlined, all of them
/// would be copied to every product.
macro_rules! kernel {
    ($name:ident: $element:ty, $features:literal) => {
        const _: () = {
            #[target_feature(enable = $features)]
            unsafe fn tiles<const M: usize, const LINES: usize>(
                a: *const $element,
                stride: usize,
                panel: *const $element,
                k: usize,
                ahead: *const $element,
                out: &mut Tile,
            ) {
                // SAFETY: the caller's contract, here and below.
                unsafe { tile::<$element, M, LINES>(a, stride, panel, k, ahead, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn scored<const M: usize, const G: usize>(
                queries: *const $element,
                keys: &[*const $element; G],
                dim: usize,
                out: &mut Scores,
            ) {
                unsafe { scores::<$element, M, G>(queries, keys, dim, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn mixed<const M: usize, const C: usize>(
                weights: *const $element,
                values: &[*const $element],
                columns: (usize, usize),
                decay: &[f32; QUERIES],
                out: *mut f32,
            ) {
                unsafe { mix::<$element, M, C>(weights, values, columns, decay, out) }
            }

            // SAFETY: callers detect the features.
            unsafe impl Kernel<$element> for $name {
                const ROWS: usize = 12;
                type Vector = Zmm;

                #[inline(always)]
                unsafe fn tile(
                    a: *const $element,
                    stride: usize,
                    rows: usize,
                    panel: *const $element,
                    k: usize,
                    ahead: Ahead<$element>,
                    out: &mut Tile,
                ) {
                    unsafe {
                        match ahead {
                            Ahead::Nothing => {
                                let ahead = a;
                                dispatch!(rows, tiles(a, stride, panel, k, ahead, out), 0,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                            Ahead::Half(ahead) => {
                                dispatch!(rows, tiles(a, stride, panel, k, ahead, out), 1,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                            Ahead::Whole(ahead) => {
                                dispatch!(rows, tiles(a, stride, panel, k, ahead, out), 2,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                        }
                    }
                }

                #[inline(always)]
                unsafe fn scores(
                    queries: *const $element,
                    rows: usize,
                    keys: &[*const $element; GROUPS],
                    dim: usize,
                    out: &mut Scores,
                ) {
                    unsafe {
                        dispatch!(rows, scored(queries, keys, dim, out), GROUPS, 1 2 3 4 5 | 6)
                    }
                }

                #[inline(always)]
                unsafe fn mix(
                    weights: *const $element,
                    rows: usize,
                    values: &[*const $element],
                    dim: usize,
                    decay: &[f32; QUERIES],
                    out: *mut f32,
                ) {
                    const WIDE: usize = 4 * LANES;
                    let wide = dim / WIDE * WIDE;
                    unsafe {
                        for column in (0..wide).step_by(WIDE) {
                            dispatch!(rows, mixed(weights, values, (dim, column), decay, out), 4,
                                                                                1 2 3 4 5 | 6);
                        }
                        for column in (wide..dim).step_by(LANES) {
                            dispatch!(rows, mixed(weights, values, (dim, column), decay, out), 1,
                                                                                1 2 3 4 5 | 6);
                        }
                    }
                }

                #[inline(always)]
                unsafe fn pack_rows(
                    rows: &[*const $element; LANES],
                    k: usize,
                    panel: *mut $element,
                    pitch: usize,
                ) {
                    let count = k / <$element as Element>::PAIR;
                    unsafe {
                        transpose_rows(&rows.map(|row| row.cast()), count, panel.cast(), pitch)
                    }
                }

                #[inline(always)]
                unsafe fn narrow(values: Zmm, to: *mut $element) {
                    unsafe { Dot::store(values.0, to) }
                }

                #[inline(always)]
                fn prefetch(address: *const $element) {
                    // SAFETY: a prefetch of a wrong address does nothing.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
                }
            }
        };
    };
}

kernel!(Avx512: f32, "avx512f,avx512bw,avx512dq,avx512vl");
kernel!(Avx512Bf16: Bf16, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");

/// `panel[d * pitch + r] = rows[r][d]` for dwords, `d < count`.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_rows(rows: &[*const i32; LANES], count: usize, panel: *mut i32, pitch: usize) {
    for first in (0..count).step_by(LANES) {
        let width = (count - first).min(LANES);
        let mask = ((1u32 << width) - 1) as u16;
        let mut block = [_mm512_setzero_si512(); LANES];
        for (vector, row) in block.iter_mut().zip(rows) {
            // SAFETY: only what the mask names is read, and that is inside the row.
            *vector = unsafe { _mm512_maskz_loadu_epi32(mask, row.add(first)) };
        }
        transpose(&mut block);
        for (d, vector) in block.iter().enumerate().take(width) {
            // SAFETY: inside the panel: first + d < count.
            unsafe { _mm512_storeu_si512(panel.add((first + d) * pitch).cast(), *vector) };
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
