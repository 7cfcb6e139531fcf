//! The blocks of the prefix cache that each replica holds.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};
use forebay_balance::PrefixIndex;
use forebay_engine::{BlockEvent, BlockHash};
use parking_lot::Mutex;

/// News for the index.
pub(crate) enum News {
    /// A replica's cache has changed.
    Changed(usize, Vec<BlockEvent>),
    /// A request with these blocks was sent to this replica.
    Sent(usize, Arc<[BlockHash]>),
    /// The request has computed its blocks, or never will.
    Settled(usize, Arc<[BlockHash]>),
}

/// The index, and a channel of changes that are not applied yet. Lookups apply them first, so
/// engine threads never wait for the index. Only changes between two requests are ever pending.
pub(crate) struct Blocks {
    index: Mutex<PrefixIndex<BlockHash>>,
    news: Receiver<News>,
    /// The sending end, to be cloned.
    pub(crate) lane: Sender<News>,
    page_size: u64,
}

impl Blocks {
    pub(crate) fn new(replicas: usize, page_size: u32) -> Self {
        let (lane, news) = unbounded();
        let index = Mutex::new(PrefixIndex::new(replicas));
        Self { index, news, lane, page_size: page_size.into() }
    }

    /// How many tokens of a prompt with these leading blocks each replica has cached.
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

    /// The receiver lives as long as this.
    pub(crate) fn tell(&self, news: News) {
        let _ = self.lane.send(news);
    }
}
