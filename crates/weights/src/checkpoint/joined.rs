//! Weights in which the rows of each head are concatenated from several tensors.

use super::JoinedPart;
use crate::error::ModelError;
use crate::families::TensorPart;
use crate::rows::FloatRows;
use crate::tensor::TorchNumber;

/// Reads a joined weight, converted to the model's data type, into a buffer of its size.
///
/// # Errors
/// The weight's size differs from the buffer's, or a file can't be read.
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
