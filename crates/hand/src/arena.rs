//! The shared-memory arena: what is too big for the socket, named by its offset in the plan.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::MmapMut;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Regions start at multiples of this many bytes: a cache line.
const ALIGN: usize = 64;

/// An anonymous file that brain and hand map. It has no name, so nothing is left behind however the processes end.
pub(crate) struct Arena {
    fd: OwnedFd,
    map: MmapMut,
    space: Space,
}

/// A part of the arena; give it back with [`Arena::release`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Region {
    offset: usize,
    bytes: usize,
}

impl Region {
    /// Byte offset in the arena, as plans name it.
    pub(crate) fn offset(&self) -> u32 {
        // The arena's size is checked against u32 when it is made.
        self.offset as u32
    }
}

impl Arena {
    /// An arena of `bytes` bytes. Memory is taken from the system only where something was written.
    pub(crate) fn new(bytes: u32) -> std::io::Result<Self> {
        let fd = memfd_create("forebay-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, u64::from(bytes))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        #[expect(unsafe_code, reason = "mapping a file is unsafe where others may shrink it")]
        // SAFETY: the file is anonymous and sealed against shrinking; the hand maps it read-only.
        let map = unsafe { MmapMut::map_mut(&fd)? };
        Ok(Self { fd, map, space: Space::new(bytes as usize) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Copies `bytes` in; `None` when there is no room now.
    pub(crate) fn place(&mut self, bytes: &[u8]) -> Option<Region> {
        let region = self.space.take(bytes.len())?;
        self.map[region.offset..region.offset + bytes.len()].copy_from_slice(bytes);
        Some(region)
    }

    pub(crate) fn release(&mut self, region: Region) {
        self.space.give(region);
    }

    /// Forgets every region: the hand that read them is gone.
    pub(crate) fn clear(&mut self) {
        self.space = Space::new(self.map.len());
    }
}

/// First-fit allocator over free ranges that merge with their neighbours.
#[derive(Debug)]
struct Space {
    /// Offset to length of each free range.
    free: BTreeMap<usize, usize>,
}

impl Space {
    fn new(bytes: usize) -> Self {
        Self { free: (bytes > 0).then_some((0, bytes)).into_iter().collect() }
    }

    fn take(&mut self, bytes: usize) -> Option<Region> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let (&offset, &length) = self.free.iter().find(|&(_, &length)| length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(Region { offset, bytes })
    }

    fn give(&mut self, region: Region) {
        let Region { mut offset, mut bytes } = region;
        if let Some((&before, &length)) = self.free.range(..offset).next_back() {
            debug_assert!(before + length <= offset, "a region was released twice");
            if before + length == offset {
                self.free.remove(&before);
                offset = before;
                bytes += length;
            }
        }
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn regions_never_overlap_and_everything_comes_back(
            steps in proptest::collection::vec((any::<bool>(), 1_usize..5000, any::<usize>()), 1..200)
        ) {
            let mut space = Space::new(64 * 1024);
            let mut held: Vec<Region> = Vec::new();
            for (take, bytes, pick) in steps {
                if take {
                    if let Some(new) = space.take(bytes) {
                        prop_assert!(new.bytes >= bytes && new.offset + new.bytes <= 64 * 1024);
                        for old in &held {
                            let apart = new.offset + new.bytes <= old.offset
                                || old.offset + old.bytes <= new.offset;
                            prop_assert!(apart, "{new:?} overlaps {old:?}");
                        }
                        held.push(new);
                    }
                } else if !held.is_empty() {
                    let region = held.swap_remove(pick % held.len());
                    space.give(region);
                }
            }
            for region in held {
                space.give(region);
            }
            prop_assert_eq!(space.free, BTreeMap::from([(0, 64 * 1024)]));
        }
    }

    #[test]
    fn what_is_placed_can_be_read_through_the_descriptor() {
        let mut arena = Arena::new(4096).expect("arena");
        let first = arena.place(&[1; 100]).expect("room");
        let second = arena.place(&[2; 100]).expect("room");
        assert!(arena.place(&[3; 4096]).is_none());
        let mut seen = [0; 100];
        rustix::io::pread(arena.fd(), &mut seen, u64::from(second.offset())).expect("read");
        assert_eq!(seen, [2; 100]);
        arena.release(first);
        arena.release(second);
        assert!(arena.place(&[3; 4096]).is_some());
    }
}
