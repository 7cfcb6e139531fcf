//! Memory for host tiers: anonymous files of this process, which hands map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use forebay_engine::TierMemory;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, pread, pwrite};

/// The descriptor of a hand for the memory of its own host tier.
pub(crate) const HOST_FD: i32 = 5;
/// The descriptor of a hand for the memory of the first lender; others follow.
const LENDERS_FD: i32 = 6;

/// The memory of host tiers that several rank groups map. By default each group has only its own.
#[derive(Debug, Clone, Default)]
pub struct HostMemories {
    /// The memory of the group's own tier; `None`: the group allocates it if needed.
    own: Option<Arc<OwnedFd>>,
    /// The memory of each replica that lends pages to this group, by the replica's number. The
    /// memory of pages from other servers is last.
    lenders: Vec<Option<Arc<OwnedFd>>>,
}

/// The memory of a host tier in this process. A clone is the same memory.
#[derive(Debug, Clone)]
pub struct HostMemory(Arc<OwnedFd>);

impl HostMemory {
    /// Memory without a page.
    ///
    /// # Errors
    /// The system gives no such memory.
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
    /// The memories of `replicas` groups of one rank each. Each lends to all others, and `received`
    /// to all, as if it were one replica more.
    ///
    /// # Errors
    /// The system gives no such memory.
    pub fn lent(replicas: usize, received: Option<&HostMemory>) -> io::Result<Vec<Self>> {
        let memories: Vec<Arc<OwnedFd>> =
            (0..replicas).map(|_| Ok(Arc::new(new()?))).collect::<io::Result<_>>()?;
        let others = |at: usize| {
            let numbered = memories.iter().enumerate();
            let of_others =
                numbered.map(|(other, memory)| (other != at).then(|| Arc::clone(memory)));
            of_others.chain(received.map(|memory| Some(Arc::clone(&memory.0)))).collect()
        };
        let of = |at: usize| Self { own: Some(Arc::clone(&memories[at])), lenders: others(at) };
        Ok((0..replicas).map(of).collect())
    }

    /// The memory of the group's own tier; `None`: nobody else reads it.
    #[must_use]
    pub fn tier(&self) -> Option<HostMemory> {
        self.own.clone().map(HostMemory)
    }

    /// The group's own memory, which others map too.
    pub(crate) fn own(&self) -> Option<io::Result<OwnedFd>> {
        self.own.as_ref().map(|own| own.try_clone())
    }

    /// True if others read the group's own memory.
    pub(crate) fn lends(&self) -> bool {
        self.own.is_some()
    }

    /// The memory of each lender, with its descriptor in the hand.
    pub(crate) fn borrowed(&self) -> impl Iterator<Item = (i32, BorrowedFd<'_>)> {
        let numbered = (LENDERS_FD..).zip(&self.lenders);
        numbered.filter_map(|(number, memory)| Some((number, memory.as_ref()?.as_fd())))
    }

    /// The descriptor of each lender in the hand, by the number of its replica.
    pub(crate) fn descriptors(&self) -> Vec<Option<u32>> {
        let numbered = (LENDERS_FD.cast_unsigned()..).zip(&self.lenders);
        numbered.map(|(number, memory)| memory.as_ref().map(|_| number)).collect()
    }
}

/// Memory for the host tiers of `world` ranks.
///
/// # Errors
/// The system refuses the memory.
pub(crate) fn of_ranks(world: usize) -> io::Result<Vec<OwnedFd>> {
    (0..world).map(|_| new()).collect()
}

/// Memory for a host tier. The first hand sets its length, and pages are allocated as they are
/// written.
fn new() -> io::Result<OwnedFd> {
    Ok(memfd_create("forebay-host-kv", MemfdFlags::CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_replica_maps_what_the_others_write() {
        let memories = HostMemories::lent(3, None).expect("memory");
        let named: Vec<_> = memories.iter().map(HostMemories::descriptors).collect();
        let expected =
            [[None, Some(7), Some(8)], [Some(6), None, Some(8)], [Some(6), Some(7), None]];
        assert_eq!(named, expected);
        assert!(memories.iter().all(HostMemories::lends));
        assert!(!HostMemories::default().lends());
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).expect("a file").st_ino;
        let own = memories[1].own().expect("its own").expect("a copy");
        let (number, lent) = memories[2].borrowed().nth(1).expect("two");
        assert_eq!((number, inode(lent)), (7, inode(own.as_fd())));
    }

    #[test]
    fn pages_from_other_servers_come_as_from_one_replica_more() {
        let received = HostMemory::new().expect("memory");
        let memories = HostMemories::lent(2, Some(&received)).expect("memory");
        let named: Vec<_> = memories.iter().map(HostMemories::descriptors).collect();
        assert_eq!(named, [[None, Some(7), Some(8)], [Some(6), None, Some(8)]]);
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).expect("a file").st_ino;
        let (_, lent) = memories[1].borrowed().last().expect("one");
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
