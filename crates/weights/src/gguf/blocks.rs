//! Decodes the blocks of GGUF's types one element at a time, like the `gguf` package. Also converts
//! blocks of types without kernels to types with kernels.

use half::{bf16, f16};

use super::few_bits;
use super::types::TensorType;

/// Elements per block in the types that kernels compute with.
const SHARED: usize = 32;
/// Elements per super-block of the K types (https://github.com/ggml-org/llama.cpp/pull/1684).
pub(super) const SUPER: usize = 256;
const K_SCALES: usize = 12;

/// The block types that have kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockKind {
    /// 8-bit integers and a scale.
    Q8_0,
    /// 4-bit integers and a scale.
    Q4_0,
    /// 4-bit integers, a scale and a minimum.
    Q4_1,
    /// 4-bit floats and an exponent.
    Mxfp4,
    /// 4-bit indices into a table of 16 integers, and a scale.
    Iq4Nl,
}

/// GGUF types, and for each the block type in which its matrices are multiplied.
const COMPUTED: [(&str, BlockKind); 22] = [
    ("Q8_0", BlockKind::Q8_0),
    ("Q4_0", BlockKind::Q4_0),
    ("Q4_1", BlockKind::Q4_1),
    ("MXFP4", BlockKind::Mxfp4),
    ("IQ4_NL", BlockKind::Iq4Nl),
    ("Q4_K", BlockKind::Q4_1),
    ("IQ4_XS", BlockKind::Iq4Nl),
    ("Q5_0", BlockKind::Q8_0),
    ("Q5_1", BlockKind::Q8_0),
    ("Q5_K", BlockKind::Q8_0),
    ("Q6_K", BlockKind::Q8_0),
    ("Q2_K", BlockKind::Q8_0),
    ("Q3_K", BlockKind::Q8_0),
    ("IQ1_S", BlockKind::Q8_0),
    ("IQ1_M", BlockKind::Q8_0),
    ("IQ2_XXS", BlockKind::Q8_0),
    ("IQ2_XS", BlockKind::Q8_0),
    ("IQ2_S", BlockKind::Q8_0),
    ("IQ3_XXS", BlockKind::Q8_0),
    ("IQ3_S", BlockKind::Q8_0),
    ("TQ1_0", BlockKind::Q8_0),
    ("TQ2_0", BlockKind::Q8_0),
];

impl BlockKind {
    /// The number of bytes per block.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8_0 => 34,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Mxfp4 => 17,
        }
    }

    /// The name in GGUF's documentation.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Mxfp4 => "MXFP4",
            Self::Iq4Nl => "IQ4_NL",
        }
    }
}

/// Returns the block type in which a matrix of GGUF type `name` is multiplied; `None`: no kernel
/// supports the type.
#[must_use]
pub fn computed_as(name: &str) -> Option<BlockKind> {
    COMPUTED.iter().find_map(|&(stored, kind)| (stored == name).then_some(kind))
}

/// The names of the types that kernels can compute with, directly or after conversion.
#[must_use]
pub fn computed_names() -> String {
    COMPUTED.map(|(name, _)| name).join(", ")
}

pub(super) fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Unpacks the eight scales and minimums of a super-block.
fn scales(bytes: &[u8]) -> ([u8; 8], [u8; 8]) {
    let (mut scale, mut least) = ([0; 8], [0; 8]);
    for index in 0..4 {
        let (d, m, both) = (bytes[index], bytes[4 + index], bytes[8 + index]);
        (scale[index], least[index]) = (d & 0x3f, m & 0x3f);
        scale[4 + index] = (both & 0x0f) | ((d >> 2) & 0x30);
        least[4 + index] = (both >> 4) | ((m >> 2) & 0x30);
    }
    (scale, least)
}

