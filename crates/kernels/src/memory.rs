//! Memory that steps access at random, in huge pages where the system has them, and memory that
//! another process writes.
//!
//! Many systems give huge pages only to programs that request them. With small pages, a step also
//! waits for page-table walks, and hardware prefetching stops every 4 KiB.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// The alignment of each [`Room`] of a mapping: a cache line, which suits vectors and every type.
const ALIGNMENT: usize = 64;

struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory belongs to no thread; the code that hands out parts of it states who may read and
// write them.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn anonymous(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1);
        // SAFETY: the call creates a new mapping, to which no other reference exists.
        let at = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let mapping = Self::of(at.cast(), bytes)?;
        // SAFETY: the call covers the whole mapping. If the system refuses huge pages, small ones
        // are used.
        let _ = unsafe { madvise(at, bytes, Advice::LinuxHugepage) };
        Ok(mapping)
    }

    fn of(at: *mut u8, bytes: usize) -> io::Result<Self> {
        let at = NonNull::new(at).ok_or_else(|| io::Error::other("a mapping at no address"))?;
        Ok(Self { at, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the call unmaps the whole mapping, and no part of it is in use any more.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// A part of a mapping with a single owner, zeroed at first. The system allocates its memory only
/// when it is written. It begins at a cache line.
pub struct Room {
    mapping: Arc<Mapping>,
    first: usize,
    bytes: usize,
}

impl Room {
    /// Creates a room of `bytes` bytes.
    ///
    /// # Errors
    /// If the system has no address space left.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let mut parts = Self::parts([bytes])?;
        parts.pop().ok_or_else(|| io::Error::other("no part"))
    }

    /// Creates a room of each size, side by side in one mapping, since a single room could be
    /// smaller than a huge page.
    ///
    /// # Errors
    /// If the system has no address space left, or the sum of the sizes overflows.
    pub fn parts(sizes: impl IntoIterator<Item = usize>) -> io::Result<Vec<Self>> {
        let too_much = || io::Error::other("more bytes than there are addresses");
        let mut places = Vec::new();
        let mut end = 0_usize;
        for bytes in sizes {
            places.push((end, bytes));
            let room = bytes.checked_next_multiple_of(ALIGNMENT).ok_or_else(too_much)?;
            end = end.checked_add(room).ok_or_else(too_much)?;
        }
        // The system rejects an empty mapping.
        let mapping = Arc::new(Mapping::anonymous(end.max(ALIGNMENT))?);
        let part = |(first, bytes)| Self { mapping: mapping.clone(), first, bytes };
        Ok(places.into_iter().map(part).collect())
    }

    /// Returns an empty room of the same mapping. As long as it exists, the memory of all rooms of
    /// the mapping stays allocated.
    #[must_use]
    pub fn keeper(&self) -> Self {
        Self { mapping: self.mapping.clone(), first: self.first, bytes: 0 }
    }
}

impl Deref for Room {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are inside the mapping, and in no other room.
        unsafe { std::slice::from_raw_parts(self.mapping.at.as_ptr().add(self.first), self.bytes) }
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the bytes are inside the mapping, and in no other room.
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.at.as_ptr().add(self.first), self.bytes)
        }
    }
}

/// Memory that another process writes and this one reads. The writer announces a part of it for
/// reading. The writer overwrites that part only after this process has reported that it was read.
pub struct Shared(Option<Mapping>);

impl Shared {
    /// An empty mapping.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Maps the first `bytes` of a file. The file must not be truncated while it is mapped.
    ///
    /// # Errors
    /// If the system refuses to map the file.
    pub fn map(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Self::none());
        }
        // SAFETY: the call creates a new mapping, which is only read.
        let at = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0)?
        };
        Ok(Self(Some(Mapping::of(at.cast(), bytes)?)))
    }

    /// The number of mapped bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |mapping| mapping.bytes)
    }

    /// Returns `bytes` bytes from `offset` on; `None` if they lie outside the mapping.
    #[must_use]
    pub fn read(&self, offset: usize, bytes: usize) -> Option<&[u8]> {
        let mapping = self.0.as_ref()?;
        let end = offset.checked_add(bytes)?;
        // SAFETY: the bytes are inside the mapping, and the writer does not write them at present.
        (end <= mapping.bytes)
            .then(|| unsafe { std::slice::from_raw_parts(mapping.at.as_ptr().add(offset), bytes) })
    }
}

/// Extends a buffer that is reused between steps to at least this length.
pub(crate) fn grow<T: Clone>(buffer: &mut Vec<T>, length: usize, value: T) {
    if buffer.len() < length {
        buffer.resize(length, value);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// A room with these elements.
    pub(crate) fn room<T: Copy>(numbers: &[T]) -> Arc<Room> {
        let mut room = Room::new(size_of_val(numbers)).expect("memory");
        // SAFETY: the slice is the bytes of the elements.
        room.copy_from_slice(unsafe {
            std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers))
        });
        Arc::new(room)
    }

    #[test]
    fn parts_lie_side_by_side_and_are_each_its_own() {
        let mut rooms = Room::parts([3, 0, 64, 65]).expect("memory");
        for (value, room) in (1..).zip(&mut rooms) {
            assert!(room.iter().all(|&byte| byte == 0));
            room.fill(value);
        }
        let sizes: Vec<usize> = rooms.iter().map(|room| room.len()).collect();
        assert_eq!(sizes, [3, 0, 64, 65]);
        for (value, room) in (1..).zip(&rooms) {
            assert!(room.iter().all(|&byte| byte == value));
            assert_eq!(room.as_ptr() as usize % ALIGNMENT, 0);
        }
        let last = rooms.pop().expect("four");
        drop(rooms);
        assert_eq!(last[64], 4, "the mapping lives as long as any part");
        assert!(Room::parts([usize::MAX, 2]).is_err());
    }

    #[test]
    fn what_another_writes_is_read_within_bounds() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, 4096).expect("room");
        let shared = Shared::map(file.as_fd(), 4096).expect("mapped");
        rustix::io::pwrite(&file, b"seen", 4092).expect("written");
        assert_eq!(shared.read(4092, 4), Some(&b"seen"[..]));
        assert_eq!(shared.read(4093, 4), None);
        assert_eq!(shared.read(usize::MAX, 2), None);
        assert_eq!(Shared::none().read(0, 0), None);
    }
}
