//! An index of the blocks that each replica has in its prefix cache.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};
use forebay_balance::PrefixIndex;
use forebay_engine::{BlockEvent, BlockHash};
use parking_lot::Mutex;

/// A change for the index.
pub(crate) enum News {
    /// A replica's cache has changed.
    Changed(usize, Vec<BlockEvent>),
    /// A request with these blocks was sent to this replica, so its cache will contain them.
    Sent(usize, Arc<[BlockHash]>),
    /// The request with these blocks has computed them, or never will.
    Settled(usize, Arc<[BlockHash]>),
}

/// The index, and a channel of changes that are not applied yet. Lookups apply pending changes
/// first, so engine threads never wait for the index's lock. Every request looks its blocks up, so
/// only changes between two requests are ever pending.
pub(crate) struct Blocks {
    index: Mutex<PrefixIndex<BlockHash>>,
    news: Receiver<News>,
    /// The sender of changes, to be cloned.
    pub(crate) lane: Sender<News>,
    page_size: u64,
}

impl Blocks {
    pub(crate) fn new(replicas: usize, page_size: u32) -> Self {
        let (lane, news) = unbounded();
        let index = Mutex::new(PrefixIndex::new(replicas));
        Self { index, news, lane, page_size: page_size.into() }
    }

    /// Returns the number of tokens that each replica has cached of a prompt with these leading
    /// blocks.
    pub(crate) fn cached(&self, names: &[BlockHash]) -> Vec<u64> {
        let mut index = self.index.lock();
        for news in self.news.try_iter() {
            match news {
                News::Changed(at, events) => {
                    for event in events {
                        match event {
                            BlockEvent::Stored(name, _) => index.stored(at, name),
                            BlockEvent::Dropped(name) => index.dropped(at, name),
                            BlockEvent::Cleared => index.cleared(at),
                        }
                    }
                }
                News::Sent(at, names) => index.expect(at, &names),
                News::Settled(at, names) => index.settled(at, &names),
            }
        }
        let blocks = index.lookup(names);
        blocks.into_iter().map(|blocks| blocks * self.page_size).collect()
    }

    /// Sends a change. This can't fail, because `self` owns the receiver.
    pub(crate) fn tell(&self, news: News) {
        let _ = self.lane.send(news);
    }
}