/// Dequantises one block of `kind`.
fn block(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    let nibble = |from: usize, index: usize| bytes[from + index % 16] >> (index / 16 * 4) & 15;
    match kind {
        TensorType::F32 => {
            out[0] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        TensorType::F16 => out[0] = half(bytes, 0),
        TensorType::Bf16 => out[0] = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        TensorType::Q4_0 => {
            let d = half(bytes, 0);
            for (index, out) in out.iter_mut().enumerate() {
                *out = d * f32::from(nibble(2, index) as i8 - 8);
            }
        }
        TensorType::Q4_1 => {
            let (d, m) = (half(bytes, 0), half(bytes, 2));
            for (index, out) in out.iter_mut().enumerate() {
                *out = d * f32::from(nibble(4, index)) + m;
            }
        }
        TensorType::Q5_0 => {
            let (d, high) = (half(bytes, 0), &bytes[2..6]);
            for (index, out) in out.iter_mut().enumerate() {
                let bit = high[index / 8] >> (index % 8) & 1;
                *out = d * f32::from((nibble(6, index) | bit << 4) as i8 - 16);
            }
        }
        TensorType::Q5_1 => {
            let (d, m, high) = (half(bytes, 0), half(bytes, 2), &bytes[4..8]);
            for (index, out) in out.iter_mut().enumerate() {
                let bit = high[index / 8] >> (index % 8) & 1;
                *out = d * f32::from(nibble(8, index) | bit << 4) + m;
            }
        }
        TensorType::Q8_0 => {
            let d = half(bytes, 0);
            for (code, out) in bytes[2..].iter().zip(out) {
                *out = f32::from(code.cast_signed()) * d;
            }
        }
        TensorType::Q4K | TensorType::Q5K => {
            let (d, least) = (half(bytes, 0), half(bytes, 2));
            let (scale, min) = scales(&bytes[4..4 + K_SCALES]);
            let rest = &bytes[4 + K_SCALES..];
            let five = kind == TensorType::Q5K;
            let (high, low) = rest.split_at(if five { SUPER / 8 } else { 0 });
            for (part, out) in out.chunks_exact_mut(SHARED).enumerate() {
                let (d, dm) = (d * f32::from(scale[part]), least * f32::from(min[part]));
                for (index, out) in out.iter_mut().enumerate() {
                    let code = low[part / 2 * SHARED + index] >> (part % 2 * 4) & 15;
                    let bit = if five { high[index] >> part & 1 } else { 0 };
                    *out = d * f32::from(code | bit << 4) - dm;
                }
            }
        }
        TensorType::Q6K => {
            let (low, rest) = bytes.split_at(SUPER / 2);
            let (high, rest) = rest.split_at(SUPER / 4);
            let (scale, d) = rest.split_at(SUPER / 16);
            let d = half(d, 0);
            for (part, out) in out.chunks_exact_mut(SHARED).enumerate() {
                let (group, inner) = (part / 4, part % 4);
                for (index, out) in out.iter_mut().enumerate() {
                    let code = low[group * 64 + inner % 2 * SHARED + index] >> (inner / 2 * 4) & 15;
                    let bits = high[group * SHARED + index] >> (2 * inner) & 3;
                    let scale = scale[(part * SHARED + index) / 16].cast_signed();
                    let d = d * f32::from(scale);
                    *out = d * f32::from((code | bits << 4) as i8 - 32);
                }
            }
        }
        other => few_bits::block(other, bytes, out),
    }
}

/// Dequantises whole blocks.
pub(crate) fn dequantise(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    let (elements, size) = kind.block();
    for (bytes, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
        block(kind, bytes, out);
    }
}

/// Rounds to the nearest integer, and halves away from zero, like the reference.
fn round(value: f32) -> f32 {
    let whole = value.abs().floor();
    let rounded = whole + (2.0 * (value.abs() - whole)).floor();
    if value < 0.0 { -rounded } else { rounded }
}

/// Converts whole blocks of `kind` to blocks of type `to`, appended to `out`. Returns false if
/// there is no such conversion.
///
/// Blocks that already have the type `to` are copied. `Q4_K` to `Q4_1` and `IQ4_XS` to `IQ4_NL`
/// keep the codes and round the scales to half precision. `Q4_0`, `Q5_0` and `IQ4_NL` to `Q8_0` is
/// exact. Blocks of other types, and plain floats, are rounded to the codes of `Q8_0`.
pub(crate) fn as_blocks(kind: TensorType, to: BlockKind, bytes: &[u8], out: &mut Vec<u8>) -> bool {
    if kind.name() == to.name() {
        out.extend_from_slice(bytes);
        return true;
    }
    let (elements, size) = kind.block();
    if kind == TensorType::Q4K && to == BlockKind::Q4_1 {
        bytes.chunks_exact(size).for_each(|bytes| q4_k_as_q4_1(bytes, out));
        return true;
    }
    if kind == TensorType::Iq4Xs && to == BlockKind::Iq4Nl {
        bytes.chunks_exact(size).for_each(|bytes| few_bits::iq4_xs_as_iq4_nl(bytes, out));
        return true;
    }
    if to != BlockKind::Q8_0 {
        return false;
    }
    if elements == 1 {
        let mut values = [0.0; SHARED];
        for bytes in bytes.chunks_exact(SHARED * size) {
            for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(size)) {
                block(kind, bytes, std::slice::from_mut(value));
            }
            as_q8_0(&values, out);
        }
        return true;
    }
    // These types have signed codes of fewer bits than `Q8_0`, and the same number of elements per
    // scale as `Q8_0`.
    let keeps_scale = matches!(kind, TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Iq4Nl);
    let mut values = [0.0; SUPER];
    for bytes in bytes.chunks_exact(size) {
        block(kind, bytes, &mut values[..elements]);
        for values in values[..elements].chunks_exact(SHARED) {
            if keeps_scale {
                out.extend_from_slice(&bytes[..2]);
                let step = half(bytes, 0);
                let code = |value: f32| if step == 0.0 { 0.0 } else { value / step };
                out.extend(values.iter().map(|&value| code(value).round_ties_even() as i8 as u8));
            } else {
                as_q8_0(values, out);
            }
        }
    }
    true
}

fn as_q8_0(values: &[f32], out: &mut Vec<u8>) {
    let d = values.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend_from_slice(&f16::from_f32(d).to_le_bytes());
    out.extend(values.iter().map(|&value| round(value * inverse) as i8 as u8));
}

fn q4_k_as_q4_1(bytes: &[u8], out: &mut Vec<u8>) {
    let (d, least) = (half(bytes, 0), half(bytes, 2));
    let (scale, min) = scales(&bytes[4..4 + K_SCALES]);
    let codes = &bytes[4 + K_SCALES..];
    for part in 0..SUPER / SHARED {
        let factors = [d * f32::from(scale[part]), -least * f32::from(min[part])];
        for factor in factors {
            out.extend_from_slice(&f16::from_f32(factor).to_le_bytes());
        }
        // In `Q4_K`, a byte holds codes of two sub-blocks; in `Q4_1`, of the two halves of one
        // block.
        let code = |index: usize| codes[part / 2 * SHARED + index] >> (part % 2 * 4) & 15;
        out.extend((0..SHARED / 2).map(|index| code(index) | code(index + SHARED / 2) << 4));
    }
}
