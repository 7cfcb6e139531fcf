//! The arena: shared memory for data that is too large for the socket. Plans refer to the data by
//! its offset.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use forebay_engine::{Payload, Payloads};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::space::{Range, Space};

/// The largest arena: plans contain offsets as signed 32-bit integers.
pub const MAX_ARENA_BYTES: u32 = i32::MAX as u32;

/// An anonymous file that a hand maps, and to which the brain writes from any thread. The kernel
/// copies the data once. The file has no name, so nothing remains when the processes exit. Cheap to
/// clone. The file exists as long as any clone of the arena or any of its regions.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    fd: OwnedFd,
    bytes: u32,
    space: Mutex<Space>,
    freed: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Arena {
    /// Creates an arena of `bytes` bytes, at most [`MAX_ARENA_BYTES`]. Only parts that were written
    /// take memory, which is not freed again.
    ///
    /// # Errors
    /// The size is too large, or the operating system refuses the memory.
    pub fn new(bytes: u32) -> io::Result<Self> {
        if bytes > MAX_ARENA_BYTES {
            return Err(io::Error::other("an arena is smaller than 2 GiB"));
        }
        let fd = memfd_create("forebay-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, u64::from(bytes))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let space = Mutex::new(Space::new(bytes as usize));
        Ok(Self(Arc::new(Inner { fd, bytes, space, freed: OnceLock::new() })))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }

    /// The size of the arena in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.0.bytes
    }

    /// Reserves `bytes` bytes, without clearing them; `None`: there is not enough room now.
    #[must_use]
    pub fn take(&self, bytes: usize) -> Option<Region> {
        let range = self.0.space.lock().take(bytes)?;
        Some(Region { range, bytes, arena: self.clone() })
    }

    /// Copies bytes from another arena of the same size to the same offset. Only the other arena's
    /// allocator chooses offsets.
    ///
    /// # Errors
    /// The range is not inside the arena, or the operating system has no memory for it.
    pub fn mirror(&self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let end = u64::from(offset) + bytes.len() as u64;
        if end > u64::from(self.0.bytes) {
            return Err(io::Error::other("more than the arena holds"));
        }
        self.write(u64::from(offset), bytes)
    }

    /// Reads `bytes` bytes, starting at `offset`.
    ///
    /// # Errors
    /// The range is not inside the arena.
    pub fn look(&self, offset: u32, bytes: usize) -> io::Result<Vec<u8>> {
        let mut seen = vec![0; bytes];
        self.read(u64::from(offset), &mut seen)?;
        Ok(seen)
    }

    fn read(&self, mut from: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            match rustix::io::pread(self.fd(), &mut *into, from) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    from += read as u64;
                    into = &mut into[read..];
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write(&self, mut to: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = match rustix::io::pwrite(self.fd(), bytes, to) {
                Ok(written) => written,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            to += written as u64;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Copies `bytes` into the arena; `None`: there is not enough room now.
    pub(crate) fn place(&self, bytes: &[u8]) -> Option<Region> {
        let region = self.take(bytes.len())?;
        region.write(0, bytes).ok()?;
        Some(region)
    }
}

impl Payloads for Arena {
    fn capacity(&self) -> usize {
        self.0.bytes as usize
    }

    fn used(&self) -> usize {
        self.capacity() - self.0.space.lock().free()
    }

    fn reserve(&self, bytes: usize) -> Option<Box<dyn Payload>> {
        Some(Box::new(self.take(bytes)?))
    }

    /// Only the first callback is registered, because an arena has one queue of waiters.
    fn on_freed(&self, notify: Box<dyn Fn() + Send + Sync>) {
        let is_first = self.0.freed.set(notify).is_ok();
        debug_assert!(is_first, "an arena has one waiting line");
    }
}

/// A reserved range of the arena. Dropping it frees the range.
#[must_use]
pub struct Region {
    range: Range,
    /// The requested size in bytes. The range may be larger.
    bytes: usize,
    arena: Arena,
}

impl Payload for Region {
    fn offset(&self) -> u32 {
        // An arena is smaller than 2 GiB, so the offset fits.
        self.range.offset as u32
    }

    fn write(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        if at + bytes.len() > self.bytes {
            return Err(io::Error::other("more than the region holds"));
        }
        self.arena.write((self.range.offset + at) as u64, bytes)
    }

    fn read(&self, at: usize, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.bytes.saturating_sub(at));
        if count > 0 {
            self.arena.read((self.range.offset + at) as u64, &mut into[..count])?;
        }
        Ok(count)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.arena.0.space.lock().give(self.range);
        if let Some(notify) = self.arena.0.freed.get() {
            notify();
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.range.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn read(arena: &Arena, region: &Region, bytes: usize) -> Vec<u8> {
        arena.look(region.offset(), bytes).expect("read")
    }

    #[test]
    fn what_is_placed_can_be_read_through_the_descriptor() {
        let arena = Arena::new(4096).expect("arena");
        let first = arena.place(&[1; 100]).expect("room");
        let second = arena.place(&[2; 100]).expect("room");
        assert!(arena.place(&[3; 4096]).is_none());
        assert_eq!(read(&arena, &second, 100), [2; 100]);
        second.write(40, &[7; 60]).expect("inside");
        assert_eq!(read(&arena, &second, 100), [[2; 40].as_slice(), &[7; 60]].concat());
        assert!(second.write(41, &[8; 60]).is_err(), "the region has 100 bytes");
        assert_eq!(arena.used(), 2 * 128);
        drop((first, second));
        assert_eq!(arena.used(), 0);
        assert!(arena.place(&[3; 4096]).is_some());
    }

    #[test]
    fn what_is_read_piece_by_piece_is_at_the_same_place_in_the_mirror() {
        let (arena, mirror) = (Arena::new(4096).expect("arena"), Arena::new(4096).expect("arena"));
        let _before = arena.take(100).expect("room");
        let bytes: Vec<u8> = (0..1000_u32).map(|at| (at % 251) as u8).collect();
        let region = arena.place(&bytes).expect("room");
        let (mut piece, mut at) = ([0; 300], 0);
        loop {
            let count = region.read(at, &mut piece).expect("read");
            if count == 0 {
                break;
            }
            mirror.mirror(region.offset() + at as u32, &piece[..count]).expect("inside");
            at += count;
        }
        assert_eq!((at, read(&mirror, &region, 1000)), (1000, bytes));
        assert!(mirror.mirror(4000, &[1; 97]).is_err(), "the bytes would end beyond the arena");
        assert!(mirror.mirror(u32::MAX, &[1]).is_err());
        assert_eq!(region.read(5000, &mut piece).expect("nothing"), 0);
        assert_eq!(mirror.used(), 0, "a mirror allocates nothing");
    }

    #[test]
    fn threads_place_and_drop_without_meeting() {
        const BYTES: u32 = 1 << 20;
        let arena = Arena::new(BYTES).expect("arena");
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let arena = arena.clone();
                scope.spawn(move || {
                    let mut held: Vec<(Region, Vec<u8>)> = Vec::new();
                    for turn in 0..400_usize {
                        let bytes = vec![thread * 40 + (turn % 40) as u8; 1 + turn * 7919 % 20_000];
                        match arena.place(&bytes) {
                            Some(region) => held.push((region, bytes)),
                            None => held.clear(),
                        }
                        if turn % 3 == 0 && !held.is_empty() {
                            let (region, bytes) = held.swap_remove(turn % held.len());
                            assert_eq!(read(&arena, &region, bytes.len()), bytes);
                        }
                    }
                });
            }
        });
        assert!(arena.take(BYTES as usize).is_some(), "the whole arena is free again");
    }

    #[test]
    fn whoever_waits_for_room_is_told_when_it_comes() {
        let arena = Arena::new(4096).expect("arena");
        let (sender, freed) = mpsc::channel();
        arena.on_freed(Box::new(move || {
            // The receiver was dropped if the thread already has enough room.
            let _ = sender.send(());
        }));
        let held: Vec<Region> = (0..4).map(|_| arena.take(1024).expect("room")).collect();
        let waiting = std::thread::spawn({
            let arena = arena.clone();
            move || loop {
                freed.recv().expect("room comes back");
                if let Some(region) = arena.take(3072) {
                    return region.offset();
                }
            }
        });
        held.into_iter().for_each(drop);
        assert_eq!(waiting.join().expect("the waiting thread got its room"), 0);
    }
}
