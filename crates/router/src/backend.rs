//! A backend: its ledger, health and counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use forebay_api::BackendUrl;
use forebay_api::peer::LoadReport;
use forebay_balance::{Load, Work};
use http::HeaderValue;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use xxhash_rust::xxh3::xxh3_64;

use crate::breaker::{Breaker, BreakerConfig, FailureOrigin};
use crate::budget::Budget;
use crate::config::HealthConfig;
use crate::index::Stored;
use crate::ledger::{Accounting, Ledger};
use crate::life::Life;
use crate::models::Models;
use crate::movable::Movable;
use crate::pairs::{Duty, Peer};
use crate::past::{Role, Trial};
use crate::policy::Candidate;
use crate::trials::Trials;

/// The memory limit for unfinished parts of a backend's answers, in bytes.
const MEMORY: usize = 256 << 20;

/// The accumulated results of health checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Health {
    up: bool,
    was_up: bool,
    /// The number of consecutive failed checks.
    failures: u32,
    successes: u32,
}

/// The result of a health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// The backend takes requests.
    Fine,
    /// The backend responds, but takes no new requests: it is loading or draining. Its running
    /// requests may finish.
    Refuses,
    /// The address refuses connections. Open connections may still work, because some servers shut
    /// down in this way.
    Absent,
    /// The backend does not respond.
    Silent,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    breaker: Breaker,
    health: Health,
    life: Life,
    /// The time at which the last dispatch ended.
    ended: Option<Instant>,
    /// The time of the last report.
    reported: Option<Instant>,
}

/// Counters for /metrics.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) dispatched: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) taken_over: AtomicU64,
    pub(crate) moved: AtomicU64,
}

/// A backend.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) id: u32,
    pub(crate) url: BackendUrl,
    /// The value of the `Host` header.
    pub(crate) host: HeaderValue,
    /// The part of requests that the backend computes.
    pub(crate) duty: Duty,
    /// The backend's engine for pairs, or the reason why it can't be in a pair. `None`: not known
    /// yet.
    peer: Mutex<Option<Result<Peer, String>>>,
    name: u64,
    state: Mutex<State>,
    /// True if the backend is a Forebay server, which reports its load and resumes streams.
    forebay: AtomicBool,
    /// The id of the backend's namer. Backends with the same id give blocks the same names.
    names: AtomicU64,
    /// The blocks in the backend's prefix cache.
    pub(crate) stored: Mutex<Stored>,
    /// The models that the backend lists.
    pub(crate) models: Models,
    /// The lock for checking whether the backend is alive. It holds the time of the last check that
    /// found it alive.
    pub(crate) inquest: tokio::sync::Mutex<Option<Instant>>,
    /// The queue of suspects that wait for a trial at any backend.
    trials: Arc<Trials>,
    /// The backend's dispatches that may be moved.
    pub(crate) movable: Arc<Movable>,
    /// The memory that unfinished parts of the backend's answers take.
    pub(crate) memory: Arc<Budget>,
    /// Wakes tasks that wait for a response of the backend, once it has been found hung.
    pub(crate) gone: Arc<Notify>,
    /// Wakes the backend's health check.
    pub(crate) suspected: Notify,
    /// True if the backend was removed from the list of backends.
    pub(crate) removed: AtomicBool,
    pub(crate) counters: Counters,
}

