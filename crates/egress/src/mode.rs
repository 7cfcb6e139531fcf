//! The ways in which a streamed chunk reaches its socket.

use serde::Serialize;

/// The way of streamed chunks to their sockets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressMode {
    /// Egress threads write prepared events, without waking a task.
    #[default]
    Direct,
    /// Connection tasks write prepared events; one wake-up drains all pending ones.
    Tasks,
    /// Every token costs a wake-up, a chunk object and a write, as in servers without batching. For
    /// comparison.
    Naive,
}
