//! The weights of per-layer inputs (Gemma 3n and Gemma 4).

use super::matrix::{Bytes, Matrix, of_size};
use crate::codes::{SHARED, half_to_f32};
use crate::element::Element;
use crate::packing::{Dtype, Storage, Unfit, unfit};
use crate::quantise::stored_len;
use crate::sizes::{LayerInputSizes, Sizes};

/// The weights from which per-layer inputs are computed.
#[derive(Clone)]
pub struct LayerInputWeights {
    /// The embedding rows of tokens, `[vocabulary, layers * size]`.
    pub table: Table,
    /// The projection from a token's input embedding to the inputs of all layers, `[layers * size,
    /// hidden]`.
    pub projection: Matrix,
    /// The norm that is applied to each layer's part of the outputs of `projection`, `[size]`.
    pub norm: Bytes,
}

/// The weights with which a layer processes its per-layer input.
#[derive(Clone)]
pub struct InputMatrices {
    /// The projection that computes the gates of the per-layer input, `[size, hidden]`.
    pub gate: Matrix,
    /// The projection of the gated input, `[hidden, size]`.
    pub output: Matrix,
    /// The norm of the outputs of `output`, `[hidden]`.
    pub norm: Bytes,
}

/// An embedding table, in the order of the checkpoint.
#[derive(Clone)]
pub struct Table {
    /// The number format: the model's type, or GGUF's blocks `Q8_0`, `Q4_0` or `Q4_1`.
    pub storage: Storage,
    /// The concatenated rows.
    pub rows: Bytes,
}

impl LayerInputWeights {
    pub(super) fn check(
        &self,
        sizes: &Sizes,
        LayerInputSizes { vocabulary, size }: LayerInputSizes,
        layers: usize,
    ) -> Result<(), Unfit> {
        let width = layers * size;
        of_size(&self.table.rows, self.table.bytes(sizes.dtype, [vocabulary, width])?)?;
        self.projection.check(sizes.dtype, (width, sizes.hidden), false)?;
        of_size(&self.norm, size * sizes.norm_bytes())
    }
}

impl InputMatrices {
    pub(super) fn check(&self, sizes: &Sizes) -> Result<(), Unfit> {
        let size = sizes.layer_inputs.map_or(0, |of| of.size);
        self.gate.check(sizes.dtype, (size, sizes.hidden), false)?;
        self.output.check(sizes.dtype, (sizes.hidden, size), false)?;
        of_size(&self.norm, sizes.hidden * sizes.norm_bytes())
    }
}

impl Table {
    /// True if a table can store its rows in this format.
    #[must_use]
    pub fn takes(storage: Storage) -> bool {
        matches!(storage, Storage::Plain | Storage::Q8_0 | Storage::Q4_0 | Storage::Q4_1)
    }

    fn bytes(&self, dtype: Dtype, [rows, width]: [usize; 2]) -> Result<usize, Unfit> {
        match self.storage.format().filter(|_| Self::takes(self.storage)) {
            None if self.storage == Storage::Plain => Ok(rows * width * dtype.bytes()),
            Some(format) if width.is_multiple_of(SHARED) => Ok(stored_len(format, rows, width)),
            _ => unfit(format!("no kernel reads rows of {width} numbers as {:?}", self.storage)),
        }
    }

    /// Adds `scale` times a row to `to`, which has the length of a row. Rows that are not quantised
    /// have elements of type `E`.
    pub(crate) fn add_row<E: Element>(&self, row: usize, scale: f32, to: &mut [f32]) {
        let width = to.len();
        let half = |bytes: &[u8]| half_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]));
        let nibbles = |codes: &[u8], to: &mut [f32], of: &dyn Fn(u8) -> f32| {
            let (low, high) = to.split_at_mut(SHARED / 2);
            for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
                *low += of(code & 15) * scale;
                *high += of(code >> 4) * scale;
            }
        };
        let Some(format) = self.storage.format() else {
            let bytes = &self.rows[row * width * size_of::<E>()..][..width * size_of::<E>()];
            // SAFETY: the slice is the row's elements. A room begins at a cache line, so they are
            // aligned.
            let row = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<E>(), width) };
            for (to, from) in to.iter_mut().zip(row) {
                *to += from.to_f32() * scale;
            }
            return;
        };
        let block = stored_len(format, 1, SHARED);
        let bytes = stored_len(format, 1, width);
        let blocks = self.rows[row * bytes..][..bytes].chunks_exact(block);
        for (block, to) in blocks.zip(to.chunks_exact_mut(SHARED)) {
            let step = half(block);
            match self.storage {
                Storage::Q4_0 => nibbles(&block[2..], to, &|code| (f32::from(code) - 8.0) * step),
                Storage::Q4_1 => {
                    let least = half(&block[2..]);
                    nibbles(&block[4..], to, &|code| f32::from(code) * step + least);
                }
                _ => {
                    for (to, &code) in to.iter_mut().zip(&block[2..]) {
                        *to += f32::from(code.cast_signed()) * step * scale;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::room;

    #[test]
    fn rows_of_a_table_are_those_of_its_blocks() {
        let codes: Vec<u8> = (0..16).map(|at| at | (15 - at) << 4).collect();
        // The scales 2 and 0.5, and the minimum -3.
        let (step, other, least) = ([0x00, 0x40], [0x00, 0x38], [0x00, 0xc2]);
        let signed: Vec<u8> = (0..32).map(|at| (at * 8 - 128) as u8).collect();
        let with = |heads: [&[u8]; 2], codes: &[u8]| {
            heads.iter().flat_map(|head| head.iter().chain(codes)).copied().collect::<Vec<u8>>()
        };
        let (first, second) = ([step, least].concat(), [other, least].concat());
        type Case = (Storage, Vec<u8>, fn(usize) -> f32);
        let cases: [Case; 3] = [
            (Storage::Q8_0, with([&step, &other], &signed), |at| at as f32 * 8.0 - 128.0),
            (Storage::Q4_0, with([&step, &other], &codes), |at| nibble(at) - 8.0),
            (Storage::Q4_1, with([&first, &second], &codes), nibble),
        ];
        for (storage, bytes, value) in cases {
            let table = Table { storage, rows: room(&bytes) };
            assert_eq!(table.bytes(Dtype::Float32, [2, 32]), Ok(bytes.len()));
            let least = if storage == Storage::Q4_1 { -3.0 } else { 0.0 };
            for (row, step) in [(0, 2.0), (1, 0.5)] {
                let mut found = [1.0; 32];
                table.add_row::<f32>(row, 10.0, &mut found);
                let wanted: Vec<f32> =
                    (0..32).map(|at| 1.0 + 10.0 * (value(at) * step + least)).collect();
                assert_eq!(found, wanted[..]);
            }
        }
        let table = Table { storage: Storage::Plain, rows: room(&[1.0_f32, 2.0, 3.0, 4.0]) };
        let mut found = [0.5; 2];
        table.add_row::<f32>(1, 2.0, &mut found);
        assert_eq!(found, [6.5, 8.5]);
        assert!(
            Table { storage: Storage::Int8, ..table.clone() }
                .bytes(Dtype::Float32, [1, 32])
                .is_err()
        );
        assert!(Table { storage: Storage::Q8_0, ..table }.bytes(Dtype::Float32, [1, 12]).is_err());
    }

    fn nibble(at: usize) -> f32 {
        if at < 16 { at as f32 } else { 31.0 - at as f32 }
    }
}
