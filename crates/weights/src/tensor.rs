//! The stored numbers of a tensor, in the types of computation.

use std::sync::Arc;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::ModelError;
use crate::families::TensorPart;
use crate::gguf::{BlockKind, GgufTensor, as_blocks, computed_as, dequantise};
use crate::safe::{SafeFile, SafeTensor};

/// Elements that are converted at a time: whole blocks of every type.
const AT_ONCE: usize = 1 << 18;

/// The types of a model's computation, by PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TorchNumber {
    /// `torch.float32`
    Float32,
    /// `torch.bfloat16`
    Bfloat16,
}

/// The types of stored numbers.
#[derive(Clone, Copy)]
enum Number {
    Float64,
    Float32,
    Float16,
    Bfloat16,
}

impl Number {
    fn bytes(self) -> usize {
        match self {
            Self::Float64 => 8,
            Self::Float32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
        }
    }
}

impl TorchNumber {
    fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 => 2,
        }
    }
}

/// A tensor of an open file.
#[derive(Clone)]
pub(crate) enum Tensor {
    Safe(Arc<SafeFile>, SafeTensor),
    Gguf(Arc<GgufTensor>),
}

impl Tensor {
    /// The GGUF name of the type of blocks that hold a weight's numbers as they are; `None`: they
    /// are no blocks, or a weight's numbers are made of them.
    pub(crate) fn block_type(&self, part: &TensorPart) -> Option<&'static str> {
        let Self::Gguf(tensor) = self else { return None };
        part.is_rows().then(|| tensor.kind.name()).filter(|name| computed_as(name).is_some())
    }

    /// Reads a weight in numbers of the model's type, into memory of its size.
    pub(crate) fn read(
        &self,
        name: &str,
        part: &TensorPart,
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        if to.len() != part.rows * part.columns() * number.bytes() {
            return Err(ModelError::broken(format!(
                "{name} has another size in the model's files"
            )));
        }
        let [rows, columns] = part.matrix;
        let width = number.bytes();
        if part.transposed {
            let mut matrix = Vec::with_capacity(rows * columns);
            self.each(name, part.base * columns, rows * columns, |values| {
                matrix.extend_from_slice(values);
                Ok(())
            })?;
            // A row of the weight is a column of the tensor.
            for (row, to) in to.chunks_exact_mut((rows * width).max(1)).enumerate() {
                let column = matrix.iter().skip(part.row(row)).step_by(columns);
                write_numbers(column.map(|&value| part.change(value)), number, to);
            }
        } else {
            let rows_of_run = part.run();
            let of_run = rows_of_run * columns;
            for (run, to) in to.chunks_exact_mut((of_run * width).max(1)).enumerate() {
                let first = (part.base + part.row(run * rows_of_run)) * columns;
                self.read_run(name, part, (first, of_run), number, to)?;
            }
        }
        if let Some(heads) = part.pairs {
            halves(to, part.rows, heads);
        }
        Ok(())
    }

    /// Reads elements that lie one behind the other.
    fn read_run(
        &self,
        name: &str,
        part: &TensorPart,
        (first, count): (usize, usize),
        number: TorchNumber,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        if let Self::Safe(file, tensor) = self
            && part.is_rows()
            && matches!(
                (tensor.dtype, number),
                (Dtype::F32, TorchNumber::Float32) | (Dtype::BF16, TorchNumber::Bfloat16)
            )
        {
            return file.read(tensor.offset + (first * number.bytes()) as u64, to);
        }
        let mut at = 0;
        self.each(name, first, count, |values| {
            let bytes = values.len() * number.bytes();
            let values = values.iter().map(|&value| part.change(value));
            write_numbers(values, number, &mut to[at..at + bytes]);
            at += bytes;
            Ok(())
        })
    }

    /// Calls `with` with the numbers of elements from `first` on, some at a time.
    fn each(
        &self,
        name: &str,
        first: usize,
        count: usize,
        mut with: impl FnMut(&[f32]) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for at in (first..first + count).step_by(AT_ONCE) {
            let some = AT_ONCE.min(first + count - at);
            values.resize(some, 0.0);
            match self {
                Self::Safe(file, tensor) => {
                    let from = number_of(name, tensor.dtype)?;
                    bytes.resize(some * from.bytes(), 0);
                    file.read(tensor.offset + (at * from.bytes()) as u64, &mut bytes)?;
                    widen(from, &bytes, &mut values);
                }
                Self::Gguf(tensor) => {
                    let (elements, size) = tensor.kind.block();
                    if !at.is_multiple_of(elements) || !some.is_multiple_of(elements) {
                        return Err(ModelError::broken(format!(
                            "{name} is a part of blocks of {elements} numbers"
                        )));
                    }
                    bytes.resize(some / elements * size, 0);
                    tensor.read(at, &mut bytes)?;
                    dequantise(tensor.kind, &bytes, &mut values);
                }
            }
            with(&values)?;
        }
        Ok(())
    }

    /// Reads a matrix in blocks of type `kind`, appended to `to`; `None`: there is no such
    /// conversion.
    pub(crate) fn read_blocks(
        &self,
        part: &TensorPart,
        kind: BlockKind,
        to: &mut Vec<u8>,
    ) -> Result<Option<()>, ModelError> {
        let Self::Gguf(tensor) = self else { return Ok(None) };
        if !part.is_rows() {
            return Ok(None);
        }
        let at_once = (AT_ONCE / part.columns().max(1)).max(1);
        let step = if part.step == part.width { at_once } else { 1 };
        let mut bytes = Vec::new();
        let begin = to.len();
        for row in (0..part.rows).step_by(step) {
            bytes.resize(step.min(part.rows - row) * tensor.row_bytes, 0);
            let row = part.base + part.row(row);
            tensor.read(row * part.columns(), &mut bytes)?;
            if !as_blocks(tensor.kind, kind, &bytes, to) {
                return Ok(None);
            }
        }
        if let Some(heads) = part.pairs {
            // A row's blocks go where the row goes.
            halves(&mut to[begin..], part.rows, heads);
        }
        Ok(Some(()))
    }

    /// The name of a GGUF file's tensor.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Safe(..) => "a tensor",
            Self::Gguf(tensor) => &tensor.name,
        }
    }

    /// The shape in the file.
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::Safe(_, tensor) => &tensor.shape,
            Self::Gguf(tensor) => &tensor.shape,
        }
    }

    /// Bytes of so many numbers that lie one behind the other.
    pub(crate) fn bytes_of(&self, name: &str, numbers: usize) -> Result<usize, ModelError> {
        let (elements, bytes) = match self {
            Self::Safe(_, tensor) => (8, tensor.dtype.bitsize()),
            Self::Gguf(tensor) => tensor.kind.block(),
        };
        let bits = numbers * bytes;
        if !bits.is_multiple_of(elements) || elements > 8 && !numbers.is_multiple_of(elements) {
            return Err(ModelError::broken(format!(
                "{name} is a part of blocks of {elements} numbers"
            )));
        }
        Ok(bits / elements)
    }

    /// The stored type, in words.
    pub(crate) fn type_name(&self) -> String {
        match self {
            Self::Safe(_, tensor) => format!("{:?}", tensor.dtype),
            Self::Gguf(tensor) => tensor.kind.name().to_owned(),
        }
    }
}