impl Backend {
    pub(crate) fn new(
        id: u32,
        (url, duty): (BackendUrl, Duty),
        accounting: Accounting,
        breaker: BreakerConfig,
        trials: Arc<Trials>,
    ) -> Self {
        Self {
            id,
            // All bytes of a URL's authority are allowed in a header.
            host: HeaderValue::from_str(url.authority())
                .unwrap_or(HeaderValue::from_static("backend")),
            name: xxh3_64(url.authority().as_bytes()),
            url,
            duty,
            peer: Mutex::default(),
            state: Mutex::new(State {
                ledger: Ledger::new(accounting),
                breaker: Breaker::new(breaker),
                health: Health::default(),
                life: Life::default(),
                ended: None,
                reported: None,
            }),
            forebay: AtomicBool::new(false),
            names: AtomicU64::new(0),
            stored: Mutex::default(),
            models: Models::default(),
            inquest: tokio::sync::Mutex::default(),
            trials,
            movable: Arc::default(),
            memory: Budget::new(MEMORY),
            gone: Arc::default(),
            suspected: Notify::new(),
            removed: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// True if the backend takes requests, according to its health checks.
    pub(crate) fn is_up(&self) -> bool {
        self.state.lock().health.up
    }

    pub(crate) fn is_forebay(&self) -> bool {
        self.forebay.load(Ordering::Relaxed)
    }

    /// The backend's engine and port for pairs; `None` if it is not in a pair.
    pub(crate) fn peer(&self) -> Option<Peer> {
        self.peer.lock().as_ref()?.as_ref().ok().copied()
    }

    /// The reason why the backend can't be in a pair although it was configured for one.
    pub(crate) fn fault(&self) -> Option<String> {
        self.peer.lock().as_ref()?.as_ref().err().cloned()
    }

    /// Records what the backend reported about its engine for pairs.
    pub(crate) fn set_peer(&self, peer: Result<Peer, String>) {
        let before = self.peer.lock().replace(peer.clone());
        match &peer {
            Err(reason) if before.as_ref() != Some(&peer) => tracing::warn!("{reason}"),
            _ => {}
        }
    }

    /// Returns the backend as a candidate, and whether a suspect is on trial there. `None`: it
    /// takes no requests now.
    pub(crate) fn candidate(&self, now: Instant) -> Option<(Candidate, bool)> {
        let state = self.state.lock();
        let candidate = || Candidate {
            name: self.name,
            requests: state.ledger.requests(),
            tokens: state.ledger.tokens(),
            cached: 0.0,
        };
        let takes = state.health.up && state.breaker.allows(now);
        takes.then(|| (candidate(), state.life.trial.is_some()))
    }

    /// Records a dispatch, and the request's trial if there is one.
    pub(crate) fn begin(self: Arc<Self>, tokens: u32, trial: Option<Trial>) -> Sent {
        let now = Instant::now();
        let mut state = self.state.lock();
        let (seq, floor) = state.ledger.begin(tokens);
        state.breaker.pass(now);
        if trial.is_some() {
            state.life.trial = Some(seq);
        }
        let life = state.life.deaths;
        drop(state);
        self.counters.dispatched.fetch_add(1, Ordering::Relaxed);
        // The trial has its own timer, because a slow client may delay the reading of the answer.
        let clock = trial.and_then(Trial::longest).map(|time| {
            let backend = Arc::clone(&self);
            let end = async move {
                sleep(time).await;
                backend.end_trial(seq);
            };
            tokio::spawn(end).abort_handle()
        });
        let on_trial = trial.is_some();
        Sent { backend: self, seq, floor, life, since: now, on_trial, clock, judged: false }
    }

    /// True if a suspect is on trial here.
    pub(crate) fn is_trying(&self) -> bool {
        self.state.lock().life.trial.is_some()
    }

    /// Ends the trial of a dispatch, if that dispatch is on trial.
    pub(crate) fn end_trial(&self, seq: u64) {
        let mut state = self.state.lock();
        if state.life.trial == Some(seq) {
            state.life.trial = None;
            drop(state);
            self.trials.is_free(self.id);
        }
    }

    /// The number of deaths so far.
    pub(crate) fn deaths(&self) -> u64 {
        self.state.lock().life.deaths
    }

    /// Returns the role of dispatch `seq` in the backend's death number `life`, counted from 0.
    pub(crate) fn role(&self, seq: u64, life: u64) -> Role {
        match self.state.lock().life.last {
            Some((ended, Some(tried))) if ended == life && tried == seq => Role::OnTrial,
            Some((ended, Some(_))) if ended == life => Role::Bystander,
            _ => Role::Present,
        }
    }

    /// Records a failure in the circuit breaker.
    pub(crate) fn charge(&self, origin: FailureOrigin) {
        self.state.lock().breaker.fail(Instant::now(), origin);
    }

    /// The id of the backend's namer. Backends with the same id give blocks the same names.
    pub(crate) fn names(&self) -> u64 {
        self.names.load(Ordering::Relaxed)
    }

    /// Applies a load report that the backend has sent.
    pub(crate) fn report(&self, report: LoadReport) {
        self.forebay.store(true, Ordering::Relaxed);
        self.names.store(report.names, Ordering::Relaxed);
        let mut state = self.state.lock();
        if state.ledger.report(report) {
            state.life.speak(report.epoch);
            state.reported = Some(Instant::now());
        }
    }

    /// Returns the number of the backend's requests, the number of those that this router sent, and
    /// the last report.
    pub(crate) fn load(&self) -> (u32, u32, Option<LoadReport>) {
        let state = self.state.lock();
        let ledger = &state.ledger;
        (ledger.requests(), ledger.own(), ledger.last_report())
    }

    /// Returns the load for decisions about moves. Only requests that may move count as queued.
    pub(crate) fn balance(&self) -> Load {
        let ledger = &self.state.lock().ledger;
        let requests = ledger.requests().into();
        let work = Work { prefill: ledger.ahead(), decode: 0 };
        let in_prefill = if self.movable.is_empty() { 0 } else { requests };
        Load { requests, work, in_prefill, ..Load::default() }
    }

    /// True if dispatch `seq` of this router has not ended.
    pub(crate) fn has(&self, seq: u64) -> bool {
        self.state.lock().ledger.has(seq)
    }

    /// The time of the last report.
    pub(crate) fn reported(&self) -> Option<Instant> {
        self.state.lock().reported
    }

    /// The time at which this router's last request to the backend ended.
    pub(crate) fn ended(&self) -> Option<Instant> {
        self.state.lock().ended
    }

    /// The name of the circuit breaker's state.
    pub(crate) fn breaker(&self) -> &'static str {
        self.state.lock().breaker.name()
    }

    /// Applies the result of a health check or of a request. Returns whether the backend is up
    /// afterwards.
    pub(crate) fn checked(&self, check: Check, config: &HealthConfig) -> bool {
        let mut state = self.state.lock();
        let State { ledger, breaker, health, life, .. } = &mut *state;
        if matches!(check, Check::Fine | Check::Refuses) {
            life.dead = false;
        }
        if check == Check::Fine {
            health.failures = 0;
            health.successes += 1;
            // A backend that has never failed takes requests after its first successful check.
            if !health.up && (!health.was_up || health.successes >= config.successes) {
                (health.up, health.was_up) = (true, true);
                breaker.reset();
                tracing::info!(backend = self.url.url(), "backend is up");
                drop(state);
                self.trials.is_free(self.id);
                return true;
            }
            return health.up;
        }
        if check == Check::Silent {
            breaker.fail(Instant::now(), FailureOrigin::Router);
        }
        health.successes = 0;
        health.failures += 1;
        let enough = health.failures >= config.failures;
        if (enough || check != Check::Silent) && std::mem::take(&mut health.up) {
            tracing::warn!(backend = self.url.url(), ?check, "backend is down");
        }
        let up = health.up;
        // A lost backend's load and blocks are void. A backend that only refuses requests may
        // finish its streams.
        let gone = check == Check::Absent || check == Check::Silent && enough;
        if gone {
            ledger.forget();
            life.end();
        }
        drop(state);
        if gone {
            self.stored.lock().clear();
        }
        // Connections to a dead process fail by themselves; connections to a hung process do not.
        if gone && check == Check::Silent {
            self.gone.notify_waiters();
        }
        up
    }
}

/// A dispatch that has not ended. Dropping this value ends the dispatch.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) backend: Arc<Backend>,
    pub(crate) seq: u64,
    pub(crate) floor: u64,
    /// The number of the backend's deaths before this dispatch.
    pub(crate) life: u64,
    /// The time at which the request was dispatched.
    pub(crate) since: Instant,
    on_trial: bool,
    /// A timer that ends the trial.
    clock: Option<AbortHandle>,
    judged: bool,
}

