//! Dequantises matrices row by row: from codes, scales and zero points to float32.
//!
//! A matrix is `[rows, inputs]`. Its value at (r, i) is `(code[r, i] - zero[r, g]) * scale[r, g]`,
//! where g is the group of input i, and each operation is rounded to float32. For 8-bit floats, the
//! codes are the floats, and there are no zero points (Micikevicius et al. 2022, "FP8 formats for
//! deep learning").

use std::ops::Range;

/// The number of 4-bit codes in a 32-bit word.
pub(super) const PER_WORD: usize = 8;
/// The index of the nibble in which AWQ stores each of eight neighbouring outputs in a word.
const AWQ_PLACES: [usize; PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];
/// The index of the nibble of each neighbour in the words of other formats.
const PLACES: [usize; PER_WORD] = [0, 1, 2, 3, 4, 5, 6, 7];
/// The zero point of a matrix that has none in the file.
const MIDDLE: u8 = 8;
/// The values of 8-bit floats, indexed by their bits.
static E4M3: [f32; 256] = floats_of_8_bits(4);
static E5M2: [f32; 256] = floats_of_8_bits(5);

/// How a file stores codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CodeForm {
    /// Bytes `[rows, inputs]`: 8-bit floats with 4 exponent bits, without infinities.
    E4m3,
    /// Bytes `[rows, inputs]`: 8-bit floats with 5 exponent bits.
    E5m2,
    /// 32-bit words `[inputs / 8, rows]`, each with the codes of eight neighbouring inputs.
    Gptq,
    /// 32-bit words `[inputs, rows / 8]`, each with the codes of eight neighbouring rows, in AWQ's
    /// order.
    Awq,
    /// 32-bit words `[rows, inputs / 8]`, each with the codes of eight neighbouring inputs.
    Packed,
}

impl CodeForm {
    /// Writes the codes of `rows` as floats `[rows, inputs]`. `codes` contains `all` rows. For AWQ,
    /// `rows` has to start and end at a multiple of eight.
    pub(super) fn unpack(
        self,
        codes: &[u8],
        all: usize,
        rows: &Range<usize>,
        inputs: usize,
        to: &mut [f32],
    ) {
        let words = codes.as_chunks::<4>().0;
        match self {
            Self::E4m3 | Self::E5m2 => {
                let values = if self == Self::E4m3 { &E4M3 } else { &E5M2 };
                let codes = &codes[rows.start * inputs..rows.end * inputs];
                for (to, &code) in to.iter_mut().zip(codes) {
                    *to = values[usize::from(code)];
                }
            }
            Self::Packed => {
                let of_row = inputs / PER_WORD;
                let words = &words[rows.start * of_row..rows.end * of_row];
                for (to, &word) in to.as_chunks_mut::<PER_WORD>().0.iter_mut().zip(words) {
                    *to = nibbles(word, &PLACES);
                }
            }
            Self::Gptq => {
                for (eight, words) in words.chunks_exact(all.max(1)).enumerate() {
                    let rows = to.chunks_exact_mut(inputs).zip(&words[rows.clone()]);
                    for (to, &word) in rows {
                        to[eight * PER_WORD..][..PER_WORD].copy_from_slice(&nibbles(word, &PLACES));
                    }
                }
            }
            Self::Awq => {
                let (of_input, first) = (all / PER_WORD, rows.start / PER_WORD);
                for (eight, to) in to.chunks_exact_mut(inputs * PER_WORD).enumerate() {
                    let words = words.iter().skip(first + eight).step_by(of_input);
                    for (input, &word) in words.enumerate() {
                        for (row, code) in nibbles(word, &AWQ_PLACES).into_iter().enumerate() {
                            to[row * inputs + input] = code;
                        }
                    }
                }
            }
        }
    }

    /// Unpacks the zero points of a band as `[rows, groups]`, where rows may be padded to a
    /// multiple of eight. `words` contains the band's zero points: `[groups, rows / 8]` for GPTQ
    /// and AWQ, otherwise `[rows / 8, groups]`.
    pub(super) fn zeros(self, words: &[u8], groups: usize, less_one: bool) -> Vec<u8> {
        let words = words.as_chunks::<4>().0;
        let eights = words.len() / groups.max(1);
        let mut zeros = vec![0; words.len() * PER_WORD];
        for eight in 0..eights {
            for group in 0..groups {
                let (at, places) = match self {
                    Self::Awq => (group * eights + eight, &AWQ_PLACES),
                    Self::Gptq => (group * eights + eight, &PLACES),
                    Self::Packed | Self::E4m3 | Self::E5m2 => (eight * groups + group, &PLACES),
                };
                let word = u32::from_le_bytes(words[at]);
                for (row, &place) in places.iter().enumerate() {
                    let zero = (word >> (4 * place) & 15) as u8;
                    zeros[(eight * PER_WORD + row) * groups + group] =
                        if less_one { (zero + 1) & 15 } else { zero };
                }
            }
        }
        zeros
    }
}

