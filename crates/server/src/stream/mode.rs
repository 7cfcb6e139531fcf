//! The ways of a streamed chunk to its socket.

/// How streamed chunks get to their sockets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EgressMode {
    /// The egress thread writes them: prepared events, no wake-up.
    #[default]
    Direct,
    /// The connections' tasks write them: prepared events, one wake-up for all that is pending.
    Tasks,
    /// As servers do it that take every token by itself: a wake-up, a chunk object and a write
    /// each. To measure the others by.
    Naive,
}
