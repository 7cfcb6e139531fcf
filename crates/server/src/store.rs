//! Stored responses, which clients can retrieve or continue.
//!
//! The total size of all responses is bounded, and so is the age of each. Each API key finds only
//! its own responses. If room is short, the key with the largest share loses its oldest response
//! first.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::Item;
use forebay_engine::as_seconds;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::task::AbortHandle;

/// The bounds of stored responses.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct StoreConfig {
    /// The maximum total size of all responses and conversations in bytes; 0: no response is
    /// stored.
    pub response_store_bytes: usize,
    /// The time for which a response is stored.
    #[serde(serialize_with = "as_seconds")]
    pub response_store_ttl: Duration,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { response_store_bytes: 64 << 20, response_store_ttl: Duration::from_secs(24 * 3600) }
    }
}

/// The owner of a response: the number of an API key, or one common owner if there are no keys.
pub(crate) type Owner = usize;

/// The items that one request and its response added to the conversation.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) input: Vec<Item>,
    pub(crate) output: Vec<Item>,
    weight: Weight,
}

impl Turn {
    /// Returns the turn's approximate size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.weight.bytes
    }
}

/// Adds bytes to the counters, and subtracts them when it is dropped. A turn is dropped with the
/// last stored response that contains it.
#[derive(Debug)]
struct Weight {
    bytes: usize,
    counted: [Arc<AtomicUsize>; 2],
}

