//! One backend: its ledger, its health, and its counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_api::peer::LoadReport;
use http::HeaderValue;
use http::uri::Authority;
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use crate::breaker::{Breaker, BreakerConfig};
use crate::config::HealthConfig;
use crate::index::Stored;
use crate::ledger::{Accounting, Ledger};
use crate::past::Role;
use crate::policy::Candidate;

/// The error for a URL that is not a backend's.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{url}` is not the URL of a backend: {reason}")]
pub struct UrlError {
    /// The URL as the user wrote it.
    pub url: String,
    /// The reason, for the user.
    pub reason: &'static str,
}

/// The address of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BackendUrl {
    authority: Authority,
}

impl BackendUrl {
    /// Reads `http://host:port`. The scheme may be absent, and so may the port, which is 80 then.
    ///
    /// # Errors
    /// The text is something else: https, a path, or a name without a host.
    pub fn parse(url: &str) -> Result<Self, UrlError> {
        let error = |reason| UrlError { url: url.to_owned(), reason };
        let rest = match url.trim().split_once("://") {
            None => url.trim(),
            Some(("http", rest)) => rest,
            Some(_) => return Err(error("only http is spoken to backends")),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '@']) {
            return Err(error("it has to be http://HOST:PORT"));
        }
        let authority: Authority = rest.parse().map_err(|_| error("no host and port"))?;
        if authority.host().is_empty() || authority.as_str().ends_with(':') {
            return Err(error("no host and port"));
        }
        Ok(Self { authority })
    }

    /// `http://host:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Host and port to connect to.
    pub(crate) fn address(&self) -> (String, u16) {
        let host = self.authority.host();
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        (host.to_owned(), self.authority.port_u16().unwrap_or(80))
    }
}

/// The findings of health checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Health {
    up: bool,
    was_up: bool,
    /// The number of failed checks in a row.
    failures: u32,
    successes: u32,
}

/// The finding of a health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// The backend takes requests.
    Fine,
    /// The backend answers, and takes no new requests: it loads, or drains. Requests that it has
    /// may end there.
    Refuses,
    /// Nobody listens there. Open connections may live on: some servers shut down in this way.
    Absent,
    /// The backend does not answer.
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
}

/// The life of a backend's process, and the dispatch that is on trial in it.
#[derive(Debug, Default)]
struct Life {
    /// Deaths so far. A dispatch that breaks when there are more than at its beginning was in
    /// flight at one.
    deaths: u64,
    /// True if the backend was found dead and has not answered since.
    dead: bool,
    /// The process, as it calls itself; 0: not known.
    epoch: u64,
    /// The dispatch that is on trial.
    trial: Option<u64>,
    /// Deaths before the last one that came during a trial.
    blamed: Option<u64>,
}

impl Life {
    fn end(&mut self) {
        if !std::mem::replace(&mut self.dead, true) {
            self.deaths += 1;
            self.epoch = 0;
        }
    }

    /// Notes that the backend has answered, and calls itself `epoch`.
    fn speak(&mut self, epoch: u64) {
        let known = std::mem::replace(&mut self.epoch, epoch);
        if known != 0 && known != epoch && !self.dead {
            // It died and came back before anybody asked.
            self.deaths += 1;
        }
        self.dead = false;
    }
}

/// Counts for /metrics.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) dispatched: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) taken_over: AtomicU64,
}

/// A backend.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) id: u32,
    pub(crate) url: BackendUrl,
    /// The value of the `host` header.
    pub(crate) host: HeaderValue,
    name: u64,
    state: Mutex<State>,
    /// Speaks of load, and goes on with streams.
    forebay: AtomicBool,
    /// The number of its names of blocks; backends with the same number name blocks equally.
    names: AtomicU64,
    /// The blocks in its prefix cache.
    pub(crate) stored: Mutex<Stored>,
    /// A lock for the check of the backend's life, with the time at which it was last found alive.
    pub(crate) inquest: tokio::sync::Mutex<Option<Instant>>,
    /// Wakes those who wait for a place on trial, at any backend.
    trials: Arc<Notify>,
    /// Wakes those who wait for something from it: nothing will come.
    pub(crate) gone: Arc<Notify>,
    /// Wakes its health check.
    pub(crate) suspected: Notify,
    /// True if the backend was taken off the list.
    pub(crate) removed: AtomicBool,
    pub(crate) counters: Counters,
}