impl TensorPart {
    fn change(&self, value: f32) -> f32 {
        let value = value * self.times + self.plus;
        if self.log { value.ln() } else { value }
    }
}

fn number_of(name: &str, dtype: Dtype) -> Result<Number, ModelError> {
    match dtype {
        Dtype::F64 => Ok(Number::Float64),
        Dtype::F32 => Ok(Number::Float32),
        Dtype::F16 => Ok(Number::Float16),
        Dtype::BF16 => Ok(Number::Bfloat16),
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => Err(ModelError::broken(format!(
            "{name} has 8-bit floats, and the checkpoint has no quantization_config"
        ))),
        other => Err(ModelError::elsewhere(format!("{name} of the type {other:?}"))),
    }
}

fn widen(from: Number, bytes: &[u8], to: &mut [f32]) {
    let (twos, fours, eights) =
        (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0, bytes.as_chunks::<8>().0);
    match from {
        Number::Float64 => {
            to.iter_mut().zip(eights).for_each(|(to, &it)| *to = f64::from_le_bytes(it) as f32);
        }
        Number::Float32 => {
            to.iter_mut().zip(fours).for_each(|(to, &it)| *to = f32::from_le_bytes(it));
        }
        Number::Float16 => {
            to.iter_mut().zip(twos).for_each(|(to, &it)| *to = f16::from_le_bytes(it).to_f32());
        }
        Number::Bfloat16 => {
            to.iter_mut().zip(twos).for_each(|(to, &it)| *to = bf16::from_le_bytes(it).to_f32());
        }
    }
}

