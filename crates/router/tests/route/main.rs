//! A router in front of backends that fail in many ways.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod admission;
mod bounds;
mod breakers;
mod clients;
mod deaths;
mod fake;
mod http;
mod models;
mod moves;
mod pairs;
mod passing;
mod streams;
mod surroundings;

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use forebay_router::{HealthConfig, Policy, RetryConfig, Router, RouterConfig, Sources};

use crate::fake::Fake;
use crate::http::PATIENCE;

/// A running router under test.
struct Rig {
    address: SocketAddr,
    router: Option<Router>,
}

impl Rig {
    fn new(backends: &[&Fake]) -> Self {
        Self::with(backends, |_| {})
    }

    fn with(backends: &[&Fake], change: impl FnOnce(&mut RouterConfig)) -> Self {
        let millis = Duration::from_millis;
        let mut config = RouterConfig {
            policy: Policy::RoundRobin,
            sources: Sources {
                urls: backends.iter().map(|backend| backend.url()).collect(),
                interval: millis(10),
                ..Sources::default()
            },
            health: HealthConfig {
                interval: millis(20),
                timeout: millis(200),
                ..HealthConfig::default()
            },
            retry: RetryConfig { first_pause: millis(1), ..RetryConfig::default() },
            drain_timeout: PATIENCE,
            ..RouterConfig::default()
        };
        change(&mut config);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Self { address, router: Some(Router::start(config, listener).unwrap()) }
    }

    /// Returns the sum of a metric over all backends.
    fn metric(&self, name: &str) -> f64 {
        let text = http::get(self.address, "/metrics");
        let lines = text.text().lines().filter(|line| line.starts_with(name));
        let values: Vec<f64> =
            lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert!(!values.is_empty(), "{name} in {}", text.text());
        values.iter().sum()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(router) = self.router.take() {
            let whole = router.stop(std::future::pending());
            assert!(whole || std::thread::panicking());
        }
    }
}

/// Waits until the check returns true. Fails after `PATIENCE`.
fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
