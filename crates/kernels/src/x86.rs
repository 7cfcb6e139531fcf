//! [`Kernel`] with AVX-512, and (`avx2`) with the instructions of most processors.

mod amx;
mod avx2;
mod dot;
mod sums;
mod wide;

use std::arch::x86_64::*;
use std::sync::OnceLock;

use crate::element::{Bf16, Element};
use crate::tile::{Ahead, GROUP, GROUPS, Kernel, LANES, MAX_ROWS, Outputs, Scores};
use crate::vector::Vector;

#[cfg(test)]
pub(crate) use amx::Emulated;
pub(crate) use amx::{AmxBf16, AmxDots, Hardware};
#[cfg(test)]
pub(crate) use avx2::Ymms;
pub(crate) use avx2::{Avx2, Avx2Dots, AvxVnni};

/// `f32` with AVX-512.
pub(crate) struct Avx512;
/// bfloat16 with AVX-512's dot products of pairs.
pub(crate) struct Avx512Bf16;
/// bfloat16 with AVX-512's multiply-add of `f32`.
pub(crate) struct Avx512Wide;

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
        // Results that are no normal numbers take a processor hundreds of cycles.
        unsafe {
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(n.0, _mm512_set1_ps(-126.0));
            Self(_mm512_maskz_scalef_ps(normal, self.0, n.0))
        }
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

/// Queries up to which four groups of keys, or vectors of a head, have room in registers at a time;
/// of more there are two.
const FEW_QUERIES: usize = 6;

/// Calls the function for as many rows, the last one if there are more; `$second` is its second
/// constant.
macro_rules! dispatch {
    ($rows:expr, $function:ident $arguments:tt, $second:tt, $($few:literal)* | $most:literal) => {
        match $rows {
            $($few => $function::<$few, $second> $arguments,)*
            _ => $function::<$most, $second> $arguments,
        }
    };
}

