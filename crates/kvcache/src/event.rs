//! Events of a replica's tiers, for others: which blocks they hold.

use crate::hash::BlockHash;

/// The tiers that hold a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device's memory only.
    Device,
    /// The host's memory only.
    Host,
    /// Both.
    Both,
}

/// A change of what the tiers hold. Who applies all of them in order knows their blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockEvent {
    /// This block is in these tiers from now on, or will be when the steps that are planned by now
    /// are done. It may have been there before.
    Stored(BlockHash, Place),
    /// No tier holds it any more. It may have come and gone since events were taken last.
    Dropped(BlockHash),
    /// No tier holds any block.
    Cleared,
}
