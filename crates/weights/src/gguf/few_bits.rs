//! Decodes the blocks of GGUF's types with few bits: 2-bit and 3-bit integers with scales, ternary
//! values, indices into a grid, and 4-bit floats.

use half::f16;

use super::blocks::{SUPER, half};
use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use super::types::TensorType;

/// Bytes of the scales in a block of `Q3_K`.
const Q3_SCALES: usize = 12;
/// The magnitudes in the grids with 2-bit coordinates.
const OF_2_BITS: [f32; 3] = [8.0, 25.0, 43.0];
/// The magnitudes in the grid of `IQ3_XXS`.
const OF_3_BITS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// The offset of all values of the 1-bit types from their grid points.
const DELTA: f32 = 0.125;
/// The table of values of `IQ4_NL` and `IQ4_XS`.
const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values of 4-bit floats, doubled so that they are integers.
const FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

fn word(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

fn word_of_32(bytes: &[u8], index: usize) -> u32 {
    u32::from(word(bytes, 2 * index)) | u32::from(word(bytes, 2 * index + 1)) << 16
}

/// Returns the 4-bit number with this index. A byte stores two numbers, the first in its low half.
fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (index % 2 * 4) & 15
}

/// Returns eight signs, one per bit; 1 means negative. The code holds seven, and the eighth makes
/// the number of negative signs even.
fn signs(code: u32) -> u8 {
    let seven = (code & 127) as u8;
    seven | ((seven.count_ones() % 2) as u8) << 7
}

fn signed(value: f32, signs: u8, index: usize) -> f32 {
    if signs >> index & 1 == 0 { value } else { -value }
}

/// Returns one of the eight 2-bit coordinates of a grid point.
fn of_eight(point: u16, index: usize) -> usize {
    usize::from(point >> (2 * index) & 3)
}

/// Returns one of the four coordinates of a grid point. Each has 4 bits, of which 3 are used.
fn of_four(point: u16, index: usize) -> usize {
    usize::from(point >> (4 * index) & 7)
}

/// Returns half of the power of 2 with this exponent, which is biased as in a float32.
fn half_of_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        exponent => u32::from(exponent - 1) << 23,
    })
}

/// Returns half of the value of an 8-bit float (e4m3) without a sign.
fn half_of_float(bits: u8) -> f32 {
    let (exponent, rest) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (bits, exponent) {
        (0 | 0x7f, _) => 0.0,
        (_, 0) => rest * 2.0_f32.powi(-9) * 0.5,
        _ => (1.0 + rest / 8.0) * 2.0_f32.powi(exponent - 7) * 0.5,
    }
}

/// Decodes one block of a type that `blocks` does not handle.
pub(super) fn block(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    match kind {
        TensorType::Q2K => q2_k(bytes, out),
        TensorType::Q3K => q3_k(bytes, out),
        TensorType::Iq2Xxs => iq2_xxs(bytes, out),
        TensorType::Iq2Xs => iq2_xs(bytes, out),
        TensorType::Iq2S => iq2_s(bytes, out),
        TensorType::Iq3Xxs => iq3_xxs(bytes, out),
        TensorType::Iq3S => iq3_s(bytes, out),
        TensorType::Iq1S => iq1_s(bytes, out),
        TensorType::Iq1M => iq1_m(bytes, out),
        TensorType::Iq4Nl => uneven(half(bytes, 0), &bytes[2..], out),
        TensorType::Iq4Xs => {
            for (part, out) in out.chunks_exact_mut(32).enumerate() {
                uneven(iq4_xs_scale(bytes, part), &bytes[8 + 16 * part..], out);
            }
        }
        TensorType::Tq1_0 => tq1_0(bytes, out),
        TensorType::Tq2_0 => {
            let d = half(bytes, SUPER / 4);
            for (at, out) in out.iter_mut().enumerate() {
                *out = d * (f32::from(two_bits(bytes, at)) - 1.0);
            }
        }
        TensorType::Mxfp4 => {
            let d = half_of_power(bytes[0]);
            for (at, out) in out.iter_mut().enumerate() {
                let code = bytes[1 + at % 16] >> (at / 16 * 4) & 15;
                *out = d * f32::from(FLOATS[usize::from(code)]);
            }
        }
        TensorType::Nvfp4 => {
            for (at, out) in out.iter_mut().enumerate() {
                let (part, inner) = (at / 16, at % 16);
                let code = bytes[4 + 8 * part + inner % 8] >> (inner / 8 * 4) & 15;
                *out = half_of_float(bytes[part]) * f32::from(FLOATS[usize::from(code)]);
            }
        }
        _ => unreachable!("a type of {}", kind.name()),
    }
}

