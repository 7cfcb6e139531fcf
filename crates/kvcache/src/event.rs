//! Changes of the blocks that a replica's tiers hold, for external readers.

use crate::hash::BlockHash;

/// The tiers that hold a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device's memory only.
    Device,
    /// The host's memory only.
    Host,
    /// The device's memory and the host's memory.
    Both,
}

/// A change of the tiers' content. A reader that applies all events in order can list the blocks of
/// the tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockEvent {
    /// The block is in these tiers from now on, or will be when the planned steps are done. An
    /// earlier event may have stated the same.
    Stored(BlockHash, Place),
    /// No tier holds the block any more. It may have been stored and dropped since the last events
    /// were taken.
    Dropped(BlockHash),
    /// No tier holds any block.
    Cleared,
}
