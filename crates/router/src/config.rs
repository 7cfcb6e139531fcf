//! The router's settings.

use std::path::PathBuf;
use std::time::Duration;

use forebay_api::Access;

use crate::admission::AllowedBackends;
use crate::breaker::BreakerConfig;
use crate::intake::BodyLimits;
use crate::pairs::PairConfig;
use crate::policy::{Policy, Thresholds};

/// How the router learns the load of its backends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Watch {
    /// Reports come with responses, and say which requests they count. Idle backends are asked to
    /// report changes.
    #[default]
    Acknowledged,
    /// Reports come with responses. A report drops the requests that were dispatched after it was
    /// made.
    Unacknowledged,
    /// Each backend is asked at this interval. The answer drops the requests that were dispatched
    /// meanwhile.
    Polled(Duration),
}

/// The sources of backends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// Fixed URLs.
    pub urls: Vec<String>,
    /// A file with one URL on each line. It is read again when it changes.
    pub file: Option<PathBuf>,
    /// Names as `name:port`, which are resolved repeatedly. Every address is a backend.
    pub dns: Vec<String>,
    /// The interval for the file and for names.
    pub interval: Duration,
    /// The key with which backends may register over HTTP; `None`: registration is off.
    pub registration_key: Option<String>,
    /// The backends that sources may name; empty: any.
    pub allowed: Vec<AllowedBackends>,
}

/// The health checks of backends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthConfig {
    /// The path. A backend that takes requests answers it with 200.
    pub path: String,
    /// The interval between two checks. A backend that is down is checked at least every second.
    pub interval: Duration,
    /// The longest time of a check.
    pub timeout: Duration,
    /// The number of consecutive failures that take a backend out.
    pub failures: u32,
    /// The number of consecutive successes that bring a backend back.
    pub successes: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            path: "/health".into(),
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(5),
            failures: 3,
            successes: 2,
        }
    }
}

/// Retries of a request that has produced nothing yet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryConfig {
    /// The number of attempts after the first.
    pub retries: u32,
    /// The pause after every backend was tried.
    pub first_pause: Duration,
    /// The longest pause.
    pub last_pause: Duration,
    /// The factor by which each pause is longer than the last.
    pub factor: f64,
    /// The random share of a pause.
    pub jitter: f64,
}

impl Default for RetryConfig {
    /// The defaults of SGLang's router.
    fn default() -> Self {
        Self {
            retries: 5,
            first_pause: Duration::from_millis(50),
            last_pause: Duration::from_secs(30),
            factor: 1.5,
            jitter: 0.2,
        }
    }
}

impl RetryConfig {
    /// The pause after all backends have been tried `rounds` times, from 1 on. `chance` is a random
    /// number from 0 to 1.
    pub(crate) fn pause(&self, rounds: u32, chance: f64) -> Duration {
        let exponent = i32::try_from(rounds.saturating_sub(1)).unwrap_or(i32::MAX);
        let longest = self.last_pause.as_secs_f64();
        let pause = (self.first_pause.as_secs_f64() * self.factor.powi(exponent)).min(longest);
        Duration::from_secs_f64(pause * (1.0 + self.jitter * (2.0 * chance - 1.0)))
    }
}

/// The router's settings.
#[derive(Debug, Clone)]
pub struct RouterConfig {
    /// The policy that chooses a backend.
    pub policy: Policy,
    /// The limits above which `cache_aware` uses loads.
    pub thresholds: Thresholds,
    /// The way in which the router learns load.
    pub watch: Watch,
    /// True if queued requests move to a brain with less to do.
    pub queue_moves: bool,
    /// The places that name backends.
    pub sources: Sources,
    /// The servers that form pairs, in place of ordinary backends.
    pub pairs: PairConfig,
    /// The health checks of backends.
    pub health: HealthConfig,
    /// When a failing backend gets no requests.
    pub breaker: BreakerConfig,
    /// The retries of requests.
    pub retry: RetryConfig,
    /// How long a request whose backend died waits at most for another that takes requests.
    pub trial_wait: Duration,
    /// The longest time of a request.
    pub request_timeout: Duration,
    /// How long opening a connection to a backend may take.
    pub connect_timeout: Duration,
    /// How long a request's head may take to arrive, and then its body.
    pub receive_timeout: Duration,
    /// The largest number of client connections at a time. Further ones are closed.
    pub max_connections: usize,
    /// The limits on request bodies, in bytes.
    pub bodies: BodyLimits,
    /// How long running requests may continue after the shutdown signal.
    pub drain_timeout: Duration,
    /// Keys of clients. If there are any, each client must send one, which is passed on. The
    /// router's own requests to backends carry the first one.
    pub api_keys: Vec<String>,
    /// The key for reports on backends. Without it, a client's key suffices.
    pub admin_key: Option<String>,
    /// The key that the router sends to brains. They tell their blocks and loads only to routers
    /// with the key.
    pub router_key: Option<String>,
    /// True if clients with different keys share cached blocks at the backends.
    pub share_cache_across_keys: bool,
    /// Hosts and pages whose requests are answered.
    pub access: Access,
    /// True if there is a page at `/`.
    pub webui: bool,
    /// The number of threads that pass on requests.
    pub threads: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            thresholds: Thresholds::default(),
            watch: Watch::default(),
            queue_moves: true,
            sources: Sources { interval: Duration::from_secs(5), ..Sources::default() },
            pairs: PairConfig::default(),
            health: HealthConfig::default(),
            breaker: BreakerConfig::default(),
            retry: RetryConfig::default(),
            trial_wait: Duration::from_secs(30),
            request_timeout: Duration::from_secs(1800),
            connect_timeout: Duration::from_secs(5),
            receive_timeout: Duration::from_secs(60),
            max_connections: 65_536,
            bodies: BodyLimits::default(),
            drain_timeout: Duration::from_secs(30),
            api_keys: Vec::new(),
            admin_key: None,
            router_key: None,
            share_cache_across_keys: false,
            access: Access::default(),
            webui: true,
            threads: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit() {
        let retry = RetryConfig::default();
        let millis = |rounds, chance| (retry.pause(rounds, chance).as_secs_f64() * 1e3).round();
        assert_eq!([millis(1, 0.5), millis(2, 0.5), millis(3, 0.5)], [50.0, 75.0, 113.0]);
        assert_eq!([millis(1, 0.0), millis(1, 1.0)], [40.0, 60.0]);
        assert_eq!(millis(4000, 0.5), 30_000.0);
    }
}
