//! The types of a model's computation.

use serde::{Deserialize, Serialize};

/// The type of a model's activations, and of prompts of embeddings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision.
    #[default]
    Float32,
    /// The upper half of single precision.
    Bfloat16,
}

impl Dtype {
    /// The name of the type in `config` and `ready`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// The type with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Float32, Self::Bfloat16].into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 => 2,
        }
    }
}
