//! A cache of encoded text, for later turns of conversations.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lru::LruCache;
use parking_lot::Mutex;

/// The size of an entry besides its text and ids, in bytes: allocation headers, and the slot in the
/// table.
const ENTRY_BYTES: usize = 128;

/// Maps parts of texts to their ids. The cache holds a limited number of bytes, and evicts the
/// least recently used parts first.
///
/// The key is the full text of the part, not a hash, so a found entry always has the right ids. The
/// key includes a salt, so encoding times reveal nothing about texts with other salts.
#[derive(Debug)]
pub(crate) struct TextCache {
    entries: Mutex<Entries>,
    limit: usize,
    looked_up: AtomicU64,
    found: AtomicU64,
}

#[derive(Debug)]
struct Entries {
    ids: LruCache<Kept, Arc<[i32]>>,
    bytes: usize,
}

/// The key of a cached part: its text and its salt.
#[derive(Debug)]
struct Kept {
    salt: u64,
    part: Box<str>,
}

/// A stored or a borrowed key, so that a lookup copies no text.
trait Key {
    fn parts(&self) -> (u64, &str);
}

impl Key for Kept {
    fn parts(&self) -> (u64, &str) {
        (self.salt, &self.part)
    }
}

impl Key for (u64, &str) {
    fn parts(&self) -> (u64, &str) {
        *self
    }
}

impl Hash for dyn Key + '_ {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.parts().hash(state);
    }
}

impl PartialEq for dyn Key + '_ {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for dyn Key + '_ {}

impl Hash for Kept {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.parts().hash(state);
    }
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for Kept {}

impl<'a> Borrow<dyn Key + 'a> for Kept {
    fn borrow(&self) -> &(dyn Key + 'a) {
        self
    }
}

impl TextCache {
    /// Creates an empty cache for `limit` bytes of text, ids and overhead.
    pub(crate) fn new(limit: usize) -> Self {
        let entries = Entries { ids: LruCache::unbounded(), bytes: 0 };
        Self {
            entries: Mutex::new(entries),
            limit,
            looked_up: AtomicU64::new(0),
            found: AtomicU64::new(0),
        }
    }

    /// Returns the cached ids of each part, among texts with this salt.
    pub(crate) fn get_all(&self, salt: u64, parts: &[&str]) -> Vec<Option<Arc<[i32]>>> {
        let found: Vec<_> = {
            let mut entries = self.entries.lock();
            let mut get = |part: &str| entries.ids.get(&(salt, part) as &dyn Key).cloned();
            parts.iter().map(|&part| get(part)).collect()
        };
        let looked_up: usize = parts.iter().map(|part| part.len()).sum();
        let hits = parts.iter().zip(&found).filter(|(_, ids)| ids.is_some());
        let hits: usize = hits.map(|(part, _)| part.len()).sum();
        self.looked_up.fetch_add(looked_up as u64, Ordering::Relaxed);
        self.found.fetch_add(hits as u64, Ordering::Relaxed);
        found
    }

    /// Stores the ids of a part, for texts with this salt. A part larger than the whole cache is
    /// not stored.
    pub(crate) fn insert(&self, salt: u64, part: &str, ids: Arc<[i32]>) {
        let bytes = cost(part, &ids);
        if bytes > self.limit {
            return;
        }
        let mut entries = self.entries.lock();
        if let Some((Kept { part, .. }, ids)) =
            entries.ids.push(Kept { salt, part: part.into() }, ids)
        {
            // Another request encoded the same part meanwhile.
            entries.bytes -= cost(&part, &ids);
        }
        entries.bytes += bytes;
        while entries.bytes > self.limit {
            let Some((Kept { part, .. }, ids)) = entries.ids.pop_lru() else { return };
            entries.bytes -= cost(&part, &ids);
        }
    }

    /// Returns the bytes of text looked up and found so far, and the bytes in use now.
    pub(crate) fn counts(&self) -> (u64, u64, usize) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (count(&self.looked_up), count(&self.found), self.entries.lock().bytes)
    }
}

fn cost(part: &str, ids: &[i32]) -> usize {
    part.len() + size_of_val(ids) + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(part: &str) -> Arc<[i32]> {
        part.bytes().map(i32::from).collect()
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let cache = TextCache::new(2 * cost("a", &ids("a")));
        cache.insert(0, "a", ids("a"));
        cache.insert(0, "b", ids("b"));
        assert_eq!(cache.get_all(0, &["a"]), [Some(ids("a"))]);
        cache.insert(0, "c", ids("c"));
        assert_eq!(cache.get_all(0, &["a", "b", "c"]), [Some(ids("a")), None, Some(ids("c"))]);
        let (looked_up, found, _) = cache.counts();
        assert_eq!((looked_up, found), (4, 3));
    }

    #[test]
    fn texts_of_another_salt_are_not_found() {
        let cache = TextCache::new(1000);
        cache.insert(1, "a", ids("a"));
        assert_eq!(cache.get_all(2, &["a"]), [None]);
        cache.insert(2, "a", ids("a"));
        assert_eq!(cache.get_all(2, &["a"]), [Some(ids("a"))]);
        assert_eq!(cache.get_all(1, &["a"]), [Some(ids("a"))]);
        assert_eq!(cache.counts().2, 2 * cost("a", &ids("a")));
    }

    proptest! {
        #[test]
        fn it_holds_no_more_than_it_may_and_nothing_wrong(
            limit in 0..2000_usize,
            parts in prop::collection::vec((0..3_u64, "[ab]{0,200}"), 0..60),
        ) {
            let cache = TextCache::new(limit);
            for (salt, part) in &parts {
                if let [Some(found)] = &cache.get_all(*salt, &[part])[..] {
                    prop_assert_eq!(found, &ids(part));
                }
                cache.insert(*salt, part, ids(part));
                let bytes = cache.counts().2;
                prop_assert!(bytes <= limit);
                let entries = cache.entries.lock();
                let kept: usize = entries.ids.iter().map(|(key, ids)| cost(&key.part, ids)).sum();
                drop(entries);
                prop_assert_eq!(kept, bytes);
                let fits = cost(part, &ids(part)) <= limit;
                prop_assert_eq!(cache.get_all(*salt, &[part])[0].is_some(), fits);
            }
        }
    }
}