impl Backend {
    pub(crate) fn new(
        id: u32,
        url: BackendUrl,
        accounting: Accounting,
        breaker: BreakerConfig,
        trials: Arc<Notify>,
    ) -> Self {
        Self {
            id,
            // An authority has no bytes that a header may not have.
            host: HeaderValue::from_str(url.authority.as_str())
                .unwrap_or(HeaderValue::from_static("backend")),
            name: xxh3_64(url.authority.as_str().as_bytes()),
            url,
            state: Mutex::new(State {
                ledger: Ledger::new(accounting),
                breaker: Breaker::new(breaker),
                health: Health::default(),
                life: Life::default(),
                ended: None,
            }),
            forebay: AtomicBool::new(false),
            names: AtomicU64::new(0),
            stored: Mutex::default(),
            inquest: tokio::sync::Mutex::default(),
            trials,
            gone: Arc::default(),
            suspected: Notify::new(),
            removed: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// True if the backend takes requests, as far as is known.
    pub(crate) fn is_up(&self) -> bool {
        self.state.lock().health.up
    }

    pub(crate) fn is_forebay(&self) -> bool {
        self.forebay.load(Ordering::Relaxed)
    }

    /// The backend as a candidate, and true if a suspect is on trial here; `None` while the backend
    /// takes no requests.
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

    /// Notes a dispatch. `trial` is the length of its trial, if it has one.
    pub(crate) fn begin(self: Arc<Self>, tokens: u32, trial: Option<Duration>) -> Sent {
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
        let trial = trial.map(|time| now + time);
        Sent { backend: self, seq, floor, life, since: now, trial, judged: false }
    }

    /// Ends a dispatch's trial, if it is on trial.
    pub(crate) fn end_trial(&self, seq: u64) {
        let mut state = self.state.lock();
        if state.life.trial == Some(seq) {
            state.life.trial = None;
            drop(state);
            self.trials.notify_waiters();
        }
    }

    /// Deaths so far.
    pub(crate) fn deaths(&self) -> u64 {
        self.state.lock().life.deaths
    }

    /// The part that dispatch `seq` had in the death that ended life number `life`.
    pub(crate) fn role(&self, seq: u64, life: u64) -> Role {
        let mut state = self.state.lock();
        let Life { trial, blamed, .. } = &mut state.life;
        match *trial {
            Some(tried) if tried == seq => {
                *blamed = Some(life);
                Role::OnTrial
            }
            Some(_) => Role::Bystander,
            None if *blamed == Some(life) => Role::Bystander,
            None => Role::Present,
        }
    }

    /// The number of its names of blocks; backends with the same number name blocks equally.
    pub(crate) fn names(&self) -> u64 {
        self.names.load(Ordering::Relaxed)
    }

    /// Takes a backend's report of its load.
    pub(crate) fn report(&self, report: LoadReport) {
        self.forebay.store(true, Ordering::Relaxed);
        self.names.store(report.names, Ordering::Relaxed);
        let mut state = self.state.lock();
        if state.ledger.report(report) {
            state.life.speak(report.epoch);
        }
    }

    /// Requests that it has, those of them that are ours, and its last report.
    pub(crate) fn load(&self) -> (u32, u32, Option<LoadReport>) {
        let state = self.state.lock();
        let ledger = &state.ledger;
        (ledger.requests(), ledger.own(), ledger.last_report())
    }

    /// The time at which this router's last request ended.
    pub(crate) fn ended(&self) -> Option<Instant> {
        self.state.lock().ended
    }

    /// The state of its circuit breaker.
    pub(crate) fn breaker(&self) -> &'static str {
        self.state.lock().breaker.name()
    }

    /// Takes the outcome of a health check, or of a request. True: the backend is up afterwards.
    pub(crate) fn checked(&self, check: Check, config: &HealthConfig) -> bool {
        let mut state = self.state.lock();
        let State { ledger, breaker, health, life, .. } = &mut *state;
        if matches!(check, Check::Fine | Check::Refuses) {
            life.dead = false;
        }
        if check == Check::Fine {
            health.failures = 0;
            health.successes += 1;
            // What never failed need not prove itself.
            if !health.up && (!health.was_up || health.successes >= config.successes) {
                (health.up, health.was_up) = (true, true);
                breaker.reset();
                tracing::info!(backend = self.url.url(), "backend is up");
            }
            return health.up;
        }
        health.successes = 0;
        health.failures += 1;
        let enough = health.failures >= config.failures;
        if (enough || check != Check::Silent) && std::mem::take(&mut health.up) {
            tracing::warn!(backend = self.url.url(), ?check, "backend is down");
        }
        let up = health.up;
        // What it has reported and stored is void once it is gone; what it refuses to take it may
        // still finish.
        let gone = check == Check::Absent || check == Check::Silent && enough;
        if gone {
            ledger.forget();
            life.end();
        }
        drop(state);
        if gone {
            self.stored.lock().clear();
        }
        // Connections of a process that has ended break by themselves; those of one that hangs do
        // not.
        if gone && check == Check::Silent {
            self.gone.notify_waiters();
        }
        up
    }
}

/// A dispatch that has not ended. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) backend: Arc<Backend>,
    pub(crate) seq: u64,
    pub(crate) floor: u64,
    /// The backend's deaths before it.
    pub(crate) life: u64,
    /// The time of the send.
    pub(crate) since: Instant,
    /// Until when it is on trial, if it is.
    pub(crate) trial: Option<Instant>,
    judged: bool,
}

