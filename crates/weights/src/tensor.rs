//! The stored values of a tensor, converted to the data types that are used for computing.

use std::sync::Arc;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::error::ModelError;
use crate::families::TensorPart;
use crate::gguf::{BlockKind, GgufTensor, TensorType, as_blocks, computed_as, dequantise};
use crate::mxfp4::{Mxfp4Stack, Placed};
use crate::rows::{FloatRows, Receiver};
use crate::safe::{SafeFile, SafeTensor};

/// The number of elements that are converted at a time. It is a multiple of every type's block.
pub(crate) const AT_ONCE: usize = 1 << 18;

/// The data types that are used for computing, by PyTorch's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TorchNumber {
    /// `torch.float32`
    Float32,
    /// `torch.bfloat16`
    Bfloat16,
}

/// The stored float types.
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
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 => 2,
        }
    }
}

/// A tensor in an open file.
#[derive(Clone)]
pub(crate) enum Tensor {
    Safe(Arc<SafeFile>, SafeTensor),
    Gguf(Arc<GgufTensor>),
    Mxfp4(Arc<Mxfp4Stack>),
}

impl Tensor {
    /// Returns the GGUF name of the block type in which a weight is stored; `None`: the weight is
    /// not in blocks, or its values are changed when it is read.
    pub(crate) fn block_type(&self, part: &TensorPart) -> Option<&'static str> {
        let kind = self.kind()?;
        part.is_rows().then(|| kind.name()).filter(|name| computed_as(name).is_some())
    }

    /// The type of a GGUF or `MXFP4` tensor; `None`: the tensor has plain safetensors values.
    fn kind(&self) -> Option<TensorType> {
        match self {
            Self::Safe(..) => None,
            Self::Gguf(tensor) => Some(tensor.kind),
            Self::Mxfp4(_) => Some(TensorType::Mxfp4),
        }
    }

    /// Reads whole blocks or plain values, starting at element `first`.
    fn read_bytes(&self, first: usize, to: &mut [u8]) -> Result<(), ModelError> {
        match self {
            Self::Safe(file, tensor) => {
                let bytes = first * tensor.dtype.bitsize() / 8;
                file.read(tensor.offset + bytes as u64, to)
            }
            Self::Gguf(tensor) => tensor.read(first, to),
            Self::Mxfp4(stack) => stack.read(first, to),
        }
    }

    /// Checks that all values are finite.
    pub(crate) fn check_finite(&self, name: &str) -> Result<(), ModelError> {
        self.each(name, 0, self.shape().iter().product(), &mut |values| match values
            .iter()
            .all(|value| value.is_finite())
        {
            true => Ok(()),
            false => Err(ModelError::broken(format!("{name} has numbers that are not finite"))),
        })
    }

    /// Reads a matrix as blocks of type `kind`, and appends them to `to`. Returns `None` if the
    /// stored values can't be converted to such blocks.
    pub(crate) fn read_blocks(
        &self,
        part: &TensorPart,
        kind: BlockKind,
        to: &mut Vec<u8>,
    ) -> Result<Option<()>, ModelError> {
        let Some(stored) = self.kind().filter(|_| part.is_rows()) else { return Ok(None) };
        let (elements, size) = stored.block();
        let row_bytes = part.columns() / elements * size;
        let at_once = (AT_ONCE / part.columns().max(1)).max(1);
        let every_nth = part.is_every_nth();
        // Rows that are skipped are read together with the rows around them.
        let (all, together, nth) = if every_nth {
            (part.span(), at_once.next_multiple_of(part.step), part.step)
        } else {
            (part.rows, if part.step == part.width { at_once } else { 1 }, 1)
        };
        let mut bytes = Vec::new();
        let begin = to.len();
        for row in (0..all).step_by(together) {
            bytes.resize(together.min(all - row) * row_bytes, 0);
            let first = if every_nth { part.first + row } else { part.row(row) };
            self.read_bytes((part.base + first) * part.columns(), &mut bytes)?;
            if nth == 1 {
                if !as_blocks(stored, kind, &bytes, to) {
                    return Ok(None);
                }
                continue;
            }
            for row in bytes.chunks_exact(row_bytes.max(1)).step_by(nth) {
                if !as_blocks(stored, kind, row, to) {
                    return Ok(None);
                }
            }
        }
        if let Some(heads) = part.pairs {
            // The order of whole rows changes, so each row's blocks move with it.
            halves(&mut to[begin..], part.rows, heads);
        }
        Ok(Some(()))
    }

    /// Returns the file and range of a safetensors tensor; `None`: it is in another kind of file,
    /// or consists of two tensors.
    pub(crate) fn placed(&self) -> Option<Placed> {
        match self {
            Self::Safe(file, tensor) => Some((file.clone(), tensor.clone())),
            Self::Gguf(_) | Self::Mxfp4(_) => None,
        }
    }

    /// The name of a GGUF tensor.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Safe(..) | Self::Mxfp4(_) => "a tensor",
            Self::Gguf(tensor) => &tensor.name,
        }
    }

    /// The shape that the file states.
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::Safe(_, tensor) => &tensor.shape,
            Self::Gguf(tensor) => &tensor.shape,
            Self::Mxfp4(stack) => &stack.shape,
        }
    }

    /// The size in bytes of this many contiguous values.
    pub(crate) fn bytes_of(&self, name: &str, numbers: usize) -> Result<usize, ModelError> {
        let (elements, bytes) = match self {
            Self::Safe(_, tensor) => (8, tensor.dtype.bitsize()),
            Self::Gguf(tensor) => tensor.kind.block(),
            // Only the codes: the exponents are in a separate tensor.
            Self::Mxfp4(_) => (32, 16),
        };
        let bits = numbers * bytes;
        if !bits.is_multiple_of(elements) || elements > 8 && !numbers.is_multiple_of(elements) {
            return Err(ModelError::broken(format!(
                "{name} does not begin or end at a block of {elements} numbers"
            )));
        }
        Ok(bits / elements)
    }

    /// The name of the stored data type.
    pub(crate) fn type_name(&self) -> String {
        match self {
            Self::Safe(_, tensor) => format!("{:?}", tensor.dtype),
            Self::Gguf(tensor) => tensor.kind.name().to_owned(),
            Self::Mxfp4(_) => TensorType::Mxfp4.name().to_owned(),
        }
    }
}

