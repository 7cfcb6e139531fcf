//! The state that all threads of the router share, and the state per thread.

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
use crate::pairs::{PairEngine, paired};
use crate::past::Trial;
use crate::policy::{Candidate, Chooser, Policy};
use crate::registry::Registry;
use crate::trials::Ticket;
use crate::used::Used;

/// Counters over all backends together.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) requests: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) failovers: AtomicU64,
    pub(crate) errors: AtomicU64,
    /// How often a request was in flight at a backend's death. `given_up` is the number of requests
    /// that were then given up.
    pub(crate) suspects: AtomicU64,
    pub(crate) given_up: AtomicU64,
    /// The number of attempts with a pair. `unfetched` counts those in which the answer of a vLLM
    /// prefill server names nothing to transfer.
    pub(crate) pairs: AtomicU64,
    pub(crate) unfetched: AtomicU64,
}

/// The choosers of backends.
struct Choosers {
    /// The chooser of prefill servers.
    prefill: Chooser,
    /// The chooser of decode servers, or of ordinary backends.
    answer: Chooser,
}

/// A backend that may get a request.
#[derive(Clone, Copy)]
struct Fit<'a> {
    backend: &'a Arc<Backend>,
    candidate: Candidate,
    /// True if a suspect is on trial at this backend.
    tries: bool,
}

/// Returns the backends that can compute a request, alone or with a partner. `None`: there are
/// none.
fn complete<'a>(mut fit: Vec<Fit<'a>>, ask: &Ask) -> Option<Vec<Fit<'a>>> {
    if ask.pair.is_some() {
        let engines = paired(fit.iter().map(|fit| fit.backend));
        fit.retain(|fit| fit.backend.peer().is_some_and(|peer| engines.contains(&peer.engine)));
    }
    Some(fit).filter(|fit| !fit.is_empty())
}

