//! The weights of a model under their Hugging Face names, one at a time, from safetensors or GGUF.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use half::{bf16, f16};
use safetensors::Dtype;

use crate::bert::BertShape;
use crate::config::{Shape, TorchNumber};
use crate::error::ModelError;
use crate::gguf::{
    BlockKind, GgufFiles, GgufTensor, TensorType, computed_as, layer_of, stored_weights,
};
use crate::gguf::{as_blocks, dequantise};
use crate::safe::{SafeFile, SafeTensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// Elements that are converted at a time.
const AT_ONCE: usize = 1 << 18;

/// The types of stored numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// `F32`
    Float32,
    /// `F16`
    Float16,
    /// `BF16`
    Bfloat16,
}

/// Whole blocks of a matrix, in the type of a GGUF file or in another type of blocks.
pub type Blocks = Vec<u8>;

/// The open files of a model. Only their headers are read.
pub struct Checkpoint {
    files: Files,
    /// Name to shape, of every weight that the model has.
    shapes: HashMap<String, Vec<usize>>,
}

enum Files {
    Safe(Vec<SafeFile>),
    Gguf(Box<Gguf>),
}

/// A weight that is rows of a tensor.
struct Part {
    tensor: Arc<GgufTensor>,
    shape: Vec<usize>,
    first: usize,
    rows: usize,
}

struct Gguf {
    weights: HashMap<String, Part>,
    /// The names, in the order of the files.
    names: Vec<String>,
    /// Query heads and key heads, whose halves the llama converter makes alternate, as the original
    /// Llama code did.
    permuted: Option<(usize, usize)>,
    tied: bool,
}

impl Checkpoint {
    /// Opens the files of a model in the format `safetensors` or `gguf`.
    ///
    /// # Errors
    /// A file that can't be read or is damaged.
    pub fn open(format: &str, files: &[PathBuf], shape: &Shape) -> Result<Self, ModelError> {
        match format {
            "safetensors" => {
                let mut files: Vec<SafeFile> =
                    files.iter().map(|path| SafeFile::open(path)).collect::<Result<_, _>>()?;
                if shape.headless {
                    files.iter_mut().for_each(root);
                }
                let mut shapes = HashMap::new();
                for (name, tensor) in files.iter().flat_map(|file| &file.tensors) {
                    // Old Llama checkpoints carry the inverse frequencies of the rotary embedding
                    // as a buffer.
                    let spare = (shape.has_spare_head() && name == HEAD)
                        || name.ends_with(".rotary_emb.inv_freq");
                    let spare =
                        spare || layer_of(name).is_some_and(|layer| !shape.has_place_for(layer));
                    if !spare {
                        shapes.insert(name.clone(), tensor.shape.clone());
                    }
                }
                Ok(Self { files: Files::Safe(files), shapes })
            }
            "gguf" => {
                let files = GgufFiles::open(files)?;
                let stored = stored_weights(&files, shape)?;
                let permuted =
                    (files.architecture() == "llama").then_some((shape.heads, shape.kv_heads));
                let names: Vec<String> = stored.iter().map(|stored| stored.name.clone()).collect();
                // One for all experts of a layer.
                let mut tensors: HashMap<&str, Arc<GgufTensor>> = HashMap::new();
                let mut weights = HashMap::new();
                for stored in &stored {
                    let tensor = tensors
                        .entry(&stored.tensor.name)
                        .or_insert_with(|| Arc::new(stored.tensor.clone()));
                    let (tensor, shape) = (tensor.clone(), stored.shape.clone());
                    let rows = shape.iter().rev().skip(1).product();
                    let part = Part { tensor, shape, first: stored.first, rows };
                    weights.insert(stored.name.clone(), part);
                }
                let shape_of = |name: &String| (name.clone(), weights[name].shape.clone());
                let kept = |name: &&String| !(shape.headless && *name == HEAD);
                let shapes = names.iter().filter(kept).map(shape_of).collect();
                let tied = shape.tied && !shape.headless;
                Ok(Self {
                    files: Files::Gguf(Box::new(Gguf { weights, names, permuted, tied })),
                    shapes,
                })
            }
            other => Err(ModelError::elsewhere(format!("the model format '{other}'"))),
        }
    }

