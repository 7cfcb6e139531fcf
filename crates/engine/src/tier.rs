//! The memory of a host tier, as this process reads and writes it.

use std::fmt::Debug;
use std::io;

/// The bytes of a host tier, whose pages hands copy from and to. Its parts are described in
/// docs/protocol.md. Whoever reads a page holds a [`crate::Loan`] of it. Nobody but this process
/// writes to memory for pages from other servers.
pub trait TierMemory: Debug + Send + Sync {
    /// The size in bytes; 0 until a hand, or [`Self::grow`], has made the memory larger.
    ///
    /// # Errors
    /// The system call fails.
    fn bytes(&self) -> io::Result<u64>;
    /// Makes the memory this many bytes long, if it is shorter. New bytes are 0, and are taken from
    /// the system when they are written.
    ///
    /// # Errors
    /// The system refuses it.
    fn grow(&self, bytes: u64) -> io::Result<()>;
    /// Reads from byte `at` on.
    ///
    /// # Errors
    /// The bytes are not all there.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes from byte `at` on.
    ///
    /// # Errors
    /// The system has no memory for the bytes.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
}
