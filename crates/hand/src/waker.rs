//! Wakes up the engine thread from other threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::Wake;
use rustix::event::{EventfdFlags, eventfd};

/// An eventfd with a flag, so that a burst of wakes costs one system call.
pub(crate) struct EventWaker {
    fd: OwnedFd,
    pending: AtomicBool,
}

impl EventWaker {
    pub(crate) fn new() -> std::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, pending: AtomicBool::new(false) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns true if `wake` was called since the last `take`. Must be called before reading the
    /// data of the waking threads. Data that arrives later then sets the flag again.
    pub(crate) fn take(&self) -> bool {
        self.pending.swap(false, Ordering::AcqRel)
    }

    /// Resets the file descriptor after a poll has found it readable.
    pub(crate) fn clear(&self) {
        let mut count = [0; 8];
        // This thread is the only reader, so the counter is not 0.
        let _ = rustix::io::read(&self.fd, &mut count);
    }
}

impl Wake for EventWaker {
    fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // This fails only if the counter is at its maximum, and then the wait ends anyway.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }
}
