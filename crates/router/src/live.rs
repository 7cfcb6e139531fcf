//! The feed of backend states for the router's tab on the web page.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay_api::ApiError;
use forebay_webui::{Feed, FeedBody, INTERVAL};
use http::Response;
use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};

use crate::backend::Backend;
use crate::shared::Shared;

/// The first event. It is sent again when the list of backends changes.
#[derive(Serialize)]
struct Start {
    version: u32,
    server: String,
    router: bool,
    now_us: u64,
    interval_ms: u128,
    backends: Vec<BackendStart>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct BackendStart {
    index: u32,
    url: String,
}

#[derive(Serialize)]
struct Tick {
    now_us: u64,
    backends: Vec<BackendTick>,
}

/// The present state of a backend.
#[derive(Serialize)]
struct BackendTick {
    index: u32,
    ready: bool,
    breaker: &'static str,
    /// The number of this router's requests at the backend.
    in_flight: u32,
    running: u32,
    waiting: u32,
    /// The number of tokens in the last report; null if there was no report.
    tokens: Option<u64>,
    pages_free: Option<u64>,
    sent: u64,
    failed: u64,
}

/// Opens a feed. It ends when the client disconnects, or when the router drains.
///
/// # Errors
/// Too many feeds are open already.
pub(crate) fn watch(shared: &Arc<Shared>) -> Result<Response<FeedBody>, ApiError> {
    let Some((feed, response)) = shared.watchers.open() else {
        let reason = "too many clients read this feed already".to_owned();
        return Err(ApiError::Overloaded { reason });
    };
    tokio::spawn(write(Arc::clone(shared), feed));
    Ok(response)
}

async fn write(shared: Arc<Shared>, feed: Feed) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = feed.left() => return,
        }
        if shared.draining.load(Ordering::Acquire) {
            return;
        }
        let now_us = elapsed_us(shared.began);
        let all = shared.registry.current();
        let backends: Vec<_> = all
            .iter()
            .map(|backend| BackendStart { index: backend.id, url: backend.url.url() })
            .collect();
        if told.as_ref() != Some(&backends) {
            told = Some(backends.clone());
            let start = Start {
                version: 1,
                server: format!("forebay route {}", env!("CARGO_PKG_VERSION")),
                router: true,
                now_us,
                interval_ms: INTERVAL.as_millis(),
                backends,
            };
            if !feed.send("start", &start).await {
                return;
            }
        }
        let backends = all.iter().map(|backend| tick(backend)).collect();
        if !feed.send("tick", &Tick { now_us, backends }).await {
            return;
        }
    }
}

fn tick(backend: &Backend) -> BackendTick {
    let (_, own, report) = backend.load();
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    BackendTick {
        index: backend.id,
        ready: backend.is_up(),
        breaker: match backend.breaker() {
            "trying" => "half_open",
            other => other,
        },
        in_flight: own,
        running: report.as_ref().map_or(0, |report| report.running),
        waiting: report.as_ref().map_or(0, |report| report.waiting),
        tokens: report.as_ref().map(|report| report.tokens),
        pages_free: report.as_ref().map(|report| report.pages_free),
        sent: read(&backend.counters.dispatched),
        failed: read(&backend.counters.failed),
    }
}

fn elapsed_us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