/// Implements [`Kernel`] with the loops of a module, compiled for `$features`. Each number of rows
/// is a function of its own: inlined, all of them would be copied to every product.
macro_rules! kernel {
    ($name:ident: $element:ty as $number:ty, $features:literal, $loops:ident) => {
        const _: () = {
            #[target_feature(enable = $features)]
            unsafe fn tiles<const M: usize, const LINES: usize>(
                numbers: *const $number,
                panel: *const $element,
                k: usize,
                ahead: *const $element,
                more: bool,
                out: *mut Outputs,
            ) {
                // SAFETY: the caller's contract, here and below.
                unsafe { $loops::tile::<$element, M, LINES>(numbers, panel, k, ahead, more, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn arranged(
                a: *const $element,
                rows: usize,
                k: usize,
                numbers: *mut $number,
            ) {
                if rows == 1 {
                    // In order already.
                    return unsafe { $loops::copy(a, k, numbers) };
                }
                let count = k / <$element as Element>::PAIR;
                for first in (0..count).step_by(LANES) {
                    let width = (count - first).min(LANES);
                    let block = unsafe { columns(a.cast(), (rows, count), first) };
                    for (d, &column) in block.iter().enumerate().take(width) {
                        let at = (first + d) * rows * <$element as Element>::PAIR;
                        unsafe { $loops::put::<$element>(column, rows, numbers.add(at)) };
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn scored<const M: usize, const G: usize>(
                queries: *const $number,
                keys: &[*const $element; G],
                ahead: &[*const $element; G],
                dim: usize,
                out: *mut f32,
            ) {
                unsafe { $loops::scores::<$element, M, G>(queries, keys, ahead, dim, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn mixed<const M: usize, const C: usize>(
                weights: *const $number,
                values: &[*const $element],
                ahead: &[*const $element; GROUPS],
                columns: (usize, usize),
                decay: &[f32; MAX_ROWS],
                out: *mut f32,
            ) {
                unsafe { $loops::mix::<$element, M, C>(weights, values, ahead, columns, decay, out) }
            }

            // SAFETY: callers detect the features.
            unsafe impl Kernel<$element> for $name {
                const ROWS: usize = 12;
                type Vector = Zmm;
                type Number = $number;

                #[inline(always)]
                unsafe fn arrange(
                    a: *const $element,
                    rows: usize,
                    k: usize,
                    numbers: *mut $number,
                ) {
                    unsafe { arranged(a, rows, k, numbers) }
                }

                #[inline(always)]
                unsafe fn tile(
                    numbers: *const $number,
                    rows: usize,
                    panel: *const $element,
                    k: usize,
                    ahead: Ahead<$element>,
                    more: bool,
                    out: *mut Outputs,
                ) {
                    unsafe {
                        match ahead {
                            Ahead::Nothing => {
                                let ahead = panel;
                                dispatch!(rows, tiles(numbers, panel, k, ahead, more, out), 0,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                            Ahead::Half(ahead) => {
                                dispatch!(rows, tiles(numbers, panel, k, ahead, more, out), 1,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                            Ahead::Whole(ahead) => {
                                dispatch!(rows, tiles(numbers, panel, k, ahead, more, out), 2,
                                                    1 2 3 4 5 6 7 8 9 10 11 | 12)
                            }
                        }
                    }
                }

                #[inline(always)]
                unsafe fn scores(
                    queries: *const $number,
                    rows: usize,
                    keys: &[*const $element; GROUPS],
                    ahead: &[*const $element; GROUPS],
                    dim: usize,
                    out: &mut Scores,
                ) {
                    let out = out.as_flattened_mut().as_mut_ptr();
                    unsafe {
                        if rows <= FEW_QUERIES {
                            dispatch!(rows, scored(queries, keys, ahead, dim, out), GROUPS, 1 2 3 4 5 | 6);
                            return;
                        }
                        let ahead = ahead.as_chunks::<2>().0;
                        for (half, (keys, ahead)) in keys.as_chunks::<2>().0.iter().zip(ahead).enumerate() {
                            let out = out.add(half * 2 * GROUP);
                            dispatch!(rows, scored(queries, keys, ahead, dim, out), 2, 7 8 9 10 11 | 12);
                        }
                    }
                }

                #[inline(always)]
                unsafe fn mix(
                    weights: *const $number,
                    rows: usize,
                    values: &[*const $element],
                    ahead: &[*const $element; GROUPS],
                    dim: usize,
                    decay: &[f32; MAX_ROWS],
                    out: *mut f32,
                ) {
                    let width = if rows <= FEW_QUERIES { 4 * LANES } else { 2 * LANES };
                    let wide = dim / width * width;
                    unsafe {
                        for column in (0..wide).step_by(width) {
                            if rows <= FEW_QUERIES {
                                dispatch!(rows, mixed(weights, values, ahead, (dim, column), decay, out), 4,
                                                                                1 2 3 4 5 | 6);
                            } else {
                                dispatch!(rows, mixed(weights, values, ahead, (dim, column), decay, out), 2,
                                                                            7 8 9 10 11 | 12);
                            }
                        }
                        for column in (wide..dim).step_by(LANES) {
                            dispatch!(rows, mixed(weights, values, ahead, (dim, column), decay, out), 1,
                                                                1 2 3 4 5 6 7 8 9 10 11 | 12);
                        }
                    }
                }

                #[inline(always)]
                unsafe fn number(values: Zmm, to: *mut $number) {
                    unsafe { $loops::number::<$element>(values.0, to) }
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
                    unsafe { $loops::store(values.0, to) }
                }

                #[inline(always)]
                fn prefetch(address: *const $element) {
                    sums::ask(address);
                }
            }
        };
    };
}

kernel!(Avx512: f32 as f32, "avx512f,avx512bw,avx512dq,avx512vl", dot);
kernel!(Avx512Bf16: Bf16 as Bf16, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", dot);
kernel!(Avx512Wide: Bf16 as f32, "avx512f,avx512bw,avx512dq,avx512vl", wide);

/// True if the processor has AVX2 and the features that are used beside it; some processors have
/// AVX2 alone.
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// True if the processor has dot products of bytes beside AVX2, of 256 bits.
pub(crate) fn has_avx_vnni() -> bool {
    has_avx2() && is_x86_feature_detected!("avxvnni")
}

/// True if the processor's dot products of bfloat16 pairs are worth their while. Intel's are there
/// for compatibility: they take two cycles, and two multiply-adds of as many `f32` take one.
/// Intel's fast instructions are its matrix extensions. AMD's are twice as fast as multiply-adds.
pub(crate) fn pairs_are_fast() -> bool {
    static FAST: OnceLock<bool> = OnceLock::new();
    // Asking makes a virtual machine's host answer, which takes its time.
    *FAST.get_or_init(|| __cpuid(0).ebx.to_le_bytes() != *b"Genu")
}

/// `panel[d * pitch + r] = rows[r][d]` for dwords, `d < count`.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transpose_rows(rows: &[*const i32; LANES], count: usize, panel: *mut i32, pitch: usize) {
    for first in (0..count).step_by(LANES) {
        let width = (count - first).min(LANES);
        // SAFETY: only the `width` dwords that are left of each row are read.
        let block = unsafe { transposed(rows, first, width) };
        for (d, vector) in block.iter().enumerate().take(width) {
            // SAFETY: inside the panel: first + d < count.
            unsafe { _mm512_storeu_si512(panel.add((first + d) * pitch).cast(), *vector) };
        }
    }
}

/// The columns `first ..` of a matrix of dwords `[rows, count]`, as many as there are of [`LANES`].
///
/// # Safety
/// `a` is such a matrix of at most [`LANES`] rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn columns(a: *const i32, (rows, count): (usize, usize), first: usize) -> [__m512i; LANES] {
    // The last row stands for those that are not there.
    let mut each = [a.wrapping_add((rows - 1) * count); LANES];
    for (r, row) in each.iter_mut().enumerate().take(rows) {
        *row = a.wrapping_add(r * count);
    }
    // SAFETY: inside the rows.
    unsafe { transposed(&each, first, (count - first).min(LANES)) }
}

/// The `width` dwords of each row from `first` on, column by column.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn transposed(rows: &[*const i32; LANES], first: usize, width: usize) -> [__m512i; LANES] {
    let mask = ((1u32 << width) - 1) as u16;
    let mut block = [_mm512_setzero_si512(); LANES];
    for (vector, row) in block.iter_mut().zip(rows) {
        // SAFETY: only what the mask names is read.
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
