//! Memory for host tiers: anonymous files of this process, which hands map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};

/// The descriptor of a hand for the memory of its own host tier.
pub(crate) const HOST_FD: i32 = 5;
/// The descriptor of a hand for the memory of the first lender; others follow.
const LENDERS_FD: i32 = 6;

/// The memory of host tiers that several rank groups map. By default each group has its own alone.
#[derive(Debug, Clone, Default)]
pub struct HostMemories {
    /// The memory of the group's own tier; `None`: the group makes one if it needs it.
    own: Option<Arc<OwnedFd>>,
    /// The memory of each replica that lends pages to this group, by the replica's number.
    lenders: Vec<Option<Arc<OwnedFd>>>,
}

impl HostMemories {
    /// The memories of `replicas` groups of one rank each. Each lends to all others.
    ///
    /// # Errors
    /// The system gives no such memory.
    pub fn lent(replicas: usize) -> io::Result<Vec<Self>> {
        let memories: Vec<Arc<OwnedFd>> =
            (0..replicas).map(|_| Ok(Arc::new(new()?))).collect::<io::Result<_>>()?;
        let others = |at: usize| {
            let numbered = memories.iter().enumerate();
            numbered.map(|(other, memory)| (other != at).then(|| Arc::clone(memory))).collect()
        };
        let of = |at: usize| Self { own: Some(Arc::clone(&memories[at])), lenders: others(at) };
        Ok((0..replicas).map(of).collect())
    }

    /// The group's own memory, which others map too.
    pub(crate) fn own(&self) -> Option<io::Result<OwnedFd>> {
        self.own.as_ref().map(|own| own.try_clone())
    }

    /// True if others read the group's own memory.
    pub(crate) fn lends(&self) -> bool {
        self.own.is_some()
    }

    /// The memory of each lender with its descriptor in the hand.
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
/// The system gives no such memory.
pub(crate) fn of_ranks(world: usize) -> io::Result<Vec<OwnedFd>> {
    (0..world).map(|_| new()).collect()
}

/// Memory for a host tier. The first hand sets its length, and pages are allocated when they are
/// written.
fn new() -> io::Result<OwnedFd> {
    Ok(memfd_create("forebay-host-kv", MemfdFlags::CLOEXEC)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_replica_maps_what_the_others_write() {
        let memories = HostMemories::lent(3).expect("memory");
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
}
