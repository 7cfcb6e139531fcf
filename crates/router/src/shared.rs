//! What all threads of the router share, and what each has for itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::ask::Ask;
use crate::backend::Sent;
use crate::config::{RouterConfig, Watch};
use crate::index::TextIndex;
use crate::ledger::Accounting;
use crate::policy::{Chooser, Policy};
use crate::registry::Registry;

/// What is counted of all backends together.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) requests: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) failovers: AtomicU64,
    pub(crate) errors: AtomicU64,
}

/// What all threads share.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    /// The router's name to backends.
    pub(crate) id: u64,
    pub(crate) registry: Registry,
    pub(crate) index: Mutex<TextIndex>,
    /// One choice at a time: the next one has to see this one's dispatch.
    chooser: Mutex<Chooser>,
    pub(crate) totals: Totals,
    /// New requests are refused.
    pub(crate) draining: AtomicBool,
    /// What is alive is to be ended.
    pub(crate) cut: watch::Sender<bool>,
    /// A part of the router has panicked.
    pub(crate) broken: watch::Sender<bool>,
    live: watch::Sender<usize>,
}

impl Shared {
    pub(crate) fn new(config: RouterConfig, registry: Registry) -> Self {
        Self {
            id: rand::random(),
            registry,
            index: Mutex::default(),
            chooser: Mutex::new(Chooser::new(config.policy, config.thresholds)),
            totals: Totals::default(),
            draining: AtomicBool::new(false),
            cut: watch::Sender::new(false),
            broken: watch::Sender::new(false),
            live: watch::Sender::new(0),
            config,
        }
    }

    /// Chooses a backend for a request and notes the dispatch. `avoid` are those that have failed it; `resumed`: it has to be one that can go
    /// on with a stream.
    pub(crate) fn dispatch(&self, ask: &Ask, avoid: &[u32], resumed: bool) -> Option<Sent> {
        let backends = self.registry.current();
        let now = Instant::now();
        let mut fit = Vec::with_capacity(backends.len());
        let mut candidates = Vec::with_capacity(backends.len());
        let mut chooser = self.chooser.lock();
        for backend in backends.iter() {
            let wanted = !avoid.contains(&backend.id) && (!resumed || backend.is_forebay());
            if wanted && let Some(candidate) = backend.candidate(now) {
                fit.push(backend);
                candidates.push(candidate);
            }
        }
        if let Some(texts) = &ask.texts {
            let parts = self.index.lock().parts(texts);
            for (backend, candidate) in fit.iter().zip(&mut candidates) {
                candidate.cached = backend.stored.lock().share(&parts, backend.id);
            }
        }
        let chosen = fit[chooser.choose(&candidates, ask.key)?];
        if let Some(texts) = &ask.texts {
            self.index.lock().sent(texts, chosen.id);
        }
        Some(Arc::clone(chosen).begin(ask.tokens()))
    }

    /// Whether backends' reports that ride on responses are used.
    pub(crate) fn uses_reports(&self) -> bool {
        !matches!(self.config.watch, Watch::Polled(_))
    }

    /// Whether block names are of use.
    pub(crate) fn uses_blocks(&self) -> bool {
        self.config.policy == Policy::CacheAware
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Live {
        self.totals.requests.fetch_add(1, Ordering::Relaxed);
        self.live.send_modify(|live| *live += 1);
        Live(Arc::clone(self))
    }

    /// Waits until no request is alive.
    pub(crate) async fn idle(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.live.subscribe().wait_for(|&live| live == 0).await;
    }
}

/// Dropped by a panic, it says that a part of the router is lost.
pub(crate) struct Fuse(pub(crate) Arc<Shared>);

impl Drop for Fuse {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.send_replace(true);
        }
    }
}

/// Counts a request as alive.
pub(crate) struct Live(Arc<Shared>);

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.send_modify(|live| *live -= 1);
    }
}

impl Watch {
    pub(crate) fn accounting(self) -> Accounting {
        match self {
            Self::Acknowledged => Accounting::Acknowledged,
            Self::Unacknowledged | Self::Polled(_) => Accounting::Overwritten,
        }
    }
}

/// A thread that passes on requests.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) idle: crate::link::Idle,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Accounting;

    #[test]
    fn a_panic_blows_the_fuse_and_an_end_does_not() {
        let registry = Registry::new(Accounting::Overwritten, Default::default(), Box::new(|_| {}));
        let shared = Arc::new(Shared::new(RouterConfig::default(), registry));
        drop(Fuse(Arc::clone(&shared)));
        assert!(!*shared.broken.borrow());
        let fuse = Fuse(Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            let _fuse = fuse;
            panic!("as the test wants");
        });
        assert!(thread.join().is_err());
        assert!(*shared.broken.borrow());
    }
}