    /// Opens the safetensors of a BERT, whose weights go by their names in the encoder. `scores` is
    /// true if it has layers that make scores of vectors.
    ///
    /// # Errors
    /// A file cannot be read, or is damaged.
    pub fn of_bert(files: &[PathBuf], scores: bool) -> Result<Self, ModelError> {
        let mut shapes = HashMap::new();
        let mut opened = Vec::new();
        for path in files {
            let mut file = SafeFile::open(path)?;
            let tensors = file.tensors.drain();
            let named =
                tensors.filter_map(|(name, it)| Some((BertShape::name_of(&name, scores)?, it)));
            file.tensors = named.collect();
            shapes.extend(file.tensors.iter().map(|(name, it)| (name.clone(), it.shape.clone())));
            opened.push(file);
        }
        Ok(Self { files: Files::Safe(opened), shapes })
    }

    /// The shape of every weight, by name. A head that is tied to the embedding has no entry.
    #[must_use]
    pub fn shapes(&self) -> &HashMap<String, Vec<usize>> {
        &self.shapes
    }

    /// The names of matrices with products in blocks, and GGUF's names of their types. A tied head
    /// is the embedding's tensor under a name of its own.
    #[must_use]
    pub fn stored(&self) -> Vec<(String, &'static str)> {
        let Files::Gguf(gguf) = &self.files else { return Vec::new() };
        let kind_of = |name: &str| gguf.weights.get(name).map(|part| part.tensor.kind.name());
        let mut found: Vec<(String, &'static str)> = gguf
            .names
            .iter()
            .filter(|&name| name != EMBEDDING)
            .filter_map(|name| Some((name.clone(), kind_of(name)?)))
            .collect();
        if gguf.tied {
            found.extend(kind_of(EMBEDDING).map(|kind| (HEAD.to_owned(), kind)));
        }
        found.retain(|(_, kind)| computed_as(kind).is_some());
        found
    }

    /// Reads a weight as numbers of the model's type, into memory of its size.
    ///
    /// # Errors
    /// There is no such weight, it has another size, or its file can't be read.
    pub fn read(&self, name: &str, number: TorchNumber, to: &mut [u8]) -> Result<(), ModelError> {
        match &self.files {
            Files::Safe(files) => {
                let found = files.iter().find_map(|file| Some((file, file.tensors.get(name)?)));
                let (file, tensor) = found.ok_or_else(|| lacks(name))?;
                read_safe(name, file, tensor, number, to)
            }
            Files::Gguf(gguf) => gguf.read(name, number, to),
        }
    }

    /// Reads a matrix of GGUF in blocks of type `kind`, appended to `to`.
    ///
    /// # Errors
    /// There is no such matrix or no such conversion, or its file can't be read.
    pub fn read_blocks(
        &self,
        name: &str,
        kind: BlockKind,
        to: &mut Blocks,
    ) -> Result<(), ModelError> {
        let Files::Gguf(gguf) = &self.files else { return Err(lacks(name)) };
        let from = if gguf.tied && name == HEAD { EMBEDDING } else { name };
        let &Part { ref tensor, first: before, rows, .. } =
            gguf.weights.get(from).ok_or_else(|| lacks(name))?;
        let step = (AT_ONCE / tensor.columns().max(1)).max(1);
        let mut bytes = Vec::new();
        let begin = to.len();
        for first in (0..rows).step_by(step) {
            bytes.resize(step.min(rows - first) * tensor.row_bytes, 0);
            tensor.read(before + first, &mut bytes)?;
            if !as_blocks(tensor.kind, kind, &bytes, to) {
                let what = format!("{name} of the type {} as {kind:?}", tensor.kind.name());
                return Err(ModelError::elsewhere(what));
            }
        }
        if let Some(heads) = gguf.permuted_heads(from) {
            // A row's blocks go where the row goes.
            halves(&mut to[begin..], rows, heads);
        }
        Ok(())
    }
}

/// Names the parts of a body as if it had a head beside it: without one, they may be saved as they
/// are.
fn root(file: &mut SafeFile) {
    let rooted = |name: String| match name.starts_with("model.") || name.starts_with("lm_head.") {
        true => name,
        false => format!("model.{name}"),
    };
    file.tensors = file.tensors.drain().map(|(name, it)| (rooted(name), it)).collect();
}

fn lacks(name: &str) -> ModelError {
    ModelError::broken(format!("the checkpoint lacks {name}"))
}

impl Gguf {
    /// The heads of a weight whose halves alternate.
    fn permuted_heads(&self, name: &str) -> Option<usize> {
        let (heads, kv_heads) = self.permuted?;
        if name.contains(".q_proj.") {
            Some(heads)
        } else {
            name.contains(".k_proj.").then_some(kv_heads)
        }
    }

