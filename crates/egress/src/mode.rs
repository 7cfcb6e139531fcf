//! The ways of a streamed chunk to its socket.

use serde::Serialize;

/// The way of streamed chunks to their sockets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressMode {
    /// The egress thread writes them: prepared events, no wake-up.
    #[default]
    Direct,
    /// The connections' tasks write them: prepared events, one wake-up for all that is pending.
    Tasks,
    /// Every token costs a wake-up, a chunk object and a write, as in servers without batching.
    /// This mode is for comparison.
    Naive,
}