impl Sent {
    /// The backend has answered, and this was its load.
    pub(crate) fn answered(&mut self, report: Option<LoadReport>) {
        if let Some(report) = report {
            self.backend.report(report);
        }
        let mut state = self.backend.state.lock();
        state.ledger.acknowledge(self.seq);
        if !std::mem::replace(&mut self.judged, true) {
            state.breaker.succeed();
        }
    }

    /// The backend has failed.
    pub(crate) fn failed(&mut self) {
        self.judged = true;
        self.backend.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.backend.state.lock().breaker.fail(Instant::now());
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
        if self.trial.is_some() {
            self.backend.end_trial(self.seq);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let parse = |url| BackendUrl::parse(url).map(|url| url.url());
        assert_eq!(parse("http://host:81/").unwrap(), "http://host:81");
        assert_eq!(parse("10.0.0.1:8000").unwrap(), "http://10.0.0.1:8000");
        let v6 = BackendUrl::parse("http://[::1]:8000").unwrap();
        assert_eq!(v6.address(), ("::1".to_owned(), 8000));
        assert_eq!(BackendUrl::parse("http://host").unwrap().address().1, 80);
        for wrong in ["https://a:1", "http://a:1/v1", "", "http://", "a:", "u@a:1", "a b"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    fn backend() -> Arc<Backend> {
        let url = BackendUrl::parse("a:1").unwrap();
        let (books, breaker) = (Accounting::Acknowledged, BreakerConfig::default());
        Arc::new(Backend::new(1, url, books, breaker, Arc::default()))
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
        assert!(!backend.checked(Check::Refuses, &config), "at once");
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
        assert_eq!(backend.deaths(), 2, "the same death, heard of twice");
    }

    #[test]
    fn one_is_on_trial_and_it_is_to_blame() {
        let backend = backend();
        let fresh = Arc::clone(&backend).begin(1, None);
        let tried = Arc::clone(&backend).begin(1, Some(Duration::from_secs(1)));
        assert!(backend.state.lock().life.trial.is_some());
        assert_eq!(backend.role(fresh.seq, 0), Role::Bystander, "whoever asks first");
        assert_eq!(backend.role(tried.seq, 0), Role::OnTrial);
        drop(tried);
        assert!(backend.state.lock().life.trial.is_none());
        assert_eq!(backend.role(fresh.seq, 0), Role::Bystander);
        assert_eq!(backend.role(fresh.seq, 1), Role::Present, "at another death");
    }
}