fn write_numbers(values: impl Iterator<Item = f32>, number: TorchNumber, to: &mut [u8]) {
    match number {
        TorchNumber::Float32 => {
            for (value, to) in values.zip(to.as_chunks_mut::<4>().0) {
                *to = value.to_le_bytes();
            }
        }
        TorchNumber::Bfloat16 => {
            for (value, to) in values.zip(to.as_chunks_mut::<2>().0) {
                *to = bf16::from_f32(value).to_le_bytes();
            }
        }
    }
}

/// Rows of `heads` heads: in each, from (0, h, 1, h + 1, ...) back to (0, 1, ..., h, h + 1, ...).
fn halves(bytes: &mut [u8], rows: usize, heads: usize) {
    let dim = rows / heads.max(1);
    let Some(row_bytes) = bytes.len().checked_div(rows) else { return };
    if dim < 2 || row_bytes == 0 {
        return;
    }
    for head in bytes.chunks_exact_mut(dim * row_bytes) {
        let from = head.to_vec();
        for (row, to) in head.chunks_exact_mut(row_bytes).enumerate() {
            let (half, index) = (row / (dim / 2), row % (dim / 2));
            to.copy_from_slice(&from[(2 * index + half) * row_bytes..][..row_bytes]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::TensorType;

    #[test]
    fn halves_of_heads_come_together() {
        let mut rows: Vec<u8> = vec![0, 4, 1, 5, 2, 6, 3, 7];
        halves(&mut rows, 8, 1);
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7]);
        let mut rows = vec![0, 2, 1, 3, 4, 6, 5, 7];
        halves(&mut rows, 8, 2);
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn blocks_of_every_type_become_numbers_and_blocks() {
        for kind in [
            TensorType::Q4_0,
            TensorType::Q4_1,
            TensorType::Q5_0,
            TensorType::Q5_1,
            TensorType::Q8_0,
            TensorType::Q4K,
            TensorType::Q5K,
            TensorType::Q6K,
        ] {
            assert!(kind.block().0 > 1);
            let (elements, size) = kind.block();
            // Small scales, so that nothing overflows.
            let bytes: Vec<u8> =
                (0..size).map(|at| if at % 2 == 1 { 0x11 } else { at as u8 }).collect();
            let mut exact = vec![0.0; elements];
            dequantise(kind, &bytes, &mut exact);
            let to = computed_as(kind.name()).expect("a type with kernels");
            let mut blocks = Vec::new();
            assert!(as_blocks(kind, to, &bytes, &mut blocks));
            assert_eq!(blocks.len(), elements / 32 * to.bytes());
            let back = match to {
                BlockKind::Q8_0 => TensorType::Q8_0,
                BlockKind::Q4_0 => TensorType::Q4_0,
                BlockKind::Q4_1 => TensorType::Q4_1,
            };
            let mut rounded = vec![0.0; elements];
            dequantise(back, &blocks, &mut rounded);
            let most = exact.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            for (exact, rounded) in exact.iter().zip(&rounded) {
                assert!((exact - rounded).abs() <= most / 100.0, "{kind:?}: {exact} and {rounded}");
            }
        }
    }
}
