//! The list of backends, and the sources that name them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forebay_api::BackendUrl;
use parking_lot::{Mutex, RwLock};

use crate::backend::Backend;
use crate::breaker::BreakerConfig;
use crate::ledger::Accounting;
use crate::pairs::Duty;
use crate::trials::Trials;

/// The source that names a backend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// The command line.
    Flags,
    /// The file of backends.
    File,
    /// A resolved DNS name.
    Dns(String),
    /// A registration of this URL over HTTP, which expires.
    Lease(String),
}

#[derive(Debug, Clone)]
struct Entry {
    named: Vec<(BackendUrl, Duty)>,
    until: Option<Instant>,
}

/// A function that is called with each new backend.
pub(crate) type Added = Box<dyn Fn(&Arc<Backend>) + Send + Sync>;

/// The list of backends. A backend stays on the list as long as a source names it.
pub(crate) struct Registry {
    sources: Mutex<BTreeMap<Source, Entry>>,
    current: RwLock<Arc<[Arc<Backend>]>>,
    next_id: AtomicU32,
    accounting: Accounting,
    breaker: BreakerConfig,
    /// The suspects that wait for a trial.
    pub(crate) trials: Arc<Trials>,
    /// Called with each new backend.
    added: Added,
}

impl Registry {
    /// Creates an empty list. `added` is called with each new backend.
    pub(crate) fn new(accounting: Accounting, breaker: BreakerConfig, added: Added) -> Self {
        Self {
            sources: Mutex::default(),
            current: RwLock::new(Arc::new([])),
            next_id: AtomicU32::new(1),
            accounting,
            breaker,
            trials: Arc::default(),
            added,
        }
    }

    /// Returns the present list.
    pub(crate) fn current(&self) -> Arc<[Arc<Backend>]> {
        Arc::clone(&self.current.read())
    }

    /// Replaces the backends of a source. They compute whole requests.
    pub(crate) fn set(&self, source: Source, urls: Vec<BackendUrl>) {
        self.name(source, urls.into_iter().map(|url| (url, Duty::Whole)).collect());
    }

    /// Replaces the backends of a source, each with its duty.
    pub(crate) fn name(&self, source: Source, named: Vec<(BackendUrl, Duty)>) {
        let mut sources = self.sources.lock();
        sources.insert(source, Entry { named, until: None });
        self.rebuild(&sources);
    }

    /// Adds a backend, or renews its lease. Returns false if `most` other backends already have a
    /// lease.
    pub(crate) fn lease(
        &self,
        source: Source,
        url: BackendUrl,
        ttl: Duration,
        most: usize,
    ) -> bool {
        let mut sources = self.sources.lock();
        let is_lease = |source: &&Source| matches!(source, Source::Lease(_));
        if !sources.contains_key(&source) && sources.keys().filter(is_lease).count() >= most {
            return false;
        }
        let named = vec![(url, Duty::Whole)];
        sources.insert(source, Entry { named, until: Some(Instant::now() + ttl) });
        self.rebuild(&sources);
        true
    }

    /// Removes the backends of a source. Returns false if the source had none.
    pub(crate) fn remove(&self, source: &Source) -> bool {
        let mut sources = self.sources.lock();
        let removed = sources.remove(source).is_some();
        self.rebuild(&sources);
        removed
    }

    /// Removes backends whose leases were not renewed by `now`.
    pub(crate) fn expire(&self, now: Instant) {
        let mut sources = self.sources.lock();
        let before = sources.len();
        sources.retain(|_, entry| entry.until.is_none_or(|until| now < until));
        if sources.len() != before {
            self.rebuild(&sources);
        }
    }

    /// Updates the list. The caller holds the lock of the sources, so that lists are published in
    /// order.
    fn rebuild(&self, sources: &BTreeMap<Source, Entry>) {
        let old = self.current();
        let mut new: Vec<Arc<Backend>> = Vec::new();
        let mut fresh = Vec::new();
        for (url, duty) in sources.values().flat_map(|entry| &entry.named) {
            if new.iter().any(|backend| backend.url == *url) {
                continue;
            }
            let known = old.iter().find(|backend| backend.url == *url);
            new.push(known.cloned().unwrap_or_else(|| {
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                let (books, breaker) = (self.accounting, self.breaker);
                let trials = Arc::clone(&self.trials);
                let named = (url.clone(), *duty);
                let backend = Arc::new(Backend::new(id, named, books, breaker, trials));
                fresh.push(Arc::clone(&backend));
                backend
            }));
        }
        for backend in old.iter().filter(|old| !new.iter().any(|kept| kept.id == old.id)) {
            tracing::info!(backend = backend.url.url(), "backend is off the list");
            backend.removed.store(true, Ordering::Release);
            backend.suspected.notify_one();
        }
        *self.current.write() = new.into();
        for backend in &fresh {
            tracing::info!(backend = backend.url.url(), "backend is on the list");
            (self.added)(backend);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(names: &[&str]) -> Vec<BackendUrl> {
        names.iter().map(|name| BackendUrl::parse(name).unwrap()).collect()
    }

    fn registry() -> (Registry, Arc<Mutex<Vec<u32>>>) {
        let added = Arc::new(Mutex::new(Vec::new()));
        let note = Arc::clone(&added);
        let registry = Registry::new(
            Accounting::Acknowledged,
            BreakerConfig::default(),
            Box::new(move |backend| note.lock().push(backend.id)),
        );
        (registry, added)
    }

    fn names(registry: &Registry) -> Vec<String> {
        registry.current().iter().map(|backend| backend.url.url()).collect()
    }

    #[test]
    fn a_backend_stays_as_long_as_one_source_names_it() {
        let (registry, added) = registry();
        registry.set(Source::Flags, urls(&["a:1", "b:1"]));
        registry.set(Source::File, urls(&["b:1", "c:1"]));
        assert_eq!(names(&registry), ["http://a:1", "http://b:1", "http://c:1"]);
        let b = registry.current()[1].clone();
        registry.set(Source::Flags, urls(&["a:1"]));
        assert_eq!(registry.current()[1].id, b.id);
        assert!(registry.remove(&Source::File) && !registry.remove(&Source::File));
        assert_eq!(names(&registry), ["http://a:1"]);
        assert!(b.removed.load(Ordering::Relaxed));
        assert_eq!(*added.lock(), [1, 2, 3]);
    }

    #[test]
    fn a_lease_ends_unless_it_is_renewed() {
        let (registry, _) = registry();
        let (start, ttl) = (Instant::now(), Duration::from_secs(10));
        let lease = |name: &str, url, ttl| {
            let url = BackendUrl::parse(url).unwrap();
            registry.lease(Source::Lease(name.into()), url, ttl, 2)
        };
        assert!(lease("a", "a:1", ttl) && lease("b", "b:1", 3 * ttl));
        assert!(!lease("c", "c:1", ttl), "there is room for two");
        assert!(lease("a", "a:1", ttl), "a lease may be renewed");
        registry.expire(start + ttl / 2);
        assert_eq!(names(&registry).len(), 2);
        registry.expire(start + 2 * ttl);
        assert_eq!(names(&registry), ["http://b:1"]);
    }
}
