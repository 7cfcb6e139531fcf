//! One backend: its books, its health, and what was counted of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

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
use crate::policy::Candidate;

/// A URL that is none of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{url}` is not the URL of a backend: {reason}")]
pub struct UrlError {
    /// As it was given.
    pub url: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

/// The address of a backend, as clients and operators write it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BackendUrl {
    authority: Authority,
}

impl BackendUrl {
    /// Reads `http://host:port`; the scheme may be left out, and the port is 80 where it is.
    ///
    /// # Errors
    /// It is something else: https, a path, a name without a host.
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

/// What health checks have found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Health {
    up: bool,
    was_up: bool,
    /// Of the same outcome, in a row.
    failures: u32,
    successes: u32,
}

/// What a health check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// It takes requests.
    Fine,
    /// It answers, and takes none: it loads, or drains. What it has it may finish.
    Refuses,
    /// Nobody listens there. Connections that are open may live on: so do some servers shut down.
    Absent,
    /// It does not answer.
    Silent,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    breaker: Breaker,
    health: Health,
    /// When a dispatch has ended last.
    ended: Option<Instant>,
}

/// What is counted for /metrics.
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
    /// For the `host` header.
    pub(crate) host: HeaderValue,
    name: u64,
    state: Mutex<State>,
    /// Speaks of load, and goes on with streams.
    forebay: AtomicBool,
    /// What it has in its prefix cache.
    pub(crate) stored: Mutex<Stored>,
    /// Wakes those who wait for something from it: nothing will come.
    pub(crate) gone: Arc<Notify>,
    /// Wakes its health check.
    pub(crate) suspected: Notify,
    /// It was taken off the list.
    pub(crate) removed: AtomicBool,
    pub(crate) counters: Counters,
}

impl Backend {
    pub(crate) fn new(
        id: u32,
        url: BackendUrl,
        accounting: Accounting,
        breaker: BreakerConfig,
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
                ended: None,
            }),
            forebay: AtomicBool::new(false),
            stored: Mutex::default(),
            gone: Arc::default(),
            suspected: Notify::new(),
            removed: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// Whether it takes requests, as far as is known.
    pub(crate) fn is_up(&self) -> bool {
        self.state.lock().health.up
    }

    pub(crate) fn is_forebay(&self) -> bool {
        self.forebay.load(Ordering::Relaxed)
    }

    /// It as a candidate; `None` while it takes no requests.
    pub(crate) fn candidate(&self, now: Instant) -> Option<Candidate> {
        let state = self.state.lock();
        (state.health.up && state.breaker.allows(now)).then(|| Candidate {
            name: self.name,
            requests: state.ledger.requests(),
            tokens: state.ledger.tokens(),
            cached: 0.0,
        })
    }

    /// Notes a dispatch.
    pub(crate) fn begin(self: Arc<Self>, tokens: u32) -> Sent {
        let mut state = self.state.lock();
        let (seq, floor) = state.ledger.begin(tokens);
        state.breaker.pass(Instant::now());
        drop(state);
        self.counters.dispatched.fetch_add(1, Ordering::Relaxed);
        Sent { backend: self, seq, floor, judged: false }
    }

    /// Takes what a backend says of its load.
    pub(crate) fn report(&self, report: LoadReport) {
        self.forebay.store(true, Ordering::Relaxed);
        self.state.lock().ledger.report(report);
    }

    /// Requests that it has, those of them that are ours, and its last report.
    pub(crate) fn load(&self) -> (u32, u32, Option<LoadReport>) {
        let state = self.state.lock();
        let ledger = &state.ledger;
        (ledger.requests(), ledger.own(), ledger.last_report())
    }

    /// When a request of ours has ended last.
    pub(crate) fn ended(&self) -> Option<Instant> {
        self.state.lock().ended
    }

    /// The state of its circuit breaker.
    pub(crate) fn breaker(&self) -> &'static str {
        self.state.lock().breaker.name()
    }

    /// Takes the outcome of a health check, or what a request has found; true if it is up then.
    pub(crate) fn checked(&self, check: Check, config: &HealthConfig) -> bool {
        let mut state = self.state.lock();
        let State { ledger, breaker, health, .. } = &mut *state;
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
        // What it has reported and stored is void once it is gone; what it refuses to take it may still finish.
        let gone = check == Check::Absent || check == Check::Silent && enough;
        if gone {
            ledger.forget();
        }
        drop(state);
        if gone {
            self.stored.lock().clear();
        }
        // Connections of a process that has ended break by themselves; those of one that hangs do not.
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
        Arc::new(Backend::new(1, url, Accounting::Acknowledged, BreakerConfig::default()))
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
        let sent = Arc::clone(&backend).begin(10);
        assert_eq!((sent.seq, sent.floor, backend.load().0), (1, 1, 1));
        drop(sent);
        assert_eq!(backend.load().0, 0);
    }
}
