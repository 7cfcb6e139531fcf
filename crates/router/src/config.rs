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
    /// Reports come with responses, and state which requests they count. Idle backends are also
    /// polled for changes.
    #[default]
    Acknowledged,
    /// Reports come with responses. A report erases requests from the ledger that were dispatched
    /// after the report was made.
    Unacknowledged,
    /// Each backend is polled at this interval. The report erases requests from the ledger that
    /// were dispatched since the query.
    Polled(Duration),
}

/// The sources of backends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// Fixed URLs.
    pub urls: Vec<String>,
    /// A file with one URL per line. It is read again when it changes.
    pub file: Option<PathBuf>,
    /// DNS names in the form `name:port`, which are resolved repeatedly. Every address is a
    /// backend.
    pub dns: Vec<String>,
    /// The interval at which the file is read and names are resolved.
    pub interval: Duration,
    /// The key with which backends may register over HTTP; `None`: registration is off.
    pub registration_key: Option<String>,
    /// The backends that sources may name; empty: all.
    pub allowed: Vec<AllowedBackends>,
}

/// The health checks of backends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthConfig {
    /// The path of the check. A backend that takes requests responds with status 200.
    pub path: String,
    /// The interval between two checks. A backend that is down is checked at least every second.
    pub interval: Duration,
    /// The timeout of a check.
    pub timeout: Duration,
    /// The number of consecutive failures after which a backend is down.
    pub failures: u32,
    /// The number of consecutive successes after which a backend is up again.
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

/// The retries of a request whose client has received nothing yet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryConfig {
    /// The number of attempts after the first.
    pub retries: u32,
    /// The pause after all backends have been tried once.
    pub first_pause: Duration,
    /// The longest pause.
    pub last_pause: Duration,
    /// The ratio of a pause to the previous pause.
    pub factor: f64,
    /// The largest random deviation of a pause, as a share of the pause.
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
    /// Returns the pause after all backends have been tried `rounds` times (at least 1). `chance`
    /// is a random number from 0 to 1.
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
    /// The load limits above which `cache_aware` chooses by load.
    pub thresholds: Thresholds,
    /// How the router learns the load of backends.
    pub watch: Watch,
    /// True if queued requests move to a brain with less work.
    pub queue_moves: bool,
    /// The sources of backends.
    pub sources: Sources,
    /// The servers that form pairs. If there are any, there are no ordinary backends.
    pub pairs: PairConfig,
    /// The health checks of backends.
    pub health: HealthConfig,
    /// Limits at which a failing backend gets no requests for a while.
    pub breaker: BreakerConfig,
    /// The retries of requests.
    pub retry: RetryConfig,
    /// The longest time that a request whose backend died waits for another backend.
    pub trial_wait: Duration,
    /// The longest duration of a request.
    pub request_timeout: Duration,
    /// The timeout for opening a connection to a backend.
    pub connect_timeout: Duration,
    /// The timeout for receiving a request's head, and then again for its body.
    pub receive_timeout: Duration,
    /// The largest number of client connections at a time. Further ones are closed.
    pub max_connections: usize,
    /// The limits on request bodies, in bytes.
    pub bodies: BodyLimits,
    /// The time for which running requests may continue after the shutdown signal.
    pub drain_timeout: Duration,
    /// Keys of clients. If there are any, each client must send one, which is forwarded to the
    /// backend. The router's own requests to backends carry the first key.
    pub api_keys: Vec<String>,
    /// The key for reports on backends. If it is `None`, a client's key suffices.
    pub admin_key: Option<String>,
    /// The key that the router sends to brains. Brains report their blocks and loads only to
    /// routers with this key.
    pub router_key: Option<String>,
    /// True if clients with different keys share cached blocks at the backends.
    pub share_cache_across_keys: bool,
    /// Hosts and origins whose requests are accepted.
    pub access: Access,
    /// True if the web page is served at `/`.
    pub webui: bool,
    /// The number of threads that forward requests.
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
