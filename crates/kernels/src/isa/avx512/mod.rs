//! [`Kernel`](crate::tile::Kernel) with AVX-512: for `f32`, and for bfloat16 multiplied as `f32`.

pub(super) mod dot;
pub(super) mod kernel;
pub(super) mod sums;
pub(super) mod transpose;
pub(super) mod vector;
pub(crate) mod vnni;
mod wide;

use self::kernel::kernel;
use crate::element::Bf16;

/// The `f32` kernel with AVX-512.
pub(crate) struct Avx512;
/// The bfloat16 kernel with AVX-512's multiply-add of `f32`.
pub(crate) struct Avx512Wide;

kernel!(Avx512: f32 as f32, "avx512f,avx512bw,avx512dq,avx512vl", dot);
kernel!(Avx512Wide: Bf16 as f32, "avx512f,avx512bw,avx512dq,avx512vl", wide);