/// Returns the 2-bit code of an element, as packed in `Q2_K`, `Q3_K` and `TQ2_0`.
fn two_bits(bytes: &[u8], at: usize) -> u8 {
    bytes[at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3
}

fn q2_k(bytes: &[u8], out: &mut [f32]) {
    let (scales, rest) = bytes.split_at(SUPER / 16);
    let (codes, both) = rest.split_at(SUPER / 4);
    let (d, least) = (half(both, 0), half(both, 2));
    for (at, out) in out.iter_mut().enumerate() {
        let scale = scales[at / 16];
        let (step, min) = (d * f32::from(scale & 15), least * f32::from(scale >> 4));
        *out = step * f32::from(two_bits(codes, at)) - min;
    }
}

fn q3_k(bytes: &[u8], out: &mut [f32]) {
    let (high, rest) = bytes.split_at(SUPER / 8);
    let (codes, rest) = rest.split_at(SUPER / 4);
    let (scales, d) = rest.split_at(Q3_SCALES);
    let d = half(d, 0);
    for (at, out) in out.iter_mut().enumerate() {
        let part = at / 16;
        let low = scales[part % 8] >> (part / 8 * 4) & 15;
        let upper = scales[8 + part % 4] >> (part / 4 * 2) & 3;
        let scale = (low | upper << 4) as i8 - 32;
        let bit = high[at % 32] >> (at / 32) & 1;
        let code = two_bits(codes, at) as i8 - if bit == 1 { 0 } else { 4 };
        *out = d * f32::from(scale) * f32::from(code);
    }
}

/// Returns the scale of the 32 elements of sub-block `part`.
fn iq4_xs_scale(bytes: &[u8], part: usize) -> f32 {
    let (low, high) = (nibble(&bytes[4..], part), word(&bytes[2..], 0) >> (2 * part) & 3);
    half(bytes, 0) * f32::from((low | (high as u8) << 4) as i8 - 32)
}

fn uneven(d: f32, codes: &[u8], out: &mut [f32]) {
    for (at, out) in out.iter_mut().enumerate() {
        let code = codes[at % 16] >> (at / 16 * 4) & 15;
        *out = d * f32::from(UNEVEN[usize::from(code)]);
    }
}

/// Converts blocks to `IQ4_NL`: keeps the codes, and rounds the scales to half precision.
pub(super) fn iq4_xs_as_iq4_nl(bytes: &[u8], out: &mut Vec<u8>) {
    for part in 0..SUPER / 32 {
        out.extend_from_slice(&f16::from_f32(iq4_xs_scale(bytes, part)).to_le_bytes());
        out.extend_from_slice(&bytes[8 + 16 * part..][..16]);
    }
}

fn iq2_xxs(bytes: &[u8], out: &mut [f32]) {
    let (d, words) = (half(bytes, 0), &bytes[2..]);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let more = word_of_32(words, 2 * part + 1);
        let d = d * (0.5 + (more >> 28) as f32) * 0.25;
        for (eight, out) in out.chunks_exact_mut(8).enumerate() {
            let point = IQ2_XXS[usize::from(words[8 * part + eight])];
            let signs = signs(more >> (7 * eight));
            for (index, out) in out.iter_mut().enumerate() {
                *out = signed(d * OF_2_BITS[of_eight(point, index)], signs, index);
            }
        }
    }
}

fn iq2_xs(bytes: &[u8], out: &mut [f32]) {
    let (d, scales) = (half(bytes, 0), &bytes[2 + SUPER / 4..]);
    for (eight, out) in out.chunks_exact_mut(8).enumerate() {
        let code = word(&bytes[2..], eight);
        let d = d * (0.5 + f32::from(nibble(scales, eight / 2))) * 0.25;
        let (point, signs) = (IQ2_XS[usize::from(code & 511)], signs(u32::from(code >> 9)));
        for (index, out) in out.iter_mut().enumerate() {
            *out = signed(d * OF_2_BITS[of_eight(point, index)], signs, index);
        }
    }
}