/// Returns the codes of a little-endian word, in the order of `places`.
fn nibbles(word: [u8; 4], places: &[usize; PER_WORD]) -> [f32; PER_WORD] {
    let word = u32::from_le_bytes(word);
    places.map(|place| f32::from((word >> (4 * place) & 15) as u8))
}

/// Returns the zero points of a matrix that has none in the file.
pub(super) fn middles(count: usize) -> Vec<u8> {
    vec![MIDDLE; count]
}

/// The quantisation group of each input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Groups {
    /// Each group is this many neighbouring inputs.
    Equal(usize),
    /// The index of each input's group, in any order.
    Listed(Vec<usize>),
}

impl Groups {
    /// Dequantises codes `[rows, inputs]` in place. Scales and zero points are `[rows, count]`.
    /// Zero points are empty if the codes are floats.
    pub(super) fn scale(
        &self,
        values: &mut [f32],
        inputs: usize,
        count: usize,
        scales: &[f32],
        zeros: &[u8],
    ) {
        let rows = values.chunks_exact_mut(inputs).zip(scales.chunks_exact(count));
        for (row, (values, scales)) in rows.enumerate() {
            let zeros = zeros.get(row * count..(row + 1) * count);
            match self {
                Self::Equal(size) => {
                    for (group, values) in values.chunks_mut(*size).enumerate() {
                        let scale = scales[group];
                        match zeros {
                            None => values.iter_mut().for_each(|value| *value *= scale),
                            Some(zeros) => {
                                let zero = f32::from(zeros[group]);
                                values
                                    .iter_mut()
                                    .for_each(|value| *value = (*value - zero) * scale);
                            }
                        }
                    }
                }
                Self::Listed(groups) => {
                    for (value, &group) in values.iter_mut().zip(groups) {
                        let zero = zeros.map_or(0.0, |zeros| f32::from(zeros[group]));
                        *value = (*value - zero) * scales[group];
                    }
                }
            }
        }
    }
}

/// Returns the values of all 8-bit floats with this many exponent bits.
const fn floats_of_8_bits(exponent_bits: u32) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        values[bits as usize] = float_of_8_bits(bits, exponent_bits);
        bits += 1;
    }
    values
}

