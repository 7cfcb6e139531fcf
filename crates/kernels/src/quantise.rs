//! Packs quantised weights in the order in which [`crate::dots`] reads them. The panels are those
//! of [`crate::pack`], with groups of four inner positions in place of pairs. The scales of a block
//! of codes follow the codes.

#[cfg(test)]
use crate::codes::half_to_f32;
use crate::codes::{Format, LARGEST, SHARED, inverse_of};
use crate::dots::{QUAD, quad_bytes, scale_bytes};
use crate::element::Element;
use crate::pack::{padded_outputs, row_of};
use crate::tile::NR;

/// Bytes of one panel.
#[must_use]
#[inline(always)]
pub(crate) fn panel_bytes(format: Format, k: usize) -> usize {
    let shared = format.shared(k);
    k / shared * (shared / QUAD * quad_bytes(format) + scale_bytes(format))
}

/// Bytes of a packed `[n, k]` matrix; 0 if the format does not support `k`.
#[must_use]
pub(crate) fn quantised_bytes(format: Format, n: usize, k: usize, interleaved: bool) -> usize {
    if k == 0 || !k.is_multiple_of(SHARED) {
        return 0;
    }
    padded_outputs(n, interleaved).div_ceil(NR) * panel_bytes(format, k)
}

/// Bytes of a quantisation block as GGUF stores it; 0 if GGUF does not have the format.
const fn stored_bytes(format: Format) -> usize {
    match format {
        Format::Int8 => 0,
        Format::Q8_0 => 2 + SHARED,
        Format::Q4_0 | Format::Iq4Nl => 2 + SHARED / 2,
        Format::Q4_1 => 4 + SHARED / 2,
        Format::Mxfp4 => 1 + SHARED / 2,
    }
}

/// Decodes the power of 2 at the start of an `MXFP4` block, halved, as the upper 16 bits of a
/// float. The power is halved because the table of values contains doubled values.
fn half_of_power(exponent: u8) -> [u8; 2] {
    let bits = match exponent {
        0 | 1 => 0x20 << exponent,
        exponent => u16::from(exponent - 1) << 7,
    };
    bits.to_le_bytes()
}

/// Bytes of a whole `[n, k]` tensor as GGUF stores it.
pub(crate) fn stored_len(format: Format, n: usize, k: usize) -> usize {
    n * (k / SHARED) * stored_bytes(format)
}

/// Stores the code of one output at an inner position of a block.
fn put(format: Format, block: &mut [u8], (inner, output): (usize, usize), code: u8) {
    let (from, shift) = match format.is_narrow() {
        true => (output % (NR / 2), output / (NR / 2) * 4),
        false => (output, 0),
    };
    block[inner / QUAD * quad_bytes(format) + from * QUAD + inner % QUAD] |= code << shift;
}

/// Quantises and packs the row-major `source` `[n, k]`: symmetric, one scale per output, rounded to
/// the nearest code. `interleaved` as in [`crate::pack::pack`].
///
/// # Panics
/// If the lengths do not fit `n` and `k`.
pub(crate) fn quantise<E: Element>(
    source: &[E],
    n: usize,
    k: usize,
    interleaved: bool,
    packed: &mut [u8],
) {
    let format = Format::Int8;
    assert_eq!(source.len(), n * k, "a whole matrix");
    assert_eq!(
        packed.len(),
        quantised_bytes(format, n, k, interleaved),
        "room for the packed matrix"
    );
    packed.fill(0);
    for (p, panel) in packed.chunks_exact_mut(panel_bytes(format, k)).enumerate() {
        let (codes, scales) = panel.split_at_mut(k / QUAD * quad_bytes(format));
        for (output, to) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // Padding outputs keep a scale of zero.
            let Some(row) = row_of(p, output, n, interleaved) else { continue };
            let row = &source[row * k..][..k];
            let largest = row.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
            let finite = row.iter().all(|x| x.to_f32().is_finite());
            let scale = if finite { largest / LARGEST } else { f32::NAN };
            let inverse = inverse_of(largest);
            *to = scale.to_le_bytes();
            for (inner, x) in row.iter().enumerate() {
                let code = (x.to_f32() * inverse).clamp(-LARGEST, LARGEST).round_ties_even() as i32;
                put(format, codes, (inner, output), (code + format.offset()) as u8);
            }
        }
    }
}

