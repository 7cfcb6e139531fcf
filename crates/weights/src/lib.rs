//! What the files of a model say: its description for the brain, its shape, and its tensors, out of
//! safetensors and GGUF.
//!
//! `python/forebay/weights` reads the same files for every family; here are the dense decoders and
//! the encoders that the compiled kernels compute. Whatever is beyond them is
//! [`ModelError::Elsewhere`], with the reason, and the hand in Python serves it. Files are read
//! with bounds on everything that they say: a damaged one is an error.

mod angles;
mod bert;
mod checkpoint;
mod config;
mod describe;
mod error;
mod gguf;
mod json;
mod packed;
mod pooling;
mod safe;

pub use angles::Angles;
pub use bert::{BertShape, is_bert};
pub use checkpoint::{Blocks, Checkpoint, Number};
pub use config::{Shape, TorchNumber};
pub use describe::{Description, Source, describe};
pub use error::ModelError;
pub use gguf::{BlockKind, computed_as};
pub use json::python_json;
pub use packed::{Entry, PackedFile, content_key};