/// The state that all threads share.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    pub(crate) began: Instant,
    /// The id by which backends know the router.
    pub(crate) id: u64,
    /// The router key that the router sends to backends. `own_key` is the `Authorization` header of
    /// the router's own requests.
    pub(crate) router_key: Option<HeaderValue>,
    pub(crate) own_key: Option<HeaderValue>,
    /// The seed of text names. It is secret, so that no client can construct two texts with the
    /// same name.
    text_root: u64,
    clients: Clients,
    /// The keys of clients. `admin_keys` are those of operators.
    pub(crate) keys: Keys,
    pub(crate) admin_keys: Keys,
    /// Limits the number of client connections.
    pub(crate) places: Arc<Semaphore>,
    /// The memory budget of request bodies.
    pub(crate) budget: Arc<Budget>,
    pub(crate) registry: Registry,
    pub(crate) index: Mutex<TextIndex>,
    /// The texts that were sent to prefill servers of pairs.
    prompts: Mutex<TextIndex>,
    /// The transfer parameters of prefill servers that were already used.
    pub(crate) used: Used,
    /// The backends that keep responses, by response.
    pub(crate) homes: Homes,
    pub(crate) unlisted: Unlisted,
    /// The choosers of backends. Locked for a choice and its dispatch, because each choice has to
    /// take the last dispatch into account.
    choosers: Mutex<Choosers>,
    pub(crate) totals: Totals,
    /// True if new requests are refused.
    pub(crate) draining: AtomicBool,
    /// Set to true to abort all running requests.
    pub(crate) cut: watch::Sender<bool>,
    /// Set to true when a part of the router has panicked.
    pub(crate) broken: watch::Sender<bool>,
    /// The clients that watch the feed of backends.
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
        let chooser = |policy: Option<Policy>| {
            Chooser::new(policy.unwrap_or(config.policy), config.thresholds)
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
            prompts: Mutex::default(),
            used: Used::default(),
            homes: Homes::default(),
            unlisted: Unlisted::default(),
            choosers: Mutex::new(Choosers {
                prefill: chooser(config.pairs.prefill_policy),
                answer: chooser(config.pairs.decode_policy),
            }),
            totals: Totals::default(),
            draining: AtomicBool::new(false),
            cut: watch::Sender::new(false),
            broken: watch::Sender::new(false),
            watchers: Watchers::default(),
            live: watch::Sender::new(0),
            config,
        }
    }

    /// Returns the router's id and key, for backends.
    pub(crate) fn names(&self) -> (u64, Option<&HeaderValue>) {
        (self.id, self.router_key.as_ref())
    }

    /// Chooses a backend or a pair for a request, and records the dispatch. `avoid`: backends that
    /// have failed the request. `resumed`: true if the backend has to be able to continue a stream.
    /// `trial`: the request is a suspect, and goes only where no other suspect is on trial.
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
        // A backend that is down can't return the responses that it keeps. Another backend is then
        // used, and may report that the response is unknown.
        let home = home
            .filter(|home| backends.iter().any(|backend| backend.id == *home && backend.is_up()));
        let strange = ask.model.as_deref().map_or_else(Vec::new, |model| without(&backends, model));
        let mut choosers = self.choosers.lock();
        for backend in backends.iter() {
            let wanted = ask.is_for(backend)
                && !avoid.contains(&backend.id)
                && !strange.contains(&backend.id)
                && (!resumed || backend.is_forebay())
                && home.is_none_or(|home| home == backend.id);
            if !wanted {
                unfit.push(backend.id);
            } else if let Some((candidate, tries)) = backend.candidate(now) {
                fit.push(Fit { backend, candidate, tries });
            }
        }
        let Some(fit) = complete(fit, ask) else { return Choice::Nobody };
        let mut calm = fit.clone();
        calm.retain(|fit| !fit.tries);
        let free: Vec<u32> = calm.iter().map(|fit| fit.backend.id).collect();
        let fit = match trial {
            Some((_, ticket)) => {
                let turns = ticket.turns(&free, unfit);
                calm.retain(|fit| turns.contains(&fit.backend.id));
                let Some(fit) = complete(calm, ask) else { return Choice::OnTrial };
                fit
            }
            // A request that is no suspect avoids backends with a trial, because it might be
            // present at a death there.
            None => complete(calm, ask).unwrap_or(fit),
        };
        let trying = trial.map(|(trial, _)| trial);
        let (prefill, mut answer): (Vec<_>, Vec<_>) =
            fit.into_iter().partition(|fit| fit.backend.duty.is_prefill());
        let prefill = match ask.pair {
            Some(_) => {
                let chosen = pick(&mut choosers.prefill, &self.prompts, ask, &prefill);
                // A Forebay decode server needs no prefill server.
                let engine = chosen.map_or(Some(PairEngine::Forebay), |chosen| {
                    chosen.peer().map(|peer| peer.engine)
                });
                answer.retain(|fit| fit.backend.peer().map(|peer| peer.engine) == engine);
                chosen
            }
            None => None,
        };
        let chosen = pick(&mut choosers.answer, &self.index, ask, &answer);
        let Some(chosen) = chosen else { return Choice::Nobody };
        if let Some((_, ticket)) = trial {
            let taken = [Some(chosen.id), prefill.map(|prefill| prefill.id)];
            ticket.used(free.into_iter().filter(|&free| !taken.contains(&Some(free))));
        }
        Choice::Sent(Dispatch {
            prefill: prefill.map(|prefill| send(&self.prompts, ask, prefill, trying)),
            sent: send(&self.index, ask, chosen, trying),
        })
    }

    /// Dispatches a queued request to this backend. `None`: the backend takes no requests now, or
    /// has a suspect on trial.
    pub(crate) fn dispatch_to(&self, ask: &Ask, to: u32) -> Option<Dispatch> {
        let backends = self.registry.current();
        let backend = backends.iter().find(|backend| backend.id == to)?;
        let _choosers = self.choosers.lock();
        backend.candidate(Instant::now()).filter(|(_, tries)| !tries)?;
        Some(Dispatch { prefill: None, sent: send(&self.index, ask, backend, None) })
    }

    /// Returns the share of a request's prompt that each backend has cached. Empty if no policy
    /// uses this.
    pub(crate) fn cached<'a>(
        &self,
        ask: &Ask,
        backends: impl Iterator<Item = &'a Backend>,
    ) -> Vec<f32> {
        cached(&self.index, ask, backends)
    }

    /// True if queued requests may move. They move neither with the kinds of load accounting that
    /// exist only for comparison, nor if pairs compute requests.
    pub(crate) fn moves(&self) -> bool {
        let RouterConfig { queue_moves, watch, pairs, .. } = &self.config;
        *queue_moves && *watch == Watch::Acknowledged && pairs.is_empty()
    }

    /// Returns the settings for parsing the requests of a client with this key and address.
    pub(crate) fn reading(&self, key: KeyId, address: IpAddr) -> Reading {
        let key = KeyId(key.0.filter(|_| self.keys.len() > 1));
        let remote = Remote::Ip(address.to_canonical());
        let client = self.clients.id(key, remote, &HeaderMap::new());
        let key = key.0.filter(|_| !self.config.share_cache_across_keys);
        let key = key.and_then(|key| self.keys.text(key)).unwrap_or_default();
        let root = xxh3_64_with_seed(key.as_bytes(), self.text_root);
        Reading { keys: self.has(Policy::Session), texts: self.uses_blocks(), client, root }
    }

    /// True if load reports in responses are used.
    pub(crate) fn uses_reports(&self) -> bool {
        !matches!(self.config.watch, Watch::Polled(_))
    }

    /// True if a policy uses block names.
    pub(crate) fn uses_blocks(&self) -> bool {
        self.has(Policy::CacheAware)
    }

    /// True if this policy is used for any choice.
    fn has(&self, policy: Policy) -> bool {
        let RouterConfig { policy: own, pairs, .. } = &self.config;
        match pairs.is_empty() {
            true => *own == policy,
            false => [pairs.prefill_policy, pairs.decode_policy]
                .into_iter()
                .any(|chosen| chosen.unwrap_or(*own) == policy),
        }
    }

    /// Counts a request as running until the returned guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> Live {
        self.totals.requests.fetch_add(1, Ordering::Relaxed);
        self.live.send_modify(|live| *live += 1);
        Live(Arc::clone(self))
    }

    /// Waits until a request is running.
    pub(crate) async fn busy(&self) {
        // The sender is part of `self`, so waiting cannot fail.
        let _ = self.live.subscribe().wait_for(|&live| live > 0).await;
    }

    /// Waits until no request is running.
    pub(crate) async fn idle(&self) {
        // The sender is part of `self`, so waiting cannot fail.
        let _ = self.live.subscribe().wait_for(|&live| live == 0).await;
    }
}

