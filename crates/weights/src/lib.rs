//! Reads a model's files, in safetensors and GGUF: a description for the brain, the model's shape,
//! and its tensors.
//!
//! [`families`] contains every family of decoders that a hand serves. For other models, reading
//! fails with [`ModelError::Unserved`] and the reason. All sizes in files are checked, and a
//! damaged file is an error. Hands get [`ModelShape`] and [`Manifest`], and read no other
//! description.
//!
//! ```
//! use forebay_weights::{Mixer, ModelError, Shape};
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
//! let shape = Shape::from_config(config.as_object().expect("an object"))?;
//! let Mixer::Attention(attention) = shape.mixer(0) else { unreachable!("Llama attends") };
//! assert_eq!((shape.layers.len(), attention.head_dim), (30, 64));
//!
//! let other = json!({"architectures": ["MambaForCausalLM"]});
//! let error = Shape::from_config(other.as_object().expect("an object")).unwrap_err();
//! assert!(matches!(error, ModelError::Unserved(_)), "no hand serves it");
//! # Ok::<(), ModelError>(())
//! ```

mod adapter;
mod angles;
mod bert;
mod checkpoint;
mod describe;
mod error;
pub mod families;
mod gguf;
mod heads;
mod json;
mod manifest;
mod model;
mod mxfp4;
mod overlay;
mod packed;
mod parameter;
mod pooling;
mod quantised;
mod rows;
mod safe;
mod sizes;
mod stored;
mod tensor;
mod vector;
mod vision;

pub use adapter::{Adapter, AdapterError, AdapterFolder, AdapterPair, read_adapter};
pub use angles::Angles;
pub use bert::{BertShape, is_bert};
pub use checkpoint::{Blocks, Checkpoint};
pub use describe::{Description, Source, describe};
pub use error::ModelError;
pub use families::{
    Activation, Attention, DenseFeed, ExpertScores, Experts, Family, FeedShape, Indexer, KeyChoice,
    Latent, LayerInputs, LayerShape, Mixer, Norm, NormPlacement, QkNorm, QueryScale, Recurrence,
    Rope, RotarySections, Routing, RowBlocks, Rule, Scales, Shape, StateNorm, Take,
};
pub use gguf::{BlockKind, computed_as, computed_names};
pub use heads::DraftHead;
pub use json::read_json;
pub use manifest::Manifest;
pub use model::ModelShape;
pub use overlay::ServedCheckpoint;
pub use packed::{Entry, PackedFile, content_digest, content_key};
pub use parameter::{ParameterRows, read_parameter};
pub use quantised::{CodePacking, Int4Storage, Quantisation, Scheme};
pub use stored::{StoredWeights, stored_weights};
pub use tensor::TorchNumber;
pub use vector::{VectorActivation, VectorLayer, weight_files};
pub use vision::{TowerKind, VisionTower};
