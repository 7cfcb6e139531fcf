//! Weights in which the rows of each head come from several tensors in turn.

use super::JoinedPart;
use crate::error::ModelError;
use crate::families::TensorPart;
use crate::rows::FloatRows;
use crate::tensor::TorchNumber;

/// Reads a weight made of stacks of heads as numbers of the model's type, into memory of its size.
///
/// # Errors
/// It has another size, or a file can't be read.
pub(super) fn read_joined(
    name: &str,
    parts: &[JoinedPart],
    number: TorchNumber,
    to: &mut [u8],
) -> Result<(), ModelError> {
    let elements = |shape: &[usize]| shape[1] * shape[2] * number.bytes();
    let of_head: usize = parts.iter().map(|(.., shape)| elements(shape)).sum();
    let heads = parts.first().map_or(0, |(.., shape)| shape[0]);
    if to.len() != heads * of_head {
        return Err(ModelError::broken(format!("{name} has another size in the model's files")));
    }
    for (head, mut to) in to.chunks_exact_mut(of_head.max(1)).enumerate() {
        for (tensor, part, shape) in parts {
            let (own, rest) = to.split_at_mut(elements(shape));
            let base = part.base + head * part.matrix[0];
            let part = TensorPart { base, rows: shape[1], ..*part };
            tensor.read(name, &part, number, own)?;
            to = rest;
        }
    }
    Ok(())
}