const fn float_of_8_bits(bits: u32, exponent_bits: u32) -> f32 {
    const F32_MANTISSA: u32 = 23;
    const F32_BIAS: u32 = 127;
    let mantissa_bits = 7 - exponent_bits;
    let (most_exponent, most_mantissa) = ((1 << exponent_bits) - 1, (1 << mantissa_bits) - 1);
    let bias = most_exponent / 2;
    let (exponent, mantissa) = (bits >> mantissa_bits & most_exponent, bits & most_mantissa);
    let sign = (bits & 0x80) << 24;
    // With 4 exponent bits, codes with the largest exponent are ordinary numbers, except for NaN.
    let is_special = exponent == most_exponent && (exponent_bits == 5 || mantissa == most_mantissa);
    if is_special && mantissa == 0 {
        return f32::from_bits(sign | f32::INFINITY.to_bits());
    }
    if is_special {
        return f32::NAN;
    }
    if exponent == 0 {
        // The step between subnormal numbers is 2^(1 - bias - mantissa_bits).
        let step = f32::from_bits((F32_BIAS + 1 - bias - mantissa_bits) << F32_MANTISSA);
        let value = mantissa as f32 * step;
        return f32::from_bits(sign | value.to_bits());
    }
    let exponent = exponent + F32_BIAS - bias;
    f32::from_bits(sign | exponent << F32_MANTISSA | mantissa << (F32_MANTISSA - mantissa_bits))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns one 4-bit code of a list of words, directly by the format's definition.
    fn code(words: &[u8], word: usize, place: usize) -> u8 {
        words[word * 4 + place / 2] >> (place % 2 * 4) & 15
    }

    /// Returns the nibble in which a neighbour is stored. AWQ's tools use this order.
    fn awq_place(neighbour: usize) -> usize {
        [0, 2, 4, 6, 1, 3, 5, 7].iter().position(|&it| it == neighbour).expect("one of eight")
    }

    #[test]
    fn floats_of_8_bits_are_those_of_the_standard() {
        for (values, exponent_bits) in [(&E4M3, 4), (&E5M2, 5)] {
            let mantissa_bits = 7 - exponent_bits;
            let bias = (1 << (exponent_bits - 1)) - 1;
            for (bits, &found) in values.iter().enumerate() {
                let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
                let mantissa = bits & ((1 << mantissa_bits) - 1);
                let parts = f64::from(1_u32 << mantissa_bits);
                let (whole, power) = if exponent == 0 { (0.0, 1) } else { (1.0, exponent as i32) };
                let size = (whole + mantissa as f64 / parts) * 2_f64.powi(power - bias);
                let wanted = if bits < 128 { size } else { -size } as f32;
                match (exponent_bits, bits & 127) {
                    (4, 0x7f) | (5, 0x7d..) => assert!(found.is_nan(), "{bits:#x}"),
                    (5, 0x7c) => assert!(found.is_infinite(), "{bits:#x}"),
                    _ => assert_eq!(found.to_bits(), wanted.to_bits(), "{bits:#x}"),
                }
            }
        }
        assert_eq!((E4M3[0x7e], E4M3[1], E5M2[0x7b]), (448.0, 2.0_f32.powi(-9), 57344.0));
    }

    proptest! {
        #[test]
        fn codes_and_zero_points_are_where_each_format_has_them(
            bytes in prop::collection::vec(any::<u8>(), 4 * 24 * 4),
            first in 0..3_usize, form in 0..3_usize,
        ) {
            // 24 rows of 32 inputs, of which 8, 16 or 24 rows are read.
            let (all, inputs, rows) = (24, 32, first * PER_WORD..24);
            let form = [CodeForm::Gptq, CodeForm::Awq, CodeForm::Packed][form];
            let mut found = vec![0.0; rows.len() * inputs];
            form.unpack(&bytes, all, &rows, inputs, &mut found);
            for (at, &found) in found.iter().enumerate() {
                let (row, input) = (rows.start + at / inputs, at % inputs);
                let wanted = match form {
                    CodeForm::Gptq => code(&bytes, input / 8 * all + row, input % 8),
                    CodeForm::Awq => code(&bytes, input * all / 8 + row / 8, awq_place(row % 8)),
                    _ => code(&bytes, row * inputs / 8 + input / 8, input % 8),
                };
                prop_assert_eq!(found, f32::from(wanted));
            }
            let (groups, eights) = (4, 3);
            let words = &bytes[..4 * groups * eights];
            for less_one in [false, true] {
                let zeros = form.zeros(words, groups, less_one);
                for (at, &found) in zeros.iter().enumerate() {
                    let (row, group) = (at / groups, at % groups);
                    let stored = match form {
                        CodeForm::Gptq => code(words, group * eights + row / 8, row % 8),
                        CodeForm::Awq => code(words, group * eights + row / 8, awq_place(row % 8)),
                        _ => code(words, row / 8 * groups + group, row % 8),
                    };
                    // The first version of GPTQ's format stores zero points less 1, in 4 bits.
                    let wanted = if less_one { (stored + 1) % 16 } else { stored };
                    prop_assert_eq!(found, wanted);
                }
            }
        }

        #[test]
        fn groups_have_their_scale_and_zero_point(
            scales in prop::collection::vec(-2.0_f32..2.0, 6),
            zeros in prop::collection::vec(0..16_u8, 6),
            order in Just((0..20_usize).collect::<Vec<_>>()).prop_shuffle(),
            floats in any::<bool>(),
        ) {
            // Two rows of 20 inputs in groups of 8, of which the last group is shorter.
            let (inputs, count) = (20, 3);
            let codes: Vec<f32> = (0..40).map(|at| (at * 7 % 16) as f32).collect();
            let of_inputs: Vec<usize> = order.iter().map(|at| at / 8).collect();
            let given: &[u8] = if floats { &[] } else { &zeros };
            for groups in [Groups::Equal(8), Groups::Listed(of_inputs.clone())] {
                let mut values = codes.clone();
                groups.scale(&mut values, inputs, count, &scales, given);
                for (at, &value) in values.iter().enumerate() {
                    let (row, input) = (at / inputs, at % inputs);
                    let equal = groups == Groups::Equal(8);
                    let group = if equal { input / 8 } else { of_inputs[input] };
                    let zero = if floats { 0.0 } else { f32::from(zeros[row * count + group]) };
                    let wanted = (codes[at] - zero) * scales[row * count + group];
                    prop_assert_eq!(value, wanted);
                }
            }
        }
    }
}
