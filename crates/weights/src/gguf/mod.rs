//! GGUF: metadata, the place of each tensor, and the model's `config.json` and `tokenizer.json`,
//! which are made of them.
//!
//! The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

mod blocks;
mod config;
mod file;
mod names;
mod pretokenizers;
mod tokenizer;

pub use blocks::{BlockKind, computed_as};
pub(crate) use blocks::{as_blocks, dequantise};
pub(crate) use config::hf_config;
pub(crate) use file::{GgufFiles, GgufTensor, GgufValue, TensorType};
pub(crate) use names::{layer_of, stored_weights};
pub(crate) use tokenizer::{special_token, tokenizer_json};
