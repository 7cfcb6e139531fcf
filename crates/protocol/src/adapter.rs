//! Adapters: low-rank matrices that are added to some of a model's matrices, and the places for
//! them in a hand's memory.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::columns::record;
use crate::frame::Kind;
use crate::handshake::Message;

/// The adapter was loaded into its place.
pub const PLACE_OK: i32 = 0;
/// The adapter's files cannot be read.
pub const PLACE_FAILED_FILES: i32 = 1;
/// The adapter's files have changed since the brain read them.
pub const PLACE_FAILED_DIGEST: i32 = 2;
/// There is not enough memory for the adapter.
pub const PLACE_FAILED_MEMORY: i32 = 3;

/// Brain to hand, between any frames after `ready`: announces or removes an adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum AdapterOrder {
    /// Plans may name this adapter from now on.
    Know {
        /// The id of the adapter in plans.
        id: u32,
        /// Where the adapter's matrices are in its files, as read by the brain.
        manifest: Value,
    },
    /// No later plan uses this adapter.
    Forget {
        /// The id of the adapter.
        id: u32,
    },
}

impl Message for AdapterOrder {
    const KIND: Kind = Kind::Adapter;
}

record! {
    /// Reports that a write into a place has ended.
    #[derive(Eq)]
    pub struct PlaceEnd {
        /// The ticket of the write.
        pub ticket: u32,
        /// [`PLACE_OK`], or the reason why the write failed.
        pub error: i32,
    }
}
