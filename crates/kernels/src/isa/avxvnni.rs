//! [`Dots`](crate::dots::Dots) with 256 bits, for processors with byte dot products but without
//! AVX-512 (AVX-VNNI).

use std::arch::x86_64::*;

use super::avx2::bytes::{Bytes, Quads, Sums, load};
use super::avx2::dots::dots;
use super::operands::format;
use crate::dots::quad_bytes;

/// Products of codes with AVX-VNNI.
pub(crate) struct AvxVnni;

impl Bytes for AvxVnni {
    #[inline(always)]
    unsafe fn add<const FORMAT: u32, const M: usize>(
        rows: Quads,
        count: usize,
        from: *const u8,
        ahead: usize,
        dots: &mut Sums<M>,
    ) {
        // SAFETY: the caller upholds the contract; prefetching an invalid address has no effect.
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

dots!(AvxVnni, "avx2,fma,f16c,avxvnni");
