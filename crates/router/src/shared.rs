//! The state that all threads of the router share, and the state of each thread.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use forebay_http::{Clients, KeyId, Keys, Remote};
use forebay_webui::Watchers;
use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ask::{Ask, Reading};
use crate::backend::{Backend, Sent};
use crate::budget::Budget;
use crate::config::{RouterConfig, Watch};
use crate::homes::Homes;
use crate::index::TextIndex;
use crate::ledger::Accounting;
use crate::models::{Unlisted, without};
use crate::past::Trial;
use crate::policy::{Chooser, Policy};
use crate::registry::Registry;
use crate::trials::Ticket;

/// The counts over all backends together.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) requests: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) failovers: AtomicU64,
    pub(crate) errors: AtomicU64,
    /// Requests that were in flight at a backend's death, and those of them that were not tried
    /// again.
    pub(crate) suspects: AtomicU64,
    pub(crate) given_up: AtomicU64,
}

/// The state that all threads share.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    pub(crate) began: Instant,
    /// The router's name to backends.
    pub(crate) id: u64,
    /// The keys that it shows to them: its own, and in `Authorization` where it asks them
    /// something.
    pub(crate) router_key: Option<HeaderValue>,
    pub(crate) own_key: Option<HeaderValue>,
    /// The seed of the names of texts, so that no client can construct texts with one name.
    text_root: u64,
    clients: Clients,
    /// The keys of clients and of operators.
    pub(crate) keys: Keys,
    pub(crate) admin_keys: Keys,
    /// The places for connections of clients.
    pub(crate) places: Arc<Semaphore>,
    /// The memory that the bodies of requests take.
    pub(crate) budget: Arc<Budget>,
    pub(crate) registry: Registry,
    pub(crate) index: Mutex<TextIndex>,
    /// The backends that keep responses.
    pub(crate) homes: Homes,
    pub(crate) unlisted: Unlisted,
    /// The chooser of backends, locked for one choice at a time: the next choice has to see the
    /// last dispatch.
    chooser: Mutex<Chooser>,
    pub(crate) totals: Totals,
    /// New requests are refused.
    pub(crate) draining: AtomicBool,
    /// The signal to end everything that is alive.
    pub(crate) cut: watch::Sender<bool>,
    /// A part of the router has panicked.
    pub(crate) broken: watch::Sender<bool>,
    /// The clients that watch the backends.
    pub(crate) watchers: Watchers,
    live: watch::Sender<usize>,
}

impl Shared {
    pub(crate) fn new(config: RouterConfig, registry: Registry) -> Self {
        let header = |text: &str| {
            let value = HeaderValue::from_str(text).ok();
            value.map(|mut value| {
                value.set_sensitive(true);
                value
            })
        };
        let own_key = config.api_keys.first().and_then(|key| header(&format!("Bearer {key}")));
        Self {
            began: Instant::now(),
            id: rand::random(),
            router_key: config.router_key.as_deref().and_then(header),
            own_key,
            text_root: rand::random(),
            clients: Clients::default(),
            keys: Keys::new(&config.api_keys),
            admin_keys: Keys::new(&config.admin_key),
            places: Arc::new(Semaphore::new(config.max_connections.min(Semaphore::MAX_PERMITS))),
            budget: Budget::new(config.bodies.all),
            registry,
            index: Mutex::default(),
            homes: Homes::default(),
            unlisted: Unlisted::default(),
            chooser: Mutex::new(Chooser::new(config.policy, config.thresholds)),
            totals: Totals::default(),
            draining: AtomicBool::new(false),
            cut: watch::Sender::new(false),
            broken: watch::Sender::new(false),
            watchers: Watchers::default(),
            live: watch::Sender::new(0),
            config,
        }
    }

