//! The header of a file of packed weights, and the reasons for which a file is not used.

use std::collections::HashMap;
use std::io;

use serde_json::{Map, Value};

/// The data type and shape of a tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The data type: `BF16`, `F32` or `U8`.
    pub dtype: String,
    /// The shape in elements.
    pub shape: Vec<usize>,
}

impl Entry {
    /// The number of bytes of the tensor; `None`: the type is unknown, or the size overflows.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        let width = match self.dtype.as_str() {
            "BF16" => 2,
            "F32" => 4,
            "U8" => 1,
            _ => return None,
        };
        self.shape.iter().try_fold(width, |bytes: usize, &size| bytes.checked_mul(size))
    }
}

/// The location of a tensor in a file, and the checksums of its chunks.
pub(super) struct Place {
    pub(super) entry: Entry,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) sums: Vec<u32>,
}

/// The parsed header of a file.
pub(super) struct Header {
    pub(super) notes: Map<String, Value>,
    pub(super) places: HashMap<String, Place>,
    pub(super) chunk: usize,
}

/// Why a file is not used.
pub(super) enum Fault {
    /// The header does not match the file's name.
    Header(String),
    /// The header matches the name, but the data does not match the header.
    Data(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Header(error.to_string())
    }
}