impl Weight {
    fn new(bytes: usize, counted: [Arc<AtomicUsize>; 2]) -> Self {
        for counter in &counted {
            counter.fetch_add(bytes, Ordering::Relaxed);
        }
        Self { bytes, counted }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        for counter in &self.counted {
            counter.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// A finished response, before it is stored.
#[derive(Debug)]
pub(crate) struct FinishedResponse {
    /// The body as it is sent to clients.
    pub(crate) body: Bytes,
    pub(crate) input: Vec<Item>,
    pub(crate) output: Vec<Item>,
    /// The earlier turns of the conversation.
    pub(crate) before: Vec<Arc<Turn>>,
    /// True for a background response, which is computed after the HTTP response was sent.
    pub(crate) background: bool,
}

/// A stored response.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    /// The body as it is sent to clients.
    pub(crate) body: Bytes,
    /// The conversation, which ends with the response's own turn. Empty while the response is being
    /// computed.
    pub(crate) turns: Vec<Arc<Turn>>,
    /// True while a background response is being computed.
    pub(crate) running: bool,
    /// True for a background response.
    pub(crate) background: bool,
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    abort: Option<AbortHandle>,
    since: Instant,
    serial: u64,
    _weight: Weight,
}

#[derive(Debug, Default)]
struct Share {
    bytes: Arc<AtomicUsize>,
    entries: HashMap<Box<str>, Entry>,
    /// Response ids in the order of arrival.
    order: BTreeMap<u64, Box<str>>,
    /// The number of evicted responses that were not reported to their owner yet.
    untold: u64,
}

impl Share {
    fn remove(&mut self, id: &str) -> Option<Entry> {
        let entry = self.entries.remove(id)?;
        self.order.remove(&entry.serial);
        Some(entry)
    }

    /// Returns the id of the oldest response that is not being computed.
    fn oldest(&self) -> Option<&str> {
        let mut names = self.order.values();
        names.find(|name| !self.entries[&***name].kept.running).map(|name| &**name)
    }
}

/// The stored responses of all owners.
#[derive(Debug)]
pub(crate) struct Store {
    config: StoreConfig,
    bytes: Arc<AtomicUsize>,
    shares: Mutex<(u64, HashMap<Owner, Share>)>,
}

impl Store {
    pub(crate) fn new(config: StoreConfig) -> Self {
        Self { config, bytes: Arc::default(), shares: Mutex::default() }
    }

    /// True if the store keeps responses.
    pub(crate) fn keeps(&self) -> bool {
        self.config.response_store_bytes > 0
    }

    /// Returns the total size of all stored responses in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Stores a finished response.
    pub(crate) fn keep(&self, owner: Owner, id: &str, finished: FinishedResponse) {
        let FinishedResponse { body, input, output, before, background } = finished;
        let mut guard = self.shares.lock();
        let share = guard.1.entry(owner).or_default();
        // A response that was deleted or stopped while it was being computed stays deleted or
        // stopped.
        if background && !share.entries.get(id).is_some_and(|entry| entry.kept.running) {
            return;
        }
        let counted = [Arc::clone(&self.bytes), Arc::clone(&share.bytes)];
        let bytes = input.iter().chain(&output).map(Item::bytes).sum();
        let turn = Arc::new(Turn { input, output, weight: Weight::new(bytes, counted) });
        let mut turns = before;
        turns.push(turn);
        let kept = Kept { body, turns, running: false, background };
        self.insert(&mut guard, owner, id, kept, None);
    }

    /// Stores the id and the first body of a background response that is about to be computed.
    pub(crate) fn begin(&self, owner: Owner, id: &str, body: Bytes, abort: Option<AbortHandle>) {
        let kept = Kept { body, turns: Vec::new(), running: true, background: true };
        self.insert(&mut self.shares.lock(), owner, id, kept, abort);
    }

    /// Stores the final state of a background response that failed or was cancelled; no request can
    /// continue it. Returns false if the response is no longer being computed.
    pub(crate) fn fail(&self, owner: Owner, id: &str, body: Bytes) -> bool {
        let mut guard = self.shares.lock();
        let running = guard.1.get(&owner).and_then(|share| share.entries.get(id));
        if !running.is_some_and(|entry| entry.kept.running) {
            return false;
        }
        let kept = Kept { body, turns: Vec::new(), running: false, background: true };
        self.insert(&mut guard, owner, id, kept, None);
        true
    }

    fn insert(
        &self,
        (next, shares): &mut (u64, HashMap<Owner, Share>),
        owner: Owner,
        id: &str,
        kept: Kept,
        abort: Option<AbortHandle>,
    ) {
        let share = shares.entry(owner).or_default();
        let before = share.remove(id);
        let serial = before.as_ref().map_or(*next, |entry| entry.serial);
        *next += 1;
        let counted = [Arc::clone(&self.bytes), Arc::clone(&share.bytes)];
        let bytes = ENTRY + kept.body.len() + kept.turns.len() * size_of::<Arc<Turn>>();
        let entry = Entry {
            kept,
            abort: abort.or(before.and_then(|entry| entry.abort)),
            since: Instant::now(),
            serial,
            _weight: Weight::new(bytes, counted),
        };
        share.order.insert(serial, id.into());
        share.entries.insert(id.into(), entry);
        self.expire(shares);
        while self.bytes() > self.config.response_store_bytes {
            let heaviest = shares
                .values_mut()
                .filter(|share| share.oldest().is_some())
                .max_by_key(|share| share.bytes.load(Ordering::Relaxed));
            let Some(share) = heaviest else { return };
            let Some(name) = share.oldest().map(str::to_owned) else { return };
            share.remove(&name);
            share.untold += 1;
        }
    }

    /// Drops responses that are too old.
    fn expire(&self, shares: &mut HashMap<Owner, Share>) {
        shares.retain(|_, share| {
            while let Some(name) = share.oldest().map(str::to_owned)
                && share.entries[&*name].since.elapsed() >= self.config.response_store_ttl
            {
                share.remove(&name);
            }
            !share.entries.is_empty() || share.untold > 0
        });
    }

    /// Returns a stored response.
    pub(crate) fn get(&self, owner: Owner, id: &str) -> Option<Kept> {
        let mut guard = self.shares.lock();
        self.expire(&mut guard.1);
        Some(guard.1.get(&owner)?.entries.get(id)?.kept.clone())
    }

    /// Returns those items of the owner's stored responses that have these ids.
    pub(crate) fn items(&self, owner: Owner, names: &HashSet<&str>) -> HashMap<String, Item> {
        let mut guard = self.shares.lock();
        self.expire(&mut guard.1);
        let entries = guard.1.get(&owner).into_iter().flat_map(|share| share.entries.values());
        // Only the last turn of a conversation belongs to the response; earlier turns belong to
        // other responses.
        let turns = entries.filter_map(|entry| entry.kept.turns.last());
        let items = turns.flat_map(|turn| turn.input.iter().chain(&turn.output));
        let named = |item: &Item| {
            let id = item.id().filter(|id| names.contains(id))?;
            Some((id.to_owned(), item.clone()))
        };
        items.filter_map(named).collect()
    }

    /// Deletes a response, and stops it if it is being computed. Returns false if there is no such
    /// response.
    pub(crate) fn delete(&self, owner: Owner, id: &str) -> bool {
        let mut guard = self.shares.lock();
        let Some(entry) = guard.1.get_mut(&owner).and_then(|share| share.remove(id)) else {
            return false;
        };
        entry.abort.iter().for_each(AbortHandle::abort);
        true
    }

    /// Stops a background response.
    pub(crate) fn stop(&self, owner: Owner, id: &str) {
        let guard = self.shares.lock();
        let entry = guard.1.get(&owner).and_then(|share| share.entries.get(id));
        entry.and_then(|entry| entry.abort.as_ref()).into_iter().for_each(AbortHandle::abort);
    }

    /// Returns the number of this owner's responses that were evicted since the last call.
    pub(crate) fn take_untold(&self, owner: Owner) -> u64 {
        let mut guard = self.shares.lock();
        guard.1.get_mut(&owner).map_or(0, |share| std::mem::take(&mut share.untold))
    }
}

/// Bytes of an entry without its body and turns.
const ENTRY: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn store(bytes: usize, ttl: Duration) -> Store {
        Store::new(StoreConfig { response_store_bytes: bytes, response_store_ttl: ttl })
    }

    fn finished(bytes: usize, before: Vec<Arc<Turn>>) -> FinishedResponse {
        let body = Bytes::from(vec![b' '; bytes]);
        FinishedResponse { body, input: vec![], output: vec![], before, background: false }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_oldest_of_whoever_keeps_most_goes_first() {
        let store = store(10_000, HOUR);
        store.keep(2, "small", finished(1000, vec![]));
        for id in ["a", "b", "c", "d"] {
            store.keep(1, id, finished(2000, vec![]));
        }
        assert!(store.bytes() <= 10_000);
        assert!(store.get(1, "a").is_none() && store.get(1, "d").is_some());
        assert!(store.get(2, "small").is_some());
        assert_eq!((store.take_untold(1), store.take_untold(1), store.take_untold(2)), (1, 0, 0));
    }

    #[test]
    fn nobody_finds_another_s() {
        let store = store(10_000, HOUR);
        store.keep(1, "a", finished(10, vec![]));
        assert!(store.get(2, "a").is_none() && !store.delete(2, "a"));
        assert!(store.delete(1, "a") && !store.delete(1, "a"));
        assert_eq!(store.bytes(), 0);
    }

    #[test]
    fn old_ones_go() {
        let store = store(10_000, Duration::ZERO);
        store.keep(1, "a", finished(10, vec![]));
        assert!(store.get(1, "a").is_none());
        assert_eq!(store.bytes(), 0);
    }

    #[test]
    fn a_turn_is_counted_once_and_as_long_as_somebody_goes_on_from_it() {
        let store = store(100_000, HOUR);
        let said: Vec<Item> = serde_json::from_value(
            serde_json::json!([{"role": "user", "content": "x".repeat(5000)}]),
        )
        .unwrap();
        let first = FinishedResponse { input: said, ..finished(10, vec![]) };
        store.keep(1, "a", first);
        let turns = store.get(1, "a").unwrap().turns;
        store.keep(1, "b", finished(10, turns));
        let both = store.bytes();
        assert!((5000..12_000).contains(&both), "{both}");
        assert!(store.delete(1, "a"));
        assert!(store.bytes() >= 5000);
        assert_eq!(store.get(1, "b").unwrap().turns.len(), 2);
        assert!(store.delete(1, "b"));
        assert_eq!(store.bytes(), 0);
    }

    #[test]
    fn what_is_computed_stays_and_ends_once() {
        let store = store(600, HOUR);
        store.begin(1, "a", Bytes::from_static(b"running"), None);
        store.keep(1, "b", finished(1000, vec![]));
        assert!(store.get(1, "b").is_none());
        assert!(store.get(1, "a").unwrap().running);
        assert!(store.fail(1, "a", Bytes::from_static(b"failed")));
        assert!(!store.fail(1, "a", Bytes::from_static(b"again")));
        assert_eq!(store.get(1, "a").unwrap().body, "failed");
        store.keep(1, "a", FinishedResponse { background: true, ..finished(10, vec![]) });
        assert_eq!(store.get(1, "a").unwrap().body, "failed");
    }
}
