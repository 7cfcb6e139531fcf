//! The descriptors that the brain has put at fixed numbers for this process, and settings of the
//! system's own interface. This file has all unsafe code of the crate.
#![expect(unsafe_code, reason = "descriptors are numbers before anybody owns them")]

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use forebay_kernels::Shared;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

const SOCKET: i32 = 3;
const ARENA: i32 = 4;

/// The descriptors that the process was started with. They are taken once, before anything else
/// opens a file.
pub(crate) struct Given {
    pub(crate) socket: UnixStream,
    arena: Option<OwnedFd>,
}

impl Given {
    /// Takes the socket and, if there is one, the arena.
    pub(crate) fn take() -> io::Result<Self> {
        // SAFETY: who starts this process puts a socket here, and nothing else in it has opened a
        // descriptor.
        let socket = unsafe { OwnedFd::from_raw_fd(SOCKET) };
        fcntl_setfd(&socket, FdFlags::CLOEXEC)?;
        // SAFETY: as above; where there is none, that is found out before it is used.
        let arena = unsafe { OwnedFd::from_raw_fd(ARENA) };
        let arena = if fcntl_getfd(&arena).is_ok() {
            fcntl_setfd(&arena, FdFlags::CLOEXEC)?;
            Some(arena)
        } else {
            // Nobody's: it must not be closed.
            std::mem::forget(arena);
            None
        };
        Ok(Self { socket: socket.into(), arena })
    }

    /// Maps the arena of `bytes` bytes.
    pub(crate) fn arena(&mut self, bytes: usize) -> io::Result<Shared> {
        match self.arena.take() {
            Some(arena) => Shared::map(arena.as_fd(), bytes),
            None if bytes == 0 => Ok(Shared::none()),
            None => Err(io::Error::other("an arena without memory for it")),
        }
    }
}

/// A terminal sends ^C to the whole session, but it is the brain that decides when its hands go.
pub(crate) fn ignore_interrupts() {
    // SAFETY: no handler runs; the call only sets what the kernel does.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
}
