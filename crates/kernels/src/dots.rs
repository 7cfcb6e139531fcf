//! The innermost loop of quantised products: dot products of bytes, for each kind of processor.

use crate::codes::{Codes, Format, SHARED, half_to_f32};
use crate::pack::NR;
use crate::quantise::panel_bytes;
use crate::tile::Tile;

#[cfg(target_arch = "x86_64")]
pub(crate) use crate::vnni::Vnni;
#[cfg(target_arch = "x86_64")]
pub(crate) use crate::x86::{Avx2Dots, AvxVnni};

/// Inner positions that lie together: as many bytes as one of a processor's dot products takes.
pub(crate) const QUAD: usize = 4;
/// Bytes of a quad of a panel. 8-bit codes stand one after the other for each output. Of 4-bit
/// codes, a byte's low half belongs to an output of the first half of the panel, its high half to
/// one of the second.
pub(crate) const fn quad_bytes(format: Format) -> usize {
    if format.is_narrow() { NR * QUAD / 2 } else { NR * QUAD }
}

/// A processor's way of computing with codes. All give the same integers; floats of these are added
/// up in the same order, rounded once or twice a term.
///
/// # Safety
/// Implementations may use instructions that not every processor has: their methods may be called
/// only where those were detected.
pub(crate) unsafe trait Dots: 'static {
    /// Rows that a tile may have.
    fn rows(format: Format) -> usize;

    /// `out[r] = rows[row + r] · panel` for `r < count`, `which` being `(row, count)`. `ahead`
    /// bytes after what is read will soon be read too; 0: will not.
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

/// Plain loops.
pub(crate) struct Portable;

// SAFETY: no special instructions.
unsafe impl Dots for Portable {
    fn rows(_: Format) -> usize {
        4
    }

    #[inline(always)]
    unsafe fn tile(
        format: Format,
        rows: &Codes,
        (row, count): (usize, usize),
        panel: *const u8,
        k: usize,
        _: usize,
        out: &mut Tile,
    ) {
        let shared = format.shared(k);
        // SAFETY: the rows and the panel, by the contract.
        let panel = unsafe { std::slice::from_raw_parts(panel, panel_bytes(format, k)) };
        let blocks = k / shared;
        for (sums, row) in out.iter_mut().zip(row..row + count) {
            *sums = [0.0; NR];
            for (index, block) in panel.chunks_exact(panel.len() / blocks).enumerate() {
                // SAFETY: as above.
                let (codes, scale, sum) = unsafe {
                    let at = row * blocks + index;
                    let codes = std::slice::from_raw_parts(rows.codes.add(at * shared), shared);
                    (codes, *rows.scales.add(at), *rows.sums.add(at))
                };
                let (weights, rest) = block.split_at(shared / QUAD * quad_bytes(format));
                let mut dots = [sum.wrapping_mul(-format.offset()); NR];
                for (x, weights) in
                    codes.chunks_exact(QUAD).zip(weights.chunks_exact(quad_bytes(format)))
                {
                    let x: [i32; QUAD] = std::array::from_fn(|i| i32::from(x[i]));
                    for (output, dot) in dots.iter_mut().enumerate() {
                        let (from, shift) = match format.is_narrow() {
                            true => (output % (NR / 2), output / (NR / 2) * 4),
                            false => (output, 0),
                        };
                        let mask = if format.is_narrow() { 15 } else { 255 };
                        for (i, x) in x.iter().enumerate() {
                            let weight = weights[from * QUAD + i] >> shift & mask;
                            *dot = dot.wrapping_add(x * i32::from(weight));
                        }
                    }
                }
                for (output, total) in sums.iter_mut().enumerate() {
                    let half = |index: usize| {
                        half_to_f32(u16::from_le_bytes([rest[2 * index], rest[2 * index + 1]]))
                    };
                    let dot = dots[output] as f32;
                    if format == Format::Int8 {
                        let at = output * size_of::<f32>();
                        let own = f32::from_le_bytes([
                            rest[at],
                            rest[at + 1],
                            rest[at + 2],
                            rest[at + 3],
                        ]);
                        *total = dot * (own * scale);
                        continue;
                    }
                    *total += dot * (half(output) * scale);
                    if format == Format::Q4_1 {
                        *total += half(NR + output) * (sum as f32 * scale);
                    }
                }
            }
        }
    }
}

/// Bytes of the scales that follow the codes of a panel's block, and its least values where it has
/// them.
pub(crate) const fn scale_bytes(format: Format) -> usize {
    match format {
        Format::Int8 => NR * size_of::<f32>(),
        Format::Q8_0 | Format::Q4_0 => NR * size_of::<u16>(),
        Format::Q4_1 => 2 * NR * size_of::<u16>(),
    }
}

const _: () = assert!(SHARED.is_multiple_of(QUAD));

#[cfg(test)]
mod tests;