impl FloatRows for Tensor {
    fn each(
        &self,
        name: &str,
        first: usize,
        count: usize,
        with: &mut Receiver<'_>,
    ) -> Result<(), ModelError> {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for at in (first..first + count).step_by(AT_ONCE) {
            let some = AT_ONCE.min(first + count - at);
            values.resize(some, 0.0);
            match (self, self.kind()) {
                (Self::Safe(_, tensor), _) => {
                    let from = number_of(name, tensor.dtype)?;
                    bytes.resize(some * from.bytes(), 0);
                    self.read_bytes(at, &mut bytes)?;
                    widen(from, &bytes, &mut values);
                }
                (_, None) => {}
                (_, Some(kind)) => {
                    let (elements, size) = kind.block();
                    if !at.is_multiple_of(elements) || !some.is_multiple_of(elements) {
                        return Err(ModelError::broken(format!(
                            "{name} does not begin or end at a block of {elements} numbers"
                        )));
                    }
                    bytes.resize(some / elements * size, 0);
                    self.read_bytes(at, &mut bytes)?;
                    dequantise(kind, &bytes, &mut values);
                }
            }
            with(&values)?;
        }
        Ok(())
    }

    fn copy(&self, first: usize, number: TorchNumber, to: &mut [u8]) -> Result<bool, ModelError> {
        let Self::Safe(file, tensor) = self else { return Ok(false) };
        let same = matches!(
            (tensor.dtype, number),
            (Dtype::F32, TorchNumber::Float32) | (Dtype::BF16, TorchNumber::Bfloat16)
        );
        if same {
            file.read(tensor.offset + (first * number.bytes()) as u64, to)?;
        }
        Ok(same)
    }
}

/// Converts bytes of a safetensors float type to float32.
pub(crate) fn floats(name: &str, dtype: Dtype, bytes: &[u8]) -> Result<Vec<f32>, ModelError> {
    let number = number_of(name, dtype)?;
    let mut values = vec![0.0; bytes.len() / number.bytes()];
    widen(number, bytes, &mut values);
    Ok(values)
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

pub(crate) fn write_numbers(values: impl Iterator<Item = f32>, number: TorchNumber, to: &mut [u8]) {
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

/// Converts stored bytes to float32, given the data type's name in safetensors or GGUF.
pub(crate) fn numbers_of(format: &str, bytes: &[u8]) -> Result<Vec<f32>, ModelError> {
    let number = match format {
        "F64" => Number::Float64,
        "F32" => Number::Float32,
        "F16" => Number::Float16,
        "BF16" => Number::Bfloat16,
        "Q8_0" => {
            let (elements, size) = TensorType::Q8_0.block();
            let mut values = vec![0.0; bytes.len() / size * elements];
            dequantise(TensorType::Q8_0, bytes, &mut values);
            return Ok(values);
        }
        other => return Err(ModelError::broken(format!("a tensor of the type {other}"))),
    };
    let mut values = vec![0.0; bytes.len() / number.bytes()];
    widen(number, bytes, &mut values);
    Ok(values)
}

/// Moves the rows of each head from the order (0, h, 1, h + 1, ...) back to (0, 1, 2, ...). There h
/// is half the number of a head's rows.
pub(crate) fn halves(bytes: &mut [u8], rows: usize, heads: usize) {
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
            TensorType::Q2K,
            TensorType::Q3K,
            TensorType::Iq4Nl,
            TensorType::Iq4Xs,
            TensorType::Iq2Xxs,
            TensorType::Iq2Xs,
            TensorType::Iq2S,
            TensorType::Iq3Xxs,
            TensorType::Iq3S,
            TensorType::Iq1S,
            TensorType::Iq1M,
            TensorType::Tq1_0,
            TensorType::Tq2_0,
            TensorType::Mxfp4,
        ] {
            assert!(kind.block().0 > 1);
            let (elements, size) = kind.block();
            // Small scales, so that no value overflows.
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
                BlockKind::Mxfp4 => TensorType::Mxfp4,
                BlockKind::Iq4Nl => TensorType::Iq4Nl,
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
