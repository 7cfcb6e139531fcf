//! Reading GGUF matrices in blocks, and weights in separate files.

use std::sync::Arc;

use super::{Blocks, Checkpoint, EMBEDDING, HEAD};
use crate::error::ModelError;
use crate::families::{TensorPart, Weight};
use crate::gguf::BlockKind;
use crate::safe::SafeFile;
use crate::tensor::Tensor;
use crate::vector::VectorLayer;

impl Checkpoint {
    /// Adds the weights of those layers after pooling that have separate files.
    ///
    /// # Errors
    /// A file can't be read, or lacks a tensor.
    pub fn add_layers(&mut self, layers: &[VectorLayer]) -> Result<(), ModelError> {
        for layer in layers {
            for (name, tensor) in own_tensors(layer)? {
                let (shape, part) = (tensor.shape().to_vec(), TensorPart::whole(tensor.shape()));
                self.insert(Weight { name, shape, part }, tensor);
            }
        }
        Ok(())
    }

    /// Reads a GGUF matrix in blocks of type `kind`, appended to `to`.
    ///
    /// # Errors
    /// The matrix or the conversion does not exist, or the file can't be read.
    pub fn read_blocks(
        &self,
        name: &str,
        kind: BlockKind,
        to: &mut Blocks,
    ) -> Result<(), ModelError> {
        let from = if self.tied && name == HEAD { EMBEDDING } else { name };
        let (tensor, part) = self.one(name, from)?;
        tensor.read_blocks(part, kind, to)?.ok_or_else(|| no_conversion(name, tensor, kind))
    }

    /// Reads a GGUF matrix as [`Self::read_blocks`] does, but into a buffer of the matrix's size.
    /// Additional memory is needed for about 16 MiB of rows, or for all rows if they are reordered
    /// or skipped.
    ///
    /// # Errors
    /// As for [`Self::read_blocks`], or the matrix has another size.
    pub fn read_block_rows(
        &self,
        name: &str,
        kind: BlockKind,
        to: &mut [u8],
    ) -> Result<(), ModelError> {
        const AT_ONCE: usize = 1 << 24;
        let (tensor, part) = self.one(name, name)?;
        let row_bytes = (to.len() / part.rows.max(1)).max(1);
        // If rows are reordered or skipped, all rows are read together.
        let in_order = part.step == part.width && part.pairs.is_none();
        let together = if in_order { (AT_ONCE / row_bytes).max(1) } else { part.rows.max(1) };
        let mut blocks = Vec::new();
        for (band, to) in to.chunks_mut(together * row_bytes).enumerate() {
            let (first, rows) = (part.first + band * together, to.len() / row_bytes);
            blocks.clear();
            tensor
                .read_blocks(&TensorPart { first, rows, ..*part }, kind, &mut blocks)?
                .ok_or_else(|| no_conversion(name, tensor, kind))?;
            if blocks.len() != to.len() {
                return Err(ModelError::broken(format!(
                    "{name} has another size in the model's files"
                )));
            }
            to.copy_from_slice(&blocks);
        }
        Ok(())
    }
}

/// Opens a layer's separate file, and maps the layer's weights to the file's tensors. Returns an
/// empty list if the layer has no such file.
pub(crate) fn own_tensors(layer: &VectorLayer) -> Result<Vec<(String, Tensor)>, ModelError> {
    let Some(path) = &layer.file else { return Ok(Vec::new()) };
    let file = Arc::new(SafeFile::open(path)?);
    let kinds = ["weight", "bias"].into_iter().take(1 + usize::from(layer.bias));
    let found = kinds.map(|kind| {
        let tensor = file.tensors.get(&format!("linear.{kind}")).ok_or_else(|| {
            ModelError::broken(format!("{} has no linear.{kind}", path.display()))
        })?;
        Ok((format!("{}.{kind}", layer.name), Tensor::Safe(Arc::clone(&file), tensor.clone())))
    });
    found.collect()
}

fn no_conversion(name: &str, tensor: &Tensor, kind: BlockKind) -> ModelError {
    ModelError::elsewhere(format!("{name} of the type {} as {kind:?}", tensor.type_name()))
}
