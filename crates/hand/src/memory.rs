//! The memory of host tiers: anonymous files of this process, which hands map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use forebay_engine::TierMemory;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, pread, pwrite};

/// The file descriptor under which a hand finds the memory of its host tier.
pub(crate) const HOST_FD: i32 = 5;
/// The file descriptor under which a hand finds the first lender's memory. The memories of the
/// other lenders have the following descriptors.
const LENDERS_FD: i32 = 6;

/// The memory of host tiers that several rank groups map. By default no memory is shared.
#[derive(Debug, Clone, Default)]
pub struct HostMemories {
    /// The memory of each of the group's tiers; empty: the group allocates memory that is not
    /// shared.
    own: Vec<Arc<OwnedFd>>,
    /// The memories of each replica that lends pages to this group, indexed by replica, with one
    /// memory per tier of the group. The memory of pages from other servers is last.
    lenders: Vec<Option<Vec<Arc<OwnedFd>>>>,
}

/// The memory of a host tier in this process. Clones refer to the same memory.
#[derive(Debug, Clone)]
pub struct HostMemory(Arc<OwnedFd>);

impl HostMemory {
    /// Creates memory without any page.
    ///
    /// # Errors
    /// The operating system refuses the memory.
    pub fn new() -> io::Result<Self> {
        new().map(|file| Self(Arc::new(file)))
    }
}

impl TierMemory for HostMemory {
    fn bytes(&self) -> io::Result<u64> {
        Ok(u64::try_from(fstat(&self.0)?.st_size).unwrap_or(0))
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        if self.bytes()? < bytes {
            ftruncate(&self.0, bytes)?;
        }
        Ok(())
    }

