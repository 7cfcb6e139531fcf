//! Adapters: low-rank matrices beside some of a model's, and the places in a hand's memory for them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::columns::record;
use crate::frame::Kind;
use crate::handshake::Message;
use crate::plan::StepPlan;

/// The report of an adapter that is in its place.
pub const PLACE_OK: i32 = 0;
/// The report of an adapter whose files can't be read.
pub const PLACE_FAILED_FILES: i32 = 1;
/// The report of an adapter whose files have other content than the brain has read.
pub const PLACE_FAILED_DIGEST: i32 = 2;
/// The report of an adapter for which there is no memory.
pub const PLACE_FAILED_MEMORY: i32 = 3;

/// The memory of a hand for adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceConfig {
    /// The number of places: adapters that a step may use.
    pub places: u32,
    /// The largest rank of an adapter.
    pub rank: u32,
    /// The number of further adapters that the hand keeps in the host's memory.
    pub kept: u32,
}

impl Default for PlaceConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self { places: 8, rank: 64, kept: 32 }
    }
}

/// Brain to hand, between any frames after `ready`: an order about an adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum AdapterOrder {
    /// Plans may name this adapter from now on.
    Know {
        /// The number by which plans name it.
        id: u32,
        /// The places of its matrices in files, as the brain has read them.
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
    /// A place that gets an adapter.
    #[derive(Eq)]
    pub struct PlaceWrite {
        /// The number of the write, which the report of its end names.
        pub ticket: u32,
        /// The place.
        pub place: u32,
        /// The number of the adapter.
        pub id: u32,
    }
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

impl StepPlan {
    /// Has a place get an adapter. No slot names the place before the end was reported.
    pub fn write_place(&mut self, write: PlaceWrite) {
        self.place_writes.push(write);
    }

    /// The writes into places, in order.
    pub fn place_writes(&self) -> &[PlaceWrite] {
        &self.place_writes
    }

    /// True if no number of a place is negative.
    pub(crate) fn places_agree(&self) -> bool {
        let whole = |write: &PlaceWrite| {
            [write.ticket, write.place, write.id].iter().all(|number| number.cast_signed() >= 0)
        };
        self.place_writes.iter().all(whole)
    }
}
