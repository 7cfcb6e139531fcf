//! Adapters: low-rank matrices beside some of a model's matrices, and the places for them in a
//! hand's memory.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::columns::record;
use crate::frame::Kind;
use crate::handshake::Message;

/// The adapter is in its place.
pub const PLACE_OK: i32 = 0;
/// The adapter's files can't be read.
pub const PLACE_FAILED_FILES: i32 = 1;
/// The adapter's files have changed since the brain has read them.
pub const PLACE_FAILED_DIGEST: i32 = 2;
/// There is no memory for the adapter.
pub const PLACE_FAILED_MEMORY: i32 = 3;

/// Brain to hand, between any frames after `ready`: an order about an adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum AdapterOrder {
    /// Plans may name this adapter from now on.
    Know {
        /// The number by which plans name it.
        id: u32,
        /// Where its matrices are in files, as the brain has read them.
        manifest: Value,
    },
    /// No later plan names this adapter.
    Forget {
        /// The number of the adapter.
        id: u32,
    },
}

impl Message for AdapterOrder {
    const KIND: Kind = Kind::Adapter;
}

record! {
    /// The end of a write into a place.
    #[derive(Eq)]
    pub struct PlaceEnd {
        /// The number of the write.
        pub ticket: u32,
        /// [`PLACE_OK`], or the reason for a failure.
        pub error: i32,
    }
}
