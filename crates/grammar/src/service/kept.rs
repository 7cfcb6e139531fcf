//! The cache of compiled sources, bounded in bytes.

use std::collections::HashMap;
use std::time::Instant;

use lru::LruCache;

use super::Compiled;
use crate::source::Source;

/// The size of an entry in bytes, without its source and the compiled form.
const ENTRY: usize = 1024;

/// The cache of compiled and rejected sources. The least recently used entry is evicted first.
pub(super) struct Kept {
    limit: usize,
    bytes: usize,
    /// The total size in bytes of each client's entries.
    clients: HashMap<u64, usize>,
    entries: LruCache<Source, Entry>,
}

struct Entry {
    compiled: Compiled,
    /// The client for which the source was compiled.
    client: u64,
    bytes: usize,
    /// The time until which the entry is valid; `None` if it does not expire.
    until: Option<Instant>,
}

impl Kept {
    /// Creates an empty cache of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        let (clients, entries) = (HashMap::new(), LruCache::unbounded());
        Self { limit, bytes: 0, clients, entries }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn get(&mut self, source: &Source, now: Instant) -> Option<Compiled> {
        let entry = self.entries.get(source)?;
        if entry.until.is_none_or(|until| now < until) {
            return Some(entry.compiled.clone());
        }
        if let Some(entry) = self.entries.pop(source) {
            self.forget(&entry);
        }
        None
    }

    /// Stores a result. Returns the results that were evicted for it.
    pub(super) fn put(
        &mut self,
        source: Source,
        client: u64,
        compiled: Compiled,
        until: Option<Instant>,
    ) -> Vec<Compiled> {
        let template = compiled.as_ref().map_or(0, |template| template.footprint().kept);
        let bytes = ENTRY + source.size() + template;
        self.bytes += bytes;
        *self.clients.entry(client).or_default() += bytes;
        let mut evicted = Vec::new();
        let entry = Entry { compiled, client, bytes, until };
        if let Some((_, old)) = self.entries.push(source, entry) {
            self.forget(&old);
            evicted.push(old.compiled);
        }
        while self.bytes > self.limit
            && let Some(entry) = self.pop()
        {
            self.forget(&entry);
            evicted.push(entry.compiled);
        }
        evicted
    }

    /// Removes the next entry to evict. If several clients have entries and one of them has more
    /// than half of the cache, that client's entries are evicted first.
    fn pop(&mut self) -> Option<Entry> {
        let half = self.limit / 2;
        let greedy = self.clients.iter().find(|(_, bytes)| **bytes > half);
        let greedy = greedy.map(|(&client, _)| client).filter(|_| self.clients.len() > 1);
        let Some(greedy) = greedy else { return Some(self.entries.pop_lru()?.1) };
        let mut oldest = self.entries.iter().rev();
        let (source, _) = oldest.find(|(_, entry)| entry.client == greedy)?;
        let source = source.clone();
        self.entries.pop(&source)
    }

    fn forget(&mut self, entry: &Entry) {
        self.bytes -= entry.bytes;
        if let Some(bytes) = self.clients.get_mut(&entry.client) {
            *bytes -= entry.bytes;
            if *bytes == 0 {
                self.clients.remove(&entry.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::GrammarError;
    use crate::source::Form;

    /// Returns a source that takes 10 KiB in the cache when it is rejected.
    fn source(number: usize) -> Source {
        let none = Source::from(Form::Regex("".into())).size();
        let width = (10 << 10) - ENTRY - none;
        Form::Regex(format!("{number:0width$}").into()).into()
    }

    fn cache(kib: usize) -> Kept {
        Kept::new(kib << 10)
    }

    fn put(kept: &mut Kept, client: u64, number: usize) {
        kept.put(source(number), client, Err(GrammarError::invalid("no")), None);
    }

    fn found(kept: &mut Kept, numbers: std::ops::Range<usize>) -> Vec<usize> {
        let now = Instant::now();
        numbers.filter(|&number| kept.get(&source(number), now).is_some()).collect()
    }

    #[test]
    fn bytes_are_bounded_and_the_oldest_go_first() {
        let mut kept = cache(100);
        (0..25).for_each(|number| put(&mut kept, 1, number));
        assert_eq!(found(&mut kept, 0..25), (15..25).collect::<Vec<_>>());
        assert_eq!((kept.bytes(), kept.clients[&1]), (100 << 10, 100 << 10));
        // A recently used entry is not evicted.
        assert_eq!(found(&mut kept, 15..16), [15]);
        put(&mut kept, 1, 25);
        assert_eq!(found(&mut kept, 15..17), [15]);
        // The new entry replaces the old one.
        put(&mut kept, 1, 25);
        assert_eq!(kept.bytes(), 100 << 10);
    }

    #[test]
    fn a_client_has_half_while_others_keep_something() {
        let mut kept = cache(100);
        (0..3).for_each(|number| put(&mut kept, 1, number));
        (100..400).for_each(|number| put(&mut kept, 2, number));
        assert_eq!(found(&mut kept, 0..3), [0, 1, 2], "the other one's are not touched");
        assert_eq!(found(&mut kept, 100..400).len(), 7);
        // The client that filled the whole cache loses entries until it has half of the cache.
        (3..10).for_each(|number| put(&mut kept, 1, number));
        assert_eq!(found(&mut kept, 0..10).len(), 5);
        assert_eq!(found(&mut kept, 100..400).len(), 5);
    }

    #[test]
    fn what_holds_for_a_while_is_forgotten_then() {
        let mut kept = cache(100);
        let now = Instant::now();
        let until = now + Duration::from_secs(60);
        kept.put(source(1), 1, Err(GrammarError::invalid("too slow")), Some(until));
        assert!(kept.get(&source(1), until - Duration::from_secs(1)).is_some());
        assert!(kept.get(&source(1), until).is_none());
        assert_eq!((kept.bytes(), kept.clients.len()), (0, 0));
    }
}