    fn read(&self, name: &str, number: TorchNumber, to: &mut [u8]) -> Result<(), ModelError> {
        let &Part { ref tensor, ref shape, first: before, rows: all } =
            self.weights.get(name).ok_or_else(|| lacks(name))?;
        let (width, size) = (tensor.columns(), bytes_of(number));
        if to.len() != all * width * size {
            return Err(ModelError::broken(format!("{name} has another size in the GGUF file")));
        }
        let step = (AT_ONCE / width.max(1)).max(1);
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for first in (0..all).step_by(step) {
            let rows = step.min(all - first);
            bytes.resize(rows * tensor.row_bytes, 0);
            values.resize(rows * width, 0.0);
            tensor.read(before + first, &mut bytes)?;
            dequantise(tensor.kind, &bytes, &mut values);
            let to = &mut to[first * width * size..][..rows * width * size];
            write_numbers(values.iter().copied(), number, to);
        }
        if let Some(heads) = self.permuted_heads(name) {
            let outputs = shape.first().copied().unwrap_or(1);
            halves(to, outputs, heads);
        }
        Ok(())
    }
}

fn bytes_of(number: TorchNumber) -> usize {
    match number {
        TorchNumber::Float32 => 4,
        TorchNumber::Bfloat16 => 2,
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

fn read_safe(
    name: &str,
    file: &SafeFile,
    tensor: &SafeTensor,
    number: TorchNumber,
    to: &mut [u8],
) -> Result<(), ModelError> {
    let from = match tensor.dtype {
        Dtype::F32 => Number::Float32,
        Dtype::F16 => Number::Float16,
        Dtype::BF16 => Number::Bfloat16,
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => {
            return Err(ModelError::broken(format!(
                "{name} has 8-bit floats, and the checkpoint has no quantization_config"
            )));
        }
        other => return Err(ModelError::elsewhere(format!("{name} of the type {other:?}"))),
    };
    let width = if from == Number::Float32 { 4 } else { 2 };
    let elements = tensor.bytes / width;
    if to.len() != elements * bytes_of(number) {
        return Err(ModelError::broken(format!("{name} has another size in the checkpoint")));
    }
    let same = matches!(
        (from, number),
        (Number::Float32, TorchNumber::Float32) | (Number::Bfloat16, TorchNumber::Bfloat16)
    );
    if same {
        return file.read(tensor.offset, to);
    }
    let mut bytes = Vec::new();
    for first in (0..elements).step_by(AT_ONCE) {
        let count = AT_ONCE.min(elements - first);
        bytes.resize(count * width, 0);
        file.read(tensor.offset + (first * width) as u64, &mut bytes)?;
        let to = &mut to[first * bytes_of(number)..][..count * bytes_of(number)];
        let (twos, _) = bytes.as_chunks::<2>();
        match from {
            Number::Float32 => {
                let values =
                    bytes.as_chunks::<4>().0.iter().map(|&value| f32::from_le_bytes(value));
                write_numbers(values, number, to);
            }
            Number::Float16 => {
                write_numbers(
                    twos.iter().map(|&value| f16::from_le_bytes(value).to_f32()),
                    number,
                    to,
                );
            }
            Number::Bfloat16 => {
                write_numbers(
                    twos.iter().map(|&value| bf16::from_le_bytes(value).to_f32()),
                    number,
                    to,
                );
            }
        }
    }
    Ok(())
}

impl TensorType {
    /// True if the numbers are blocks of integers with scales.
    #[cfg(test)]
    fn is_block(self) -> bool {
        self.block().0 > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(kind.is_block());
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
