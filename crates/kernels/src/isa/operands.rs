//! The operands of a tile of codes, as the x86 loops take them.

use crate::codes::{Codes, Format};

/// A panel, and the rows of a tile, given by the addresses of the first row.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) codes: *const i8,
    pub(super) scales: *const f32,
    pub(super) sums: *const i32,
    pub(super) panel: *const u8,
    pub(super) k: usize,
    pub(super) ahead: usize,
}

impl Operands {
    /// Returns the operands for a tile whose first row is row `row` of `rows`. Rows have `k`
    /// positions.
    ///
    /// # Safety
    /// Row `row` must exist in `rows`.
    #[inline(always)]
    pub(super) unsafe fn new(
        format: Format,
        rows: &Codes,
        row: usize,
        (panel, ahead): (*const u8, usize),
        k: usize,
    ) -> Self {
        let first = row * (k / format.shared(k));
        // SAFETY: the caller upholds the contract.
        unsafe {
            Self {
                codes: rows.codes.add(row * k),
                scales: rows.scales.add(first),
                sums: rows.sums.add(first),
                panel,
                k,
                ahead,
            }
        }
    }
}

/// Formats as numbers, so that they can be const parameters of functions.
pub(super) const INT8: u32 = 0;
pub(super) const Q8_0: u32 = 1;
pub(super) const Q4_0: u32 = 2;
pub(super) const Q4_1: u32 = 3;
pub(super) const MXFP4: u32 = 4;
pub(super) const IQ4_NL: u32 = 5;

pub(super) const fn format(number: u32) -> Format {
    match number {
        INT8 => Format::Int8,
        Q8_0 => Format::Q8_0,
        Q4_0 => Format::Q4_0,
        Q4_1 => Format::Q4_1,
        MXFP4 => Format::Mxfp4,
        _ => Format::Iq4Nl,
    }
}