    /// Chooses a backend for a request and notes the dispatch. `avoid` are backends that have
    /// failed it. With `resumed` the backend has to be able to continue a stream. With `trial` the
    /// request is a suspect, and is tried where no other one is.
    pub(crate) fn dispatch(
        &self,
        ask: &Ask,
        avoid: &[u32],
        resumed: bool,
        trial: Option<(Trial, &Ticket)>,
    ) -> Choice {
        let backends = self.registry.current();
        let now = Instant::now();
        let mut fit = Vec::with_capacity(backends.len());
        let mut unfit = Vec::new();
        let home = ask.response.as_deref().and_then(|response| self.homes.of(response));
        // One that is gone keeps nothing: then another may say so.
        let home = home
            .filter(|home| backends.iter().any(|backend| backend.id == *home && backend.is_up()));
        let strange = ask.model.as_deref().map_or_else(Vec::new, |model| without(&backends, model));
        let mut chooser = self.chooser.lock();
        for backend in backends.iter() {
            let wanted = !avoid.contains(&backend.id)
                && !strange.contains(&backend.id)
                && (!resumed || backend.is_forebay())
                && home.is_none_or(|home| home == backend.id);
            if !wanted {
                unfit.push(backend.id);
            } else if let Some((candidate, tries)) = backend.candidate(now) {
                fit.push((backend, candidate, tries));
            }
        }
        if fit.is_empty() {
            return Choice::Nobody;
        }
        let free: Vec<u32> =
            fit.iter().filter(|(_, _, tries)| !tries).map(|(backend, ..)| backend.id).collect();
        if let Some((_, ticket)) = trial {
            let turns = ticket.turns(&free, unfit);
            if turns.is_empty() {
                return Choice::OnTrial;
            }
            fit.retain(|(backend, ..)| turns.contains(&backend.id));
        } else if !free.is_empty() {
            // It could be there at a death.
            fit.retain(|(_, _, tries)| !tries);
        }
        let (fit, mut candidates): (Vec<_>, Vec<_>) =
            fit.into_iter().map(|(backend, candidate, _)| (backend, candidate)).unzip();
        let shares = self.cached(ask, fit.iter().map(|backend| &***backend));
        for (cached, candidate) in shares.into_iter().zip(&mut candidates) {
            candidate.cached = cached;
        }
        let Some(chosen) = chooser.choose(&candidates, ask.key) else { return Choice::Nobody };
        let chosen = fit[chosen];
        let sent = self.send(ask, chosen, trial.map(|(trial, _)| trial));
        if let Some((_, ticket)) = trial {
            ticket.used(free.into_iter().filter(|&free| free != chosen.id));
        }
        Choice::Sent(sent)
    }

    /// Sends a queued request to this backend; `None` if it takes none now, or tries a suspect.
    pub(crate) fn dispatch_to(&self, ask: &Ask, to: u32) -> Option<Sent> {
        let backends = self.registry.current();
        let backend = backends.iter().find(|backend| backend.id == to)?;
        let _chooser = self.chooser.lock();
        backend.candidate(Instant::now()).filter(|(_, tries)| !tries)?;
        Some(self.send(ask, backend, None))
    }

    fn send(&self, ask: &Ask, backend: &Arc<Backend>, trial: Option<Trial>) -> Sent {
        if let Some(texts) = &ask.texts {
            self.index.lock().sent(texts, backend.id);
        }
        Arc::clone(backend).begin(ask.tokens(), trial)
    }

    /// The share of a request's prompt that each backend has cached; empty if nobody looks at it.
    pub(crate) fn cached<'a>(
        &self,
        ask: &Ask,
        backends: impl Iterator<Item = &'a Backend>,
    ) -> Vec<f32> {
        let Some(texts) = &ask.texts else { return Vec::new() };
        let parts = self.index.lock().parts(texts);
        let share = |backend: &Backend| {
            let names = backend.names();
            backend.stored.lock().share(&parts, backend.id, names)
        };
        backends.map(share).collect()
    }

    /// True if queued requests move. Loads that are there to be measured against move nothing.
    pub(crate) fn moves(&self) -> bool {
        self.config.queue_moves && self.config.watch == Watch::Acknowledged
    }

    /// The purpose of looks at requests of a client with this key at this address.
    pub(crate) fn reading(&self, key: KeyId, address: IpAddr) -> Reading {
        let key = KeyId(key.0.filter(|_| self.keys.len() > 1));
        let remote = Remote::Ip(address.to_canonical());
        let client = self.clients.id(key, remote, &HeaderMap::new());
        let key = key.0.filter(|_| !self.config.share_cache_across_keys);
        let key = key.and_then(|key| self.keys.text(key)).unwrap_or_default();
        let root = xxh3_64_with_seed(key.as_bytes(), self.text_root);
        Reading { policy: self.config.policy, client, root }
    }

    /// True if backends' reports that ride on responses are used.
    pub(crate) fn uses_reports(&self) -> bool {
        !matches!(self.config.watch, Watch::Polled(_))
    }

    /// True if block names are of use.
    pub(crate) fn uses_blocks(&self) -> bool {
        self.config.policy == Policy::CacheAware
    }

    /// Counts a request until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Live {
        self.totals.requests.fetch_add(1, Ordering::Relaxed);
        self.live.send_modify(|live| *live += 1);
        Live(Arc::clone(self))
    }

    /// Waits until some request is alive.
    pub(crate) async fn busy(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.live.subscribe().wait_for(|&live| live > 0).await;
    }

    /// Waits until no request is alive.
    pub(crate) async fn idle(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.live.subscribe().wait_for(|&live| live == 0).await;
    }
}

/// The outcome of a choice.
pub(crate) enum Choice {
    /// A backend gets the request.
    Sent(Sent),
    /// It is not the request's turn at any backend that could try it.
    OnTrial,
    /// No backend takes the request.
    Nobody,
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
