//! How streamed chunks are written to their sockets.

use serde::Serialize;

/// How streamed chunks are written to their sockets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressMode {
    /// Egress threads write prepared events, without waking a task.
    #[default]
    Direct,
    /// Connection tasks write prepared events; one wake-up drains all pending events.
    Tasks,
    /// Every token costs a wake-up, a chunk object and a write, as in servers without batching.
    /// Used for comparison.
    Naive,
}
