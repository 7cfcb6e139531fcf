//! The innermost loop of quantised products: byte dot products, for each kind of processor.

use crate::codes::{Codes, Format, SHARED};
use crate::tile::{NR, Tile};

/// The number of inner positions stored together: the bytes that one dot-product instruction takes.
pub(crate) const QUAD: usize = 4;
/// Bytes per quad of inner positions in a panel. 8-bit codes are stored one output after the other.
/// With 4-bit codes, a byte's low half belongs to an output of the panel's first half, its high
/// half to an output of the second half.
pub(crate) const fn quad_bytes(format: Format) -> usize {
    if format.is_narrow() { NR * QUAD / 2 } else { NR * QUAD }
}

/// The products with codes on one kind of processor. All implementations compute the same integers,
/// and add floats in the same order. Implementations with fused multiply-add round once per term,
/// the others twice.
///
/// # Safety
/// Implementations may use instructions that not every processor has. Their methods may be called
/// only where those instructions were detected.
pub(crate) unsafe trait Dots: 'static {
    /// The largest number of rows of a tile.
    fn rows(format: Format) -> usize;

    /// Sets `out[r] = rows[row + r] · panel` for `r < count`, where `which` is `(row, count)`. Also
    /// prefetches the bytes that are `ahead` bytes after those being read; 0: prefetches nothing.
    ///
    /// # Safety
    /// `rows` must contain the rows, with `k` positions each and a scale for every group of
    /// positions of the format. `panel` must be a panel of that format. `count` must be from 1 to
    /// `Self::rows(format)`.
    unsafe fn tile(
        format: Format,
        rows: &Codes,
        which: (usize, usize),
        panel: *const u8,
        k: usize,
        ahead: usize,
        out: &mut Tile,
    );
}

/// Bytes of the scales that follow the codes of a panel's block, and of its minima if the format
/// has them.
pub(crate) const fn scale_bytes(format: Format) -> usize {
    match format {
        Format::Int8 => NR * size_of::<f32>(),
        Format::Q8_0 | Format::Q4_0 | Format::Mxfp4 | Format::Iq4Nl => NR * size_of::<u16>(),
        Format::Q4_1 => 2 * NR * size_of::<u16>(),
    }
}

const _: () = assert!(SHARED.is_multiple_of(QUAD));

#[cfg(test)]
mod tests;
