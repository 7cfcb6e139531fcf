//! GGUF files: metadata, the locations of tensors, and a `tokenizer.json` that is rebuilt from the
//! metadata.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

mod blocks;
mod few_bits;
mod file;
mod grids;
mod pretokenizers;
mod tokenizer;
mod types;

pub use blocks::{BlockKind, computed_as, computed_names};
pub(crate) use blocks::{as_blocks, dequantise};
#[cfg(test)]
pub(crate) use file::tests::gguf as gguf_bytes;
pub(crate) use file::{GgufFiles, GgufTensor, GgufValue};
pub(crate) use tokenizer::{special_token, tokenizer_json};
pub(crate) use types::TensorType;
