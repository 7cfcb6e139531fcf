//! The router's settings.

use std::path::PathBuf;
use std::time::Duration;

use forebay_api::Access;

use crate::admission::AllowedBackends;
use crate::breaker::BreakerConfig;
use crate::intake::BodyLimits;
use crate::policy::{Policy, Thresholds};

/// The way in which the router learns its backends' load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Watch {
    /// Reports ride on responses and say what they count; idle backends are asked to tell when
    /// something changes.
    #[default]
    Acknowledged,
    /// The same, but a report erases what was dispatched since it was made.
    Unacknowledged,
    /// Each backend is asked again and again, and the answer erases what was dispatched meanwhile.
    Polled(Duration),
}

/// The places that name backends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// Named once and for all.
    pub urls: Vec<String>,
    /// A file with one URL a line, read again when it changes.
    pub file: Option<PathBuf>,
    /// `name:port`, resolved again and again: every address is a backend.
    pub dns: Vec<String>,
    /// The time between two looks at the file, and between two resolutions of names.
    pub interval: Duration,
    /// Backends may register over HTTP with this key.
    pub registration_key: Option<String>,
    /// The backends that may be named; empty: any.
    pub allowed: Vec<AllowedBackends>,
}

/// The health checks of backends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthConfig {
    /// The path, answered 200 by a backend that takes requests.
    pub path: String,
    /// The time between two checks. A backend that is down is asked every second at least.
    pub interval: Duration,
    /// The longest time that a check may take.
    pub timeout: Duration,
    /// Failures in a row that take a backend out.
    pub failures: u32,
    /// Successes in a row that bring it back.
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

/// The retries of a request that has produced nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryConfig {
    /// Attempts after the first; 0: none.
    pub retries: u32,
    /// Pause once every backend was tried.
    pub first_pause: Duration,
    /// Longest pause.
    pub last_pause: Duration,
    /// The factor by which each pause is longer than the one before.
    pub factor: f64,
    /// Share of a pause that is left to chance.
    pub jitter: f64,
}

impl Default for RetryConfig {
    /// As SGLang's router.
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
    /// The pause after all backends have been tried `rounds` times, from 1. `chance` is drawn from
    /// 0 to 1.
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
    /// The limits above which `cache_aware` looks at loads.
    pub thresholds: Thresholds,
    /// The way in which the router learns load.
    pub watch: Watch,
    /// The places that name backends.
    pub sources: Sources,
    /// The health checks of backends.
    pub health: HealthConfig,
    /// The rule by which a failing backend is left alone.
    pub breaker: BreakerConfig,
    /// The retries of requests.
    pub retry: RetryConfig,
    /// Longest time that a request may take.
    pub request_timeout: Duration,
    /// Longest time that a connection to a backend may take to open.
    pub connect_timeout: Duration,
    /// Longest time for a request's head, and then its body, to arrive.
    pub receive_timeout: Duration,
    /// Most connections of clients at a time; those beyond are closed.
    pub max_connections: usize,
    /// The limits on request bodies, in bytes.
    pub bodies: BodyLimits,
    /// The time for which running requests may go on after the shutdown signal.
    pub drain_timeout: Duration,
    /// Keys of which clients must show one, if there are any; it is passed on. The router itself
    /// shows the first where it asks backends something.
    pub api_keys: Vec<String>,
    /// Key that is needed to see what the router knows of its backends; where there is none, a
    /// client's will do.
    pub admin_key: Option<String>,
    /// Key that the router shows to brains: they tell only those routers what they know that have
    /// it.
    pub router_key: Option<String>,
    /// Clients with different keys share cached blocks at the backends.
    pub share_cache_across_keys: bool,
    /// Hosts and pages whose requests are answered.
    pub access: Access,
    /// There is a page at `/`.
    pub webui: bool,
    /// Threads that pass on requests.
    pub threads: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            thresholds: Thresholds::default(),
            watch: Watch::default(),
            sources: Sources { interval: Duration::from_secs(5), ..Sources::default() },
            health: HealthConfig::default(),
            breaker: BreakerConfig::default(),
            retry: RetryConfig::default(),
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