impl Sent {
    /// Records that the backend has responded, with its load report.
    pub(crate) fn answered(&self, report: Option<LoadReport>) {
        if let Some(report) = report {
            self.backend.report(report);
        }
        self.backend.state.lock().ledger.acknowledge(self.seq);
    }

    /// Records that the client gets some of the answer.
    pub(crate) fn produced(&mut self) {
        if !std::mem::replace(&mut self.judged, true) {
            self.backend.state.lock().breaker.answer();
        }
    }

    /// Records that the answer was complete.
    pub(crate) fn completed(&mut self) {
        self.produced();
        self.backend.state.lock().breaker.succeed();
    }

    /// Counts that the backend refused the request for now.
    pub(crate) fn refused(&self) {
        self.backend.counters.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a failure of the backend and triggers a health check. The breaker counts the failure
    /// later, when it is known whether other backends fail too.
    pub(crate) fn failed(&self) {
        self.backend.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.backend.suspected.notify_one();
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let mut state = self.backend.state.lock();
        state.ledger.finish(self.seq);
        state.ended = Some(Instant::now());
        if !self.judged {
            state.breaker.forgo();
        }
        drop(state);
        if let Some(clock) = &self.clock {
            clock.abort();
        }
        if self.on_trial {
            self.backend.end_trial(self.seq);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn backend() -> Arc<Backend> {
        let named = (BackendUrl::parse("a:1").unwrap(), Duty::Whole);
        let (books, breaker) = (Accounting::Acknowledged, BreakerConfig::default());
        Arc::new(Backend::new(1, named, books, breaker, Arc::default()))
    }

    #[test]
    fn one_success_brings_up_what_never_failed_and_more_what_did() {
        let (backend, config) = (backend(), HealthConfig::default());
        assert!(!backend.is_up());
        assert!(backend.checked(Check::Fine, &config));
        assert!(backend.checked(Check::Silent, &config));
        assert!(backend.checked(Check::Silent, &config));
        assert!(!backend.checked(Check::Silent, &config));
        assert!(!backend.checked(Check::Fine, &config));
        assert!(backend.checked(Check::Fine, &config));
        assert!(!backend.checked(Check::Refuses, &config), "one refusal is enough");
    }

    #[tokio::test]
    async fn those_who_wait_hear_that_it_hangs_but_not_that_it_drains() {
        let (backend, config) = (backend(), HealthConfig::default());
        backend.checked(Check::Fine, &config);
        let mut waiting = std::pin::pin!(backend.gone.notified());
        waiting.as_mut().enable();
        backend.checked(Check::Refuses, &config);
        assert!(!waiting.as_mut().enable());
        backend.checked(Check::Fine, &config);
        backend.checked(Check::Fine, &config);
        backend.checked(Check::Absent, &config);
        assert!(!waiting.as_mut().enable());
        for _ in 0..3 {
            backend.checked(Check::Silent, &config);
        }
        assert!(waiting.as_mut().enable());
        assert!(backend.candidate(Instant::now()).is_none());
    }

    #[test]
    fn a_dispatch_counts_until_it_is_dropped() {
        let backend = backend();
        let sent = Arc::clone(&backend).begin(10, None);
        assert_eq!((sent.seq, sent.floor, backend.load().0), (1, 1, 1));
        drop(sent);
        assert_eq!(backend.load().0, 0);
    }

    #[test]
    fn a_death_is_counted_once_until_it_answers_again() {
        let (backend, config) = (backend(), HealthConfig::default());
        backend.checked(Check::Fine, &config);
        backend.checked(Check::Absent, &config);
        backend.checked(Check::Absent, &config);
        assert_eq!(backend.deaths(), 1);
        backend.checked(Check::Refuses, &config);
        backend.checked(Check::Absent, &config);
        assert_eq!(backend.deaths(), 2);
    }

    #[test]
    fn a_process_that_calls_itself_otherwise_has_died_before() {
        let backend = backend();
        let report = |epoch| LoadReport { epoch, at: 1, ..LoadReport::default() };
        backend.report(report(1));
        assert_eq!(backend.deaths(), 0);
        backend.report(report(2));
        assert_eq!(backend.deaths(), 1);
        backend.checked(Check::Absent, &HealthConfig::default());
        backend.report(report(3));
        assert_eq!(backend.deaths(), 2, "a death that is noticed twice counts once");
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn one_is_on_trial_and_it_is_to_blame() {
        let (backend, config) = (backend(), HealthConfig::default());
        let resident = Arc::clone(&backend).begin(1, None);
        let tried = Arc::clone(&backend).begin(1, Some(Trial::Output(SECOND)));
        assert!(backend.is_trying());
        backend.checked(Check::Absent, &config);
        assert_eq!(backend.role(resident.seq, 0), Role::Bystander, "a resident is a bystander");
        drop(resident);
        assert_eq!(backend.role(tried.seq, 0), Role::OnTrial);
        let seq = tried.seq;
        drop(tried);
        assert!(!backend.is_trying());
        assert_eq!(backend.role(seq, 0), Role::OnTrial, "the request was on trial at that death");
        backend.checked(Check::Fine, &config);
        let next = Arc::clone(&backend).begin(1, None);
        backend.checked(Check::Absent, &config);
        assert_eq!(
            backend.role(next.seq, next.life),
            Role::Present,
            "the request was only present at a later death"
        );
    }

    #[tokio::test]
    async fn whoever_is_tried_after_a_death_is_not_to_blame_for_it() {
        let backend = backend();
        let report = |epoch| LoadReport { epoch, at: 1, ..LoadReport::default() };
        backend.report(report(1));
        let before = Arc::clone(&backend).begin(1, None);
        backend.report(report(2));
        let after = Arc::clone(&backend).begin(1, Some(Trial::Whole));
        assert_eq!(backend.role(before.seq, before.life), Role::Present);
        assert_eq!(after.life, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_ends_in_time_though_nobody_reads() {
        let backend = backend();
        let trials = [Trial::Output(9 * SECOND), Trial::Time(9 * SECOND), Trial::Whole];
        for trial in trials {
            let sent = Arc::clone(&backend).begin(1, Some(trial));
            tokio::time::sleep(8 * SECOND).await;
            assert!(backend.is_trying());
            tokio::time::sleep(2 * SECOND).await;
            assert_eq!(backend.is_trying(), trial == Trial::Whole);
            // The timer of an earlier trial must not end a later trial.
            let next = Arc::clone(&backend).begin(1, Some(trial));
            drop(sent);
            tokio::time::sleep(8 * SECOND).await;
            assert!(backend.is_trying());
            drop(next);
            assert!(!backend.is_trying());
        }
    }

    #[test]
    fn health_checks_without_an_answer_count_against_it_and_successes_for_it() {
        let (backend, config) = (backend(), HealthConfig::default());
        for _ in 0..30 {
            backend.checked(Check::Fine, &config);
            backend.checked(Check::Silent, &config);
            Arc::clone(&backend).begin(1, None).completed();
        }
        assert_eq!(backend.breaker(), "closed");
        for _ in 0..10 {
            backend.checked(Check::Fine, &config);
            backend.checked(Check::Silent, &config);
        }
        assert_eq!(backend.breaker(), "open");
    }
}
