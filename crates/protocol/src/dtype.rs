//! The data types of a model's computation.

use serde::{Deserialize, Serialize};

/// The data type of a model's activations, and of prompts given as embeddings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 single precision.
    #[default]
    Float32,
    /// bfloat16, the upper half of single precision.
    Bfloat16,
}

impl Dtype {
    /// Returns the name of the type in `config` and `ready`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// Returns the type with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Float32, Self::Bfloat16].into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the size of an element in bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Bfloat16 => 2,
        }
    }
}
