//! The descriptors that the brain passes at fixed numbers, page memory that copies access in
//! parallel with the steps, and process settings. This file has all the unsafe code of the crate.
#![expect(unsafe_code, reason = "descriptors are numbers, and pages addresses, of others too")]

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;

use forebay_kernels::{Room, Shared};
use rustix::fs::{FileType, fstat};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

const SOCKET: i32 = 3;
const ARENA: i32 = 4;
const HOST: i32 = 5;

/// The descriptors with which the process was started. They are taken once, before any other code
/// opens a file.
pub(crate) struct Given {
    pub(crate) socket: UnixStream,
    arena: Option<OwnedFd>,
    host: Option<OwnedFd>,
}

/// The files with the pages of host tiers.
pub(crate) struct HostFiles {
    /// The file of the hand's own tier.
    pub(crate) own: OwnedFd,
    /// The files of other replicas, by replica number; `None` if that replica lends nothing.
    pub(crate) lenders: Vec<Option<OwnedFd>>,
}

impl Given {
    /// Takes the socket, and the arena and the host tier's file if they exist.
    pub(crate) fn take() -> io::Result<Self> {
        // SAFETY: the parent of this process passes a socket at this number, and no other code in
        // the process has opened a descriptor yet.
        let socket = unsafe { OwnedFd::from_raw_fd(SOCKET) };
        fcntl_setfd(&socket, FdFlags::CLOEXEC)?;
        Ok(Self { socket: socket.into(), arena: taken(ARENA)?, host: taken(HOST)? })
    }

    /// Maps the arena of `bytes` bytes.
    pub(crate) fn arena(&mut self, bytes: usize) -> io::Result<Shared> {
        match self.arena.take() {
            Some(arena) => Shared::map(arena.as_fd(), bytes),
            None if bytes == 0 => Ok(Shared::none()),
            None => Err(io::Error::other("an arena without memory for it")),
        }
    }

    /// The files of host tiers, with the descriptors that the configuration names for lenders.
    /// `None` if the hand has no host tier. Call this once, before any other code opens a file.
    pub(crate) fn host_files(&mut self, lenders: &[Option<u32>]) -> io::Result<Option<HostFiles>> {
        let Some(own) = self.host.take() else { return Ok(None) };
        let mut seen = Vec::new();
        let mut lender = |number: Option<u32>| -> io::Result<Option<OwnedFd>> {
            let Some(number) = number else { return Ok(None) };
            let there = i32::try_from(number).ok().filter(|&it| it > HOST && !seen.contains(&it));
            let none = || io::Error::other(format!("descriptor {number} is no file of a lender"));
            let number = there.ok_or_else(none)?;
            seen.push(number);
            let file = taken(number)?.ok_or_else(none)?;
            if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
                // The descriptor belongs to other code in this process, which closes it.
                std::mem::forget(file);
                return Err(none());
            }
            Ok(Some(file))
        };
        let lenders = lenders.iter().map(|&number| lender(number)).collect::<io::Result<_>>()?;
        Ok(Some(HostFiles { own, lenders }))
    }
}

/// Takes a descriptor that the brain may have passed.
fn taken(number: i32) -> io::Result<Option<OwnedFd>> {
    // SAFETY: nothing else in this process owns this descriptor, and its existence is checked
    // before it is used.
    let file = unsafe { OwnedFd::from_raw_fd(number) };
    if fcntl_getfd(&file).is_err() {
        // The descriptor is not owned here, so it must not be closed.
        std::mem::forget(file);
        return Ok(None);
    }
    fcntl_setfd(&file, FdFlags::CLOEXEC)?;
    Ok(Some(file))
}

/// The pages of all layers. Copies read and write single pages while steps compute with other
/// pages. The brain keeps the two apart: no plan in flight names a page that is being restored, and
/// no row writes to a page that is being saved.
pub(crate) struct PageMemory {
    /// For each part, the address of its first page, and the bytes per page.
    parts: Vec<(NonNull<u8>, usize)>,
    pages: usize,
    /// Keeps the memory mapped.
    _memory: Room,
}

