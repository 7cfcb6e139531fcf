//! [`Kernel`](crate::tile::Kernel) with AVX-512: of `f32`, and of bfloat16 multiplied as such.

pub(super) mod dot;
pub(super) mod kernel;
pub(super) mod sums;
pub(super) mod transpose;
pub(super) mod vector;
pub(crate) mod vnni;
mod wide;

use self::kernel::kernel;
use crate::element::Bf16;

/// `f32` with AVX-512.
pub(crate) struct Avx512;
/// bfloat16 with AVX-512's multiply-add of `f32`.
pub(crate) struct Avx512Wide;

kernel!(Avx512: f32 as f32, "avx512f,avx512bw,avx512dq,avx512vl", dot);
kernel!(Avx512Wide: Bf16 as f32, "avx512f,avx512bw,avx512dq,avx512vl", wide);
