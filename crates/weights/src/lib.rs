//! The contents of a model's files, out of safetensors and GGUF: its description for the brain, its
//! shape, and its tensors.
//!
//! `python/forebay/weights` reads the same files for every family. Here are the decoders and
//! encoders of the hand in Rust. Any other model is [`ModelError::Elsewhere`], with the reason, and
//! the hand in Python serves it. All numbers in files are bounded, and a damaged file is an error.
//!
//! ```
//! use forebay_weights::{ModelError, Shape};
//! use serde_json::{Value, json};
//!
//! let config = json!({
//!     "architectures": ["LlamaForCausalLM"],
//!     "vocab_size": 49_152,
//!     "hidden_size": 576,
//!     "intermediate_size": 1536,
//!     "num_hidden_layers": 30,
//!     "num_attention_heads": 9,
//!     "num_key_value_heads": 3,
//! });
//! let shape = Shape::of(config.as_object().expect("an object"))?;
//! assert_eq!((shape.layers, shape.head_dim), (30, 64));
//!
//! let other = json!({"architectures": ["MambaForCausalLM"]});
//! let error = Shape::of(other.as_object().expect("an object")).unwrap_err();
//! assert!(matches!(error, ModelError::Elsewhere(_)), "a hand in Python may serve it");
//! # Ok::<(), ModelError>(())
//! ```

mod angles;
mod bert;
mod checkpoint;
mod config;
mod describe;
mod error;
mod experts;
mod gguf;
mod json;
mod packed;
mod pooling;
mod safe;
mod sizes;

pub use angles::Angles;
pub use bert::{BertShape, is_bert};
pub use checkpoint::{Blocks, Checkpoint, Number};
pub use config::{Shape, TorchNumber};
pub use describe::{Description, Source, describe};
pub use error::ModelError;
pub use experts::{Experts, Routing};
pub use gguf::{BlockKind, computed_as};
pub use json::python_json;
pub use packed::{Entry, PackedFile, content_key};