// SAFETY: the memory belongs to no thread, and the type's documentation states who may access it.
unsafe impl Send for PageMemory {}

impl PageMemory {
    /// Creates the memory of `rooms`. Each room holds one part of all `pages` pages, or is empty.
    /// `memory` is a further room from the same call of [`Room::parts`], and keeps all rooms
    /// mapped.
    pub(crate) fn new<'a>(
        rooms: impl IntoIterator<Item = &'a mut Room>,
        pages: usize,
        memory: Room,
    ) -> Self {
        let of = |room: &mut Room| {
            let bytes = room.len() / pages.max(1);
            Some((NonNull::new(room.as_mut_ptr())?, bytes)).filter(|_| bytes > 0)
        };
        Self { parts: rooms.into_iter().filter_map(of).collect(), pages, _memory: memory }
    }

    /// Bytes of a page, over all parts.
    pub(crate) fn page_bytes(&self) -> usize {
        self.parts.iter().map(|&(_, bytes)| bytes).sum()
    }

    /// All parts of a page; `None` if the page does not exist. No row may write to the page
    /// meanwhile.
    pub(crate) fn read(&self, page: u32) -> Option<Vec<&[u8]>> {
        let part = |(first, bytes): (*mut u8, usize)| {
            // SAFETY: `places` checks that this is inside the room, and no thread writes there at
            // present.
            unsafe { std::slice::from_raw_parts(first, bytes) }
        };
        Some(self.places(page)?.map(part).collect())
    }

    /// All parts of a page; `None` if the page does not exist. No row may read or write the page
    /// meanwhile.
    pub(crate) fn write(&mut self, page: u32) -> Option<Vec<&mut [u8]>> {
        let part = |(first, bytes): (*mut u8, usize)| {
            // SAFETY: `places` checks that this is inside the room, and no other code uses this
            // page at present.
            unsafe { std::slice::from_raw_parts_mut(first, bytes) }
        };
        Some(self.places(page)?.map(part).collect())
    }

    fn places(&self, page: u32) -> Option<impl Iterator<Item = (*mut u8, usize)>> {
        let page = usize::try_from(page).ok().filter(|&page| page < self.pages)?;
        // SAFETY: each room has this many pages, and the mapping lives as long as `_memory`.
        let at = move |&(first, bytes): &(NonNull<u8>, usize)| unsafe {
            (first.as_ptr().add(page * bytes), bytes)
        };
        Some(self.parts.iter().map(at))
    }
}

/// Ignores SIGINT: a terminal sends ^C to the whole session, but the brain decides when its hands
/// exit.
pub(crate) fn ignore_interrupts() {
    // SAFETY: the call installs no handler; it only makes the kernel ignore the signal.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_a_part_of_each_room_that_has_pages() {
        let mut rooms = Room::parts([6, 0, 9, 0]).expect("memory");
        let memory = rooms.pop().expect("the last one");
        for (value, room) in (1..).zip(&mut rooms) {
            room.fill(value);
        }
        let mut pages = PageMemory::new(&mut rooms, 3, memory);
        assert_eq!(pages.page_bytes(), 2 + 3);
        let parts = pages.write(1).expect("of three");
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [2, 3]);
        parts.into_iter().for_each(|part| part.fill(7));
        assert_eq!(rooms[0][..], [1, 1, 7, 7, 1, 1]);
        assert_eq!(rooms[2][..], [3, 3, 3, 7, 7, 7, 3, 3, 3]);
        assert_eq!(pages.read(2).expect("of three"), [&[1, 1][..], &[3, 3, 3][..]]);
        assert!(pages.read(3).is_none() && pages.write(u32::MAX).is_none());
        drop(rooms);
        assert_eq!(pages.read(1).expect("the memory is kept")[1], [7, 7, 7]);
    }
}
