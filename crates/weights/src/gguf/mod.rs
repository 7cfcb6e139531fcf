//! GGUF: metadata, the place of each tensor, and the model's `tokenizer.json`, which is made of
//! them.
//!
//! The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

mod blocks;
mod file;
mod pretokenizers;
mod tokenizer;

pub use blocks::{BlockKind, computed_as};
pub(crate) use blocks::{as_blocks, dequantise};
pub(crate) use file::{GgufFiles, GgufTensor, GgufValue};
#[cfg(test)]
pub(crate) use file::{TensorType, tests::gguf as gguf_bytes};
pub(crate) use tokenizer::{special_token, tokenizer_json};
