//! Test matrices with their dequantised values.

use std::sync::Arc;

use crate::codes::tests::Encoded;
use crate::codes::{Format, SHARED};
use crate::element::Element;
use crate::isa::plain::Array;
use crate::memory::Room;
use crate::memory::tests::room;
use crate::packing::{Dtype, Packing, Storage};
use crate::quantise::{stored_len, unpacked};
use crate::tile::tests::numbers;
use crate::weights::{Bytes, Matrix};

/// The model type whose elements are `E`.
pub(super) fn dtype<E: Element>() -> Dtype {
    if E::PAIR == 2 { Dtype::Bfloat16 } else { Dtype::Float32 }
}

/// One matrix, or the matrices of all experts: packed, and as values.
pub(super) struct Matrices {
    storage: Storage,
    inputs: usize,
    packed: Bytes,
    /// `[count, outputs, inputs]`.
    values: Vec<f32>,
}

impl Matrices {
    pub(super) fn new<E: Element>(
        count: usize,
        (outputs, inputs): (usize, usize),
        interleaved: bool,
        (storage, seed): (Storage, u32),
    ) -> Self {
        let packing = Packing { outputs, inputs, interleaved, dtype: dtype::<E>(), storage };
        let bytes = packing.bytes().expect("a matrix");
        let (mut packed, mut values) = (Room::new(count * bytes).expect("memory"), Vec::new());
        for (index, to) in packed.chunks_exact_mut(bytes).enumerate() {
            let seed = seed ^ (index as u32 * 7919 + 13);
            let numbers: Vec<E> = numbers(outputs * inputs, seed);
            let source = match storage.format() {
                None => {
                    values.extend(numbers.iter().map(|x| x.to_f32()));
                    room(&numbers)
                }
                Some(Format::Int8) => {
                    let rows = numbers.chunks_exact(inputs);
                    values.extend(rows.flat_map(|row| meant(Some(Format::Int8), row)));
                    room(&numbers)
                }
                Some(format) => {
                    let stored = blocks(format, stored_len(format, outputs, inputs), seed);
                    let each = stored.chunks_exact(stored_len(format, 1, SHARED));
                    values.extend(each.flat_map(|block| unpacked(format, block)));
                    room(&stored)
                }
            };
            packing.pack(&source, to).expect("packed");
        }
        Self { storage, inputs, packed: Arc::new(packed), values }
    }

    pub(super) fn matrix(&self) -> Matrix {
        Matrix { storage: self.storage, packed: self.packed.clone() }
    }

    /// Returns the products of a row with all outputs of one of the matrices.
    pub(super) fn of<E: Element>(&self, index: usize, outputs: usize, row: &[E]) -> Vec<f64> {
        let x = meant(self.storage.format(), row);
        let size = outputs * self.inputs;
        let rows = self.values[index * size..][..size].chunks_exact(self.inputs);
        rows.map(|w| w.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()).collect()
    }
}

/// Random blocks in a format of GGUF, with small scales.
fn blocks(format: Format, bytes: usize, seed: u32) -> Vec<u8> {
    let random = numbers::<f32>(bytes, seed);
    let mut stored: Vec<u8> = random.iter().map(|x| (x.to_bits() >> 7) as u8).collect();
    for block in stored.chunks_exact_mut(stored_len(format, 1, SHARED)) {
        // Scales of 2^-7, or 2^-11 with 8-bit values; minima of -2^-4.
        let wide = matches!(format, Format::Q8_0 | Format::Iq4Nl);
        let scale: u16 = if wide { 0x1000 } else { 0x2000 };
        match format {
            Format::Mxfp4 => block[0] = 121,
            _ => block[..2].copy_from_slice(&scale.to_le_bytes()),
        }
        if format == Format::Q4_1 {
            block[2..4].copy_from_slice(&0xac00_u16.to_le_bytes());
        }
    }
    stored
}

/// A row as a matrix of this format reads it: quantised and dequantised.
fn meant<E: Element>(format: Option<Format>, row: &[E]) -> Vec<f32> {
    let Some(format) = format else { return row.iter().map(|x| x.to_f32()).collect() };
    let shared = format.shared(row.len());
    let Encoded { codes, scales, .. } = Encoded::of::<E, Array>(row, row.len(), shared);
    codes.iter().enumerate().map(|(at, &code)| scales[at / shared] * f32::from(code)).collect()
}