fn iq2_s(bytes: &[u8], out: &mut [f32]) {
    let (d, rest) = (half(bytes, 0), &bytes[2..]);
    let (codes, rest) = rest.split_at(SUPER / 8);
    let (all_signs, rest) = rest.split_at(SUPER / 8);
    let (high, scales) = rest.split_at(SUPER / 32);
    for (eight, out) in out.chunks_exact_mut(8).enumerate() {
        let d = d * (0.5 + f32::from(nibble(scales, eight / 2))) * 0.25;
        let upper = usize::from(high[eight / 4] >> (eight % 4 * 2) & 3);
        let point = IQ2_S[usize::from(codes[eight]) | upper << 8];
        for (index, out) in out.iter_mut().enumerate() {
            *out = signed(d * OF_2_BITS[of_eight(point, index)], all_signs[eight], index);
        }
    }
}

fn iq3_xxs(bytes: &[u8], out: &mut [f32]) {
    let (d, rest) = (half(bytes, 0), &bytes[2..]);
    let (codes, words) = rest.split_at(SUPER / 4);
    for (eight, out) in out.chunks_exact_mut(8).enumerate() {
        let more = word_of_32(words, eight / 4);
        let d = d * (0.5 + (more >> 28) as f32) * 0.5;
        let signs = signs(more >> (7 * (eight % 4)));
        for (index, out) in out.iter_mut().enumerate() {
            let point = IQ3_XXS[usize::from(codes[2 * eight + index / 4])];
            *out = signed(d * OF_3_BITS[of_four(point, index % 4)], signs, index);
        }
    }
}

fn iq3_s(bytes: &[u8], out: &mut [f32]) {
    let (d, rest) = (half(bytes, 0), &bytes[2..]);
    let (codes, rest) = rest.split_at(SUPER / 4);
    let (high, rest) = rest.split_at(SUPER / 32);
    let (all_signs, scales) = rest.split_at(SUPER / 8);
    for (eight, out) in out.chunks_exact_mut(8).enumerate() {
        let d = d * f32::from(1 + 2 * nibble(scales, eight / 4));
        for (index, out) in out.iter_mut().enumerate() {
            let four = 2 * eight + index / 4;
            let upper = usize::from(high[four / 8] >> (four % 8) & 1);
            let point = IQ3_S[usize::from(codes[four]) | upper << 8];
            let value = (2 * of_four(point, index % 4) + 1) as f32;
            *out = signed(d * value, all_signs[eight], index);
        }
    }
}

/// Writes eight values: the coordinates of a grid point (-1, 0 or 1) plus an offset, scaled.
fn beside(point: u16, d: f32, delta: f32, out: &mut [f32]) {
    for (index, out) in out.iter_mut().enumerate() {
        *out = d * (of_eight(point, index) as f32 - 1.0 + delta);
    }
}

fn iq1_s(bytes: &[u8], out: &mut [f32]) {
    let (d, rest) = (half(bytes, 0), &bytes[2..]);
    let (codes, high) = rest.split_at(SUPER / 8);
    for (eight, out) in out.chunks_exact_mut(8).enumerate() {
        let more = word(high, eight / 4);
        let d = d * f32::from(2 * (more >> 12 & 7) + 1);
        let upper = usize::from(more >> (3 * (eight % 4)) & 7);
        let delta = if more >> 15 == 0 { DELTA } else { -DELTA };
        beside(IQ1[usize::from(codes[eight]) | upper << 8], d, delta, out);
    }
}

fn iq1_m(bytes: &[u8], out: &mut [f32]) {
    let (codes, rest) = bytes.split_at(SUPER / 8);
    let (high, scales) = rest.split_at(SUPER / 16);
    // The common scale is stored in the upper four bits of the scales' words.
    let bits = (0..4).fold(0, |bits, at| bits | (word(scales, at) & 0xf000) >> (12 - 4 * at));
    let d = f16::from_bits(bits).to_f32();
    for (eight, out) in out.chunks_exact_mut(8).enumerate() {
        let scale = word(scales, eight / 8) >> (eight % 8 / 2 * 3) & 7;
        let more = nibble(high, eight);
        let delta = if more & 8 == 0 { DELTA } else { -DELTA };
        let point = IQ1[usize::from(codes[eight]) | usize::from(more & 7) << 8];
        beside(point, d * f32::from(2 * scale + 1), delta, out);
    }
}

/// Decodes ternary values. Five of them are the base-3 digits of a byte, read as a fraction of 256.
fn tq1_0(bytes: &[u8], out: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let d = half(bytes, 52);
    let runs = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];
    let mut at = 0;
    for (first, count, digits) in runs {
        for power in &POWERS[..digits] {
            for byte in &bytes[first..first + count] {
                let digit = (u16::from(byte.wrapping_mul(*power)) * 3) >> 8;
                out[at] = d * (f32::from(digit) - 1.0);
                at += 1;
            }
        }
    }
}