    fn read(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            match pread(&self.0, &mut *into, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    at += count as u64;
                    into = &mut into[count..];
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write(&self, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match pwrite(&self.0, bytes, at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    at += count as u64;
                    bytes = &bytes[count..];
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl HostMemories {
    /// Creates the memories of `replicas` groups with `tiers` tiers each. Each group lends its
    /// pages to all others, tier by tier.
    ///
    /// # Errors
    /// The operating system refuses the memory.
    pub fn lent(replicas: usize, tiers: usize) -> io::Result<Vec<Self>> {
        let memories: Vec<Vec<Arc<OwnedFd>>> =
            (0..replicas).map(|_| shared(tiers)).collect::<io::Result<_>>()?;
        let others = |at: usize| {
            let numbered = memories.iter().enumerate();
            numbered.map(|(other, memory)| (other != at).then(|| memory.clone())).collect()
        };
        Ok((0..replicas)
            .map(|at| Self { own: memories[at].clone(), lenders: others(at) })
            .collect())
    }

    /// Adds memory of pages from other servers as a further lender. Only groups with one tier can
    /// use it.
    #[must_use]
    pub fn with_received(mut self, received: &HostMemory) -> Self {
        self.lenders.push(Some(vec![Arc::clone(&received.0)]));
        self
    }

    /// Returns the memory of the group's tier; `None`: it is not shared, or the group has several
    /// tiers.
    #[must_use]
    pub fn tier(&self) -> Option<HostMemory> {
        match &self.own[..] {
            [own] => Some(HostMemory(Arc::clone(own))),
            _ => None,
        }
    }

    /// Returns the memory of each of the group's tiers, which others map too; empty: it is not
    /// shared.
    pub(crate) fn own(&self) -> io::Result<Vec<OwnedFd>> {
        self.own.iter().map(|own| own.try_clone()).collect()
    }

    /// True if others read the memory of this group.
    pub(crate) fn lends(&self) -> bool {
        !self.own.is_empty()
    }

    /// Returns the memory of each lender for this tier of the group, with its file descriptor in
    /// the hand.
    pub(crate) fn borrowed(&self, tier: usize) -> impl Iterator<Item = (i32, BorrowedFd<'_>)> {
        let numbered = (LENDERS_FD..).zip(&self.lenders);
        numbered.filter_map(move |(number, memories)| {
            Some((number, memories.as_ref()?.get(tier)?.as_fd()))
        })
    }

    /// Returns the file descriptor of each lender's memory in the group's hands, indexed by
    /// replica.
    pub(crate) fn descriptors(&self) -> Vec<Option<u32>> {
        let numbered = (LENDERS_FD.cast_unsigned()..).zip(&self.lenders);
        numbered.map(|(number, memories)| memories.as_ref().map(|_| number)).collect()
    }
}

/// Creates the memory of `world` host tiers.
///
/// # Errors
/// The operating system refuses the memory.
pub(crate) fn of_ranks(world: usize) -> io::Result<Vec<OwnedFd>> {
    (0..world).map(|_| new()).collect()
}

/// Creates the memory of `tiers` host tiers, for shared ownership.
fn shared(tiers: usize) -> io::Result<Vec<Arc<OwnedFd>>> {
    (0..tiers).map(|_| new().map(Arc::new)).collect()
}

/// Creates the memory of a host tier. The first hand sets its size, and the kernel allocates pages
/// when they are written.
fn new() -> io::Result<OwnedFd> {
    Ok(memfd_create("forebay-host-kv", MemfdFlags::CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode(fd: BorrowedFd<'_>) -> u64 {
        fstat(fd).expect("a file").st_ino
    }

    #[test]
    fn each_replica_maps_what_the_others_write() {
        let memories = HostMemories::lent(3, 1).expect("memory");
        let named: Vec<_> = memories.iter().map(HostMemories::descriptors).collect();
        let expected =
            [[None, Some(7), Some(8)], [Some(6), None, Some(8)], [Some(6), Some(7), None]];
        assert_eq!(named, expected);
        assert!(memories.iter().all(HostMemories::lends));
        assert!(!HostMemories::default().lends());
        let [own] = &memories[1].own().expect("copies")[..] else { panic!("one tier") };
        let (number, lent) = memories[2].borrowed(0).nth(1).expect("two");
        assert_eq!((number, inode(lent)), (7, inode(own.as_fd())));
    }

    #[test]
    fn each_rank_maps_the_memory_of_its_equals() {
        let memories = HostMemories::lent(2, 3).expect("memory");
        assert_eq!(memories[0].descriptors(), [None, Some(7)]);
        assert!(memories[0].tier().is_none(), "a page has parts in several memories");
        let of_ranks = memories[1].own().expect("copies");
        for (rank, own) in of_ranks.iter().enumerate() {
            let lent: Vec<_> = memories[0].borrowed(rank).collect();
            assert_eq!((lent.len(), lent[0].0), (1, 7));
            assert_eq!(inode(lent[0].1), inode(own.as_fd()));
        }
        let inodes = of_ranks.iter().map(|own| inode(own.as_fd()));
        assert_eq!(inodes.collect::<std::collections::HashSet<_>>().len(), 3);
    }

    #[test]
    fn pages_from_other_servers_come_as_from_one_replica_more() {
        let received = HostMemory::new().expect("memory");
        let memories = HostMemories::lent(2, 1).expect("memory").into_iter();
        let memories: Vec<_> = memories.map(|memories| memories.with_received(&received)).collect();
        let named: Vec<_> = memories.iter().map(HostMemories::descriptors).collect();
        assert_eq!(named, [[None, Some(7), Some(8)], [Some(6), None, Some(8)]]);
        let (_, lent) = memories[1].borrowed(0).last().expect("one");
        assert_eq!(inode(lent), inode(received.0.as_fd()));
    }

    #[test]
    fn what_this_process_writes_it_reads_up_to_the_end() {
        let memory = HostMemory::new().expect("memory");
        assert_eq!(memory.bytes().expect("a size"), 0);
        memory.grow(100).expect("room");
        memory.grow(10).expect("nothing to do");
        assert_eq!(memory.clone().bytes().expect("a size"), 100);
        memory.write(90, &[7; 10]).expect("room");
        let mut read = [1; 20];
        memory.read(80, &mut read).expect("all there");
        assert_eq!(read, [[0; 10], [7; 10]].concat()[..]);
        assert!(memory.read(81, &mut read).is_err(), "the read goes beyond the end");
    }
}
