//! Runs a check with every kernel and every kind of dot product that this processor supports.

use std::fmt::Debug;

use super::plain::{Plain, Portable};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16, avxvnni};
use crate::dots::Dots;
use crate::element::{Bf16, Element};
#[cfg(target_arch = "x86_64")]
use crate::processor;
use crate::tile::Kernel;

/// A property that must hold for every kernel.
pub(crate) trait Check {
    /// Checks the property with a kernel.
    fn kernel<E: Element + Debug + PartialEq, K: Kernel<E>>(&self);
}

/// Checks every kernel.
pub(crate) fn kernels(check: &impl Check) {
    check.kernel::<f32, Plain>();
    check.kernel::<Bf16, Plain>();
    #[cfg(target_arch = "x86_64")]
    {
        if processor::has_avx2() {
            check.kernel::<f32, avx2::Avx2>();
            check.kernel::<Bf16, avx2::Avx2>();
        }
        if processor::has_avx512() {
            check.kernel::<f32, avx512::Avx512>();
            check.kernel::<Bf16, avx512::Avx512Wide>();
        }
        if processor::has_avx512_bf16() {
            check.kernel::<Bf16, avx512_bf16::Avx512Bf16>();
        }
        if processor::has_amx() {
            check.kernel::<Bf16, amx::AmxBf16>();
        }
    }
}

/// As [`kernels`], and also with emulated tiles if the processor has the other features that they
/// require.
pub(crate) fn kernels_and_emulated(check: &impl Check) {
    kernels(check);
    #[cfg(target_arch = "x86_64")]
    if processor::has_avx512_bf16() {
        check.kernel::<Bf16, amx::AmxBf16<amx::unit::Emulated>>();
    }
}

/// A property that must hold for all implementations of dot products of codes.
pub(crate) trait CheckDots {
    /// Checks the property with `D`, whose floats have the same bits as those of `Like`.
    fn dots<D: Dots, Like: Dots>(&self);
}

/// Checks every kind of dot product, including emulated tiles.
pub(crate) fn dots(check: &impl CheckDots) {
    check.dots::<Portable, Portable>();
    #[cfg(target_arch = "x86_64")]
    {
        use amx::AmxDots;
        use amx::unit::Emulated;
        use avx2::codes::Avx2Dots;
        use avx512::vnni::Vnni;

        if processor::has_avx2() {
            check.dots::<Avx2Dots, Avx2Dots>();
        }
        if processor::has_avx_vnni() {
            check.dots::<avxvnni::AvxVnni, Avx2Dots>();
        }
        if processor::has_avx512_vnni() {
            check.dots::<Vnni, Avx2Dots>();
            check.dots::<AmxDots<Emulated>, Vnni>();
        }
        if processor::has_amx() {
            check.dots::<AmxDots, Vnni>();
        }
    }
}