/// Packs the rows of a GGUF tensor `[n, k]` without requantising them. `interleaved` as in
/// [`crate::pack::pack`].
///
/// # Panics
/// If the lengths do not fit `n` and `k`, or the format is not one of GGUF.
pub(crate) fn pack_blocks(
    format: Format,
    source: &[u8],
    n: usize,
    k: usize,
    interleaved: bool,
    packed: &mut [u8],
) {
    let stored = stored_bytes(format);
    assert!(stored > 0, "blocks of GGUF");
    let row_bytes = k / SHARED * stored;
    assert_eq!(source.len(), n * row_bytes, "a whole matrix");
    assert_eq!(
        packed.len(),
        quantised_bytes(format, n, k, interleaved),
        "room for the packed matrix"
    );
    packed.fill(0);
    let code_bytes = SHARED / QUAD * quad_bytes(format);
    let block_bytes = code_bytes + scale_bytes(format);
    for (p, panel) in packed.chunks_exact_mut(panel_bytes(format, k)).enumerate() {
        for output in 0..NR {
            // Padding outputs keep a scale of zero.
            let Some(row) = row_of(p, output, n, interleaved) else { continue };
            let row = &source[row * row_bytes..][..row_bytes];
            for (from, to) in row.chunks_exact(stored).zip(panel.chunks_exact_mut(block_bytes)) {
                let (to, scales) = to.split_at_mut(code_bytes);
                let (scales, least) = scales.split_at_mut(NR * size_of::<u16>());
                let at = output * size_of::<u16>();
                let (scale, codes) = match format {
                    Format::Mxfp4 => (half_of_power(from[0]), &from[1..]),
                    Format::Q4_1 => {
                        least[at..at + 2].copy_from_slice(&from[2..4]);
                        ([from[0], from[1]], &from[4..])
                    }
                    _ => ([from[0], from[1]], &from[2..]),
                };
                scales[at..at + 2].copy_from_slice(&scale);
                for inner in 0..SHARED {
                    let code = match format.is_narrow() {
                        // The first half of a block's codes is in the low nibbles of the bytes.
                        true => codes[inner % (SHARED / 2)] >> (inner / (SHARED / 2) * 4) & 15,
                        false => codes[inner] ^ 0x80,
                    };
                    put(format, to, (inner, output), code);
                }
            }
        }
    }
}

/// The weights of a block, dequantised as GGUF defines them.
#[cfg(test)]
pub(crate) fn unpacked(format: Format, block: &[u8]) -> [f32; SHARED] {
    let half = |at: usize| half_to_f32(u16::from_le_bytes([block[at], block[at + 1]]));
    std::array::from_fn(|inner| {
        let nibble = |from: usize| f32::from(block[from + inner % 16] >> (4 * (inner / 16)) & 15);
        match format {
            Format::Q4_0 => half(0) * (nibble(2) - 8.0),
            Format::Q4_1 => half(0) * nibble(4) + half(2),
            Format::Mxfp4 => {
                const FLOATS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
                let code = nibble(1) as usize;
                let sign = if code < 8 { 1.0 } else { -1.0 };
                sign * FLOATS[code % 8] * (f64::from(block[0]) - 127.0).exp2() as f32
            }
            Format::Iq4Nl => {
                const INTEGERS: [i8; 16] =
                    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
                half(0) * f32::from(INTEGERS[nibble(2) as usize])
            }
            _ => half(0) * f32::from(block[2 + inner].cast_signed()),
        }
    })
}
