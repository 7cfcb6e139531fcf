//! Access to the memory of a host tier from this process.

use std::fmt::Debug;
use std::io;

/// The memory of a host tier. Hands copy from and to its pages. docs/protocol.md describes its
/// layout. A reader of a page holds a [`crate::Loan`] of it. Pages for blocks of other servers are
/// written only by this process.
pub trait TierMemory: Debug + Send + Sync {
    /// The size in bytes; 0 until a hand or [`Self::grow`] has allocated the memory.
    ///
    /// # Errors
    /// The system call fails.
    fn bytes(&self) -> io::Result<u64>;
    /// Makes the memory at least this many bytes long. New bytes are 0; the system allocates memory
    /// for them when they are written.
    ///
    /// # Errors
    /// The system call fails.
    fn grow(&self, bytes: u64) -> io::Result<()>;
    /// Reads `into.len()` bytes from byte `at` on.
    ///
    /// # Errors
    /// The memory ends before the last of these bytes, or the system call fails.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes `bytes` at byte `at`.
    ///
    /// # Errors
    /// The system has no memory for the bytes.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
}
