//! The blocks of the prefix caches, and their changes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{BlockEvent, BlockHash, BlockObserver, Place};
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use tokio::sync::watch;
use tokio::time::timeout;

/// The number of events that are kept. A router that lags by more gets all blocks again.
const KEPT: usize = 1 << 16;
/// The bits of an event for the tiers that hold a block: device memory and host memory. Neither
/// bit: the block was dropped.
const DEVICE: u64 = 1;
const HOST: u64 = 2;

/// Returns the name of a block for routers: half of its hash, with the bits for tiers cleared.
pub(super) fn short(name: BlockHash) -> u64 {
    name.number() as u64 & !(DEVICE | HOST)
}

fn tiers(place: Place) -> u64 {
    match place {
        Place::Device => DEVICE,
        Place::Host => HOST,
        Place::Both => DEVICE | HOST,
    }
}

#[derive(Debug, Default)]
struct Log {
    /// The number of replicas that hold each block, on their devices and in host memory.
    holders: HashMap<u64, [u32; 2], FxBuildHasher>,
    events: VecDeque<u64>,
    /// The number of the first kept event.
    first: u64,
}

impl Log {
    fn next(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    fn push(&mut self, event: u64) {
        if self.events.len() == KEPT {
            self.events.pop_front();
            self.first += 1;
        }
        self.events.push_back(event);
    }

    /// Records that a replica has stored, moved or dropped a block: from the tiers `from` to the
    /// tiers `to`.
    fn moved(&mut self, name: u64, from: u64, to: u64) {
        let holders = self.holders.entry(name).or_default();
        let before = held(holders);
        for (count, tier) in holders.iter_mut().zip([DEVICE, HOST]) {
            *count += u32::from(to & tier != 0);
            *count = count.saturating_sub(u32::from(from & tier != 0));
        }
        let now = held(holders);
        if now == 0 {
            self.holders.remove(&name);
        }
        if now != before {
            self.push(name | now);
        }
    }

    /// Returns the response to a router that has all events before number `after`. It has the
    /// number of the next event, 1 if the router has to start afresh (0 otherwise), and the events.
    fn since(&self, after: u64) -> Vec<u8> {
        let mut out = self.next().to_le_bytes().to_vec();
        let known = after >= self.first && after <= self.next();
        out.extend_from_slice(&u64::from(!known).to_le_bytes());
        if known {
            let new = self.events.iter().skip((after - self.first) as usize);
            new.for_each(|event| out.extend_from_slice(&event.to_le_bytes()));
        } else {
            let all = self.holders.iter().map(|(name, holders)| name | held(holders));
            all.for_each(|event| out.extend_from_slice(&event.to_le_bytes()));
        }
        out
    }
}

/// Returns the tiers in which at least one replica holds a block.
fn held(&[device, host]: &[u32; 2]) -> u64 {
    DEVICE * u64::from(device > 0) + HOST * u64::from(host > 0)
}

/// The blocks of all replicas, and their changes.
#[derive(Debug, Clone)]
pub struct BlockLog {
    log: Arc<Mutex<Log>>,
    changed: watch::Sender<()>,
}

impl Default for BlockLog {
    /// Creates a log whose first number is random, so that a router that followed an earlier brain
    /// at this address gets all blocks again.
    fn default() -> Self {
        let first = u64::from(rand::random::<u32>()) << 16 | 1;
        Self {
            log: Arc::new(Mutex::new(Log { first, ..Log::default() })),
            changed: watch::Sender::new(()),
        }
    }
}

impl BlockLog {
    /// Creates the observer of a new replica's changes.
    #[must_use]
    pub fn replica(&self) -> ReplicaBlocks {
        ReplicaBlocks { log: self.clone(), blocks: HashMap::default() }
    }

