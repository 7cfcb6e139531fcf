//! The innermost loop of quantised products: dot products of bytes, for each kind of processor.

use crate::codes::{Codes, Format, SHARED};
use crate::tile::{NR, Tile};

/// Inner positions that lie together: as many bytes as one dot-product instruction takes.
pub(crate) const QUAD: usize = 4;
/// Bytes of a quad of a panel. 8-bit codes are stored one output after the other. With 4-bit codes,
/// a byte's low half belongs to an output of the panel's first half, its high half to an output of
/// the second.
pub(crate) const fn quad_bytes(format: Format) -> usize {
    if format.is_narrow() { NR * QUAD / 2 } else { NR * QUAD }
}

/// A processor's way of computing with codes. All give the same integers. Their floats are added up
/// in the same order, but rounded once or twice per term.
///
/// # Safety
/// Implementations may use instructions that not every processor has: their methods may be called
/// only where those were detected.
pub(crate) unsafe trait Dots: 'static {
    /// Rows that a tile may have.
    fn rows(format: Format) -> usize;

    /// `out[r] = rows[row + r] · panel` for `r < count`, `which` being `(row, count)`. The bytes
    /// `ahead` of those read will be read soon; 0: no more will be.
    ///
    /// # Safety
    /// `rows` has the rows, of `k` positions and with scales as `format` shares them; `panel` is a
    /// panel of that format; `1 <= count <= Self::rows(format)`.
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

/// Bytes of the scales that follow the codes of a panel's block, and its least values where it has
/// them.
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
