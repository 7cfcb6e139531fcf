//! The processor's AMX tiles. Stable Rust has no intrinsics for these instructions, so they are
//! written in assembly. The compiler does not use tiles itself, so their content survives from one
//! asm block to the next.

use std::arch::asm;
use std::cell::Cell;

use super::unit::{Shape, Tiles};

/// The tiles of this processor.
pub(crate) struct Hardware;

thread_local! {
    /// The current shape of the thread's tiles.
    static SHAPE: Cell<Shape> = const { Cell::new(Shape::NONE) };
}

/// The operand of `LDTILECFG`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// A thread's use of the tiles. An earlier user may have left them with another shape. Dropping the
/// `Turn` releases the tiles, so that the operating system no longer has to save them.
pub(crate) struct Turn(());

impl Turn {
    /// Begins a use of the tiles, which have no shape yet.
    ///
    /// # Safety
    /// The processor must have tiles.
    pub(crate) unsafe fn begin() -> Self {
        SHAPE.set(Shape::NONE);
        Self(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        SHAPE.set(Shape::NONE);
        // SAFETY: the processor has tiles, as `begin` requires.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

// SAFETY: callers have checked that the processor has tiles and Linux permits their use.
unsafe impl Tiles for Hardware {
    #[inline(always)]
    unsafe fn shape(shape: Shape) {
        if SHAPE.get() == shape {
            return;
        }
        SHAPE.set(shape);
        let mut config =
            Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            config.bytes[tile] = u16::from(shape.bytes[tile]);
            config.rows[tile] = shape.rows[tile];
        }
        // SAFETY: the operand is a whole configuration.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                config = in(reg) &raw const config,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn zero<const T: usize>() {
        // SAFETY: the caller upholds the contract, here and below.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(from: *const u8, pitch: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{from} + {pitch}]",
                t = const T,
                from = in(reg) from,
                pitch = in(reg) pitch,
                options(nostack, readonly, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(to: *mut u8, pitch: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            asm!(
                "tilestored [{to} + {pitch}], tmm{t}",
                t = const T,
                to = in(reg) to,
                pitch = in(reg) pitch,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn pairs<const C: usize, const A: usize, const B: usize>() {
        // SAFETY: the caller upholds the contract.
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, nomem, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn quads<const C: usize, const A: usize, const B: usize>() {
        // SAFETY: the caller upholds the contract.
        unsafe {
            asm!(
                "tdpbsud tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, nomem, preserves_flags)
            );
        }
    }
}