    /// Waits until there is an event after number `after`, for at most `wait`. Returns the response
    /// to a router that has all events before `after`.
    pub(super) async fn follow(&self, after: u64, wait: Duration) -> Vec<u8> {
        let mut changed = self.changed.subscribe();
        if self.log.lock().next() == after {
            // After the time limit, the response contains no events.
            let _ = timeout(wait, changed.changed()).await;
        }
        self.log.lock().since(after)
    }
}

/// An observer that records the blocks which one replica stores and drops.
#[derive(Debug)]
pub struct ReplicaBlocks {
    log: BlockLog,
    /// The tiers of each block on this replica.
    blocks: HashMap<u64, u64, FxBuildHasher>,
}

impl BlockObserver for ReplicaBlocks {
    fn changed(&mut self, events: Vec<BlockEvent>) {
        let mut log = self.log.log.lock();
        for event in events {
            match event {
                BlockEvent::Stored(name, place) => {
                    let before = self.blocks.insert(short(name), tiers(place)).unwrap_or(0);
                    log.moved(short(name), before, tiers(place));
                }
                BlockEvent::Dropped(name) => {
                    if let Some(before) = self.blocks.remove(&short(name)) {
                        log.moved(short(name), before, 0);
                    }
                }
                BlockEvent::Cleared => {
                    self.blocks.drain().for_each(|(name, before)| log.moved(name, before, 0));
                }
            }
        }
        drop(log);
        self.log.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(bytes: &[u8]) -> Vec<u64> {
        bytes.chunks(8).map(|part| u64::from_le_bytes(part.try_into().unwrap())).collect()
    }

    /// A router that follows the block log.
    #[derive(Default)]
    struct Follower {
        after: u64,
        blocks: HashMap<u64, u64>,
    }

    impl Follower {
        fn read(&mut self, log: &BlockLog) {
            let numbers = numbers(&log.log.lock().since(self.after));
            self.after = numbers[0];
            if numbers[1] == 1 {
                self.blocks.clear();
            }
            for &event in &numbers[2..] {
                let (name, tiers) = (event & !3, event & 3);
                if tiers == 0 {
                    self.blocks.remove(&name);
                } else {
                    self.blocks.insert(name, tiers);
                }
            }
        }
    }

    proptest! {
        /// Each read gives a follower exactly the blocks that at least one replica holds.
        #[test]
        fn a_follower_knows_what_is_there(
            moves in prop::collection::vec((0usize..2, 0u128..8, 0u8..10), 0..120),
        ) {
            let log = BlockLog::default();
            let mut replicas = [log.replica(), log.replica()];
            let mut held = [HashMap::new(), HashMap::new()];
            let mut follower = Follower::default();
            for (replica, name, kind) in moves {
                let name = BlockHash::from(name << 2);
                match kind {
                    0..5 => {
                        let place =
                            [Place::Device, Place::Host, Place::Both][usize::from(kind) % 3];
                        held[replica].insert(short(name), tiers(place));
                        replicas[replica].changed(vec![BlockEvent::Stored(name, place)]);
                    }
                    5..8 => {
                        held[replica].remove(&short(name));
                        replicas[replica].changed(vec![BlockEvent::Dropped(name)]);
                    }
                    8 => {
                        held[replica].clear();
                        replicas[replica].changed(vec![BlockEvent::Cleared]);
                    }
                    9 => follower.read(&log),
                    _ => {}
                }
            }
            follower.read(&log);
            let [mut all, other] = held;
            for (name, tiers) in other {
                *all.entry(name).or_insert(0) |= tiers;
            }
            prop_assert_eq!(follower.blocks, all);
        }
    }

    #[test]
    fn who_is_too_far_behind_starts_anew() {
        let log = BlockLog::default();
        let mut replica = log.replica();
        let mut follower = Follower::default();
        follower.read(&log);
        let names = (0..KEPT as u128 + 10).map(|name| BlockHash::from(name << 2));
        let stored = |name| BlockEvent::Stored(name, Place::Device);
        replica.changed(names.map(stored).collect());
        let answer = numbers(&log.log.lock().since(follower.after));
        assert_eq!((answer[1], answer.len()), (1, KEPT + 12));
        follower.read(&log);
        assert_eq!(follower.blocks.len(), KEPT + 10);
        // An event number from another server's log is not valid in this log.
        assert_eq!(numbers(&log.log.lock().since(7))[1], 1);
    }
}