/// Returns the backend that the chooser picks. `None`: there are no candidates.
fn pick<'a>(
    chooser: &mut Chooser,
    index: &Mutex<TextIndex>,
    ask: &Ask,
    fit: &[Fit<'a>],
) -> Option<&'a Arc<Backend>> {
    let mut candidates: Vec<Candidate> = fit.iter().map(|fit| fit.candidate).collect();
    let shares = cached(index, ask, fit.iter().map(|fit| &**fit.backend));
    for (cached, candidate) in shares.into_iter().zip(&mut candidates) {
        candidate.cached = cached;
    }
    chooser.choose(&candidates, ask.key).map(|chosen| fit[chosen].backend)
}

/// Records a dispatch to a backend.
fn send(index: &Mutex<TextIndex>, ask: &Ask, backend: &Arc<Backend>, trial: Option<Trial>) -> Sent {
    if let Some(texts) = &ask.texts {
        index.lock().sent(texts, backend.id);
    }
    Arc::clone(backend).begin(ask.tokens(), trial)
}

/// Returns the share of a request's prompt that each backend has cached. Empty if no policy uses
/// this.
fn cached<'a>(
    index: &Mutex<TextIndex>,
    ask: &Ask,
    backends: impl Iterator<Item = &'a Backend>,
) -> Vec<f32> {
    let Some(texts) = &ask.texts else { return Vec::new() };
    let parts = index.lock().parts(texts);
    let share = |backend: &Backend| {
        let names = backend.names();
        backend.stored.lock().share(&parts, backend.id, names)
    };
    backends.map(share).collect()
}

/// A dispatch to the backend that answers, and to the prefill server if a pair computes the
/// request.
pub(crate) struct Dispatch {
    pub(crate) prefill: Option<Sent>,
    pub(crate) sent: Sent,
}

/// The outcome of choosing a backend.
pub(crate) enum Choice {
    /// The request was dispatched to a backend, or to a pair.
    Sent(Dispatch),
    /// The request is a suspect, and every suitable backend is taken by, or reserved for, another
    /// suspect.
    OnTrial,
    /// No backend takes the request.
    Nobody,
}

/// A guard of a task or thread. If a panic drops the guard, it reports that the router is broken.
pub(crate) struct Fuse(pub(crate) Arc<Shared>);

impl Drop for Fuse {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.send_replace(true);
        }
    }
}

/// Counts a request as running until it is dropped.
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

/// The state of a thread that forwards requests.
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
