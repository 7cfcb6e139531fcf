//! The router's reports and metrics of its backends.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::core::{AtomicU64 as Counter, GenericCounterVec};
use prometheus::{Encoder, IntCounter, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};
use serde_json::{Value, json};

use crate::shared::Shared;

/// Returns a JSON report of every backend.
pub(crate) fn loads(shared: &Shared) -> Value {
    let backends = shared.registry.current();
    let loads = backends.iter().map(|backend| {
        let (requests, own, report) = backend.load();
        json!({
            "url": backend.url.url(),
            "up": backend.is_up(),
            "breaker": backend.breaker(),
            "forebay": backend.is_forebay(),
            "duty": backend.duty.name(),
            "engine": backend.peer().map(|peer| peer.engine.name()),
            "fault": backend.fault(),
            "requests": requests,
            "own": own,
            "dispatched": backend.counters.dispatched.load(Ordering::Relaxed),
            "blocks": backend.stored.lock().len(),
            "report": report,
        })
    });
    json!({"loads": loads.collect::<Vec<_>>()})
}

/// Returns the metrics in Prometheus' text format.
///
/// # Errors
/// The encoder fails.
pub(crate) fn metrics(shared: &Shared) -> prometheus::Result<Vec<u8>> {
    let registry = Registry::new();
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let totals = &shared.totals;
    for (name, help, counter) in [
        ("requests", "Requests that were to be passed on.", &totals.requests),
        ("retries", "Attempts after a first one that produced nothing.", &totals.retries),
        ("failovers", "Streams that broke and went on with another backend.", &totals.failovers),
        ("errors", "Requests that ended with an error of the router.", &totals.errors),
        ("suspects", "Times that a request was in flight at a backend's death.", &totals.suspects),
        ("pairs", "Attempts with a prefill and a decode server.", &totals.pairs),
        (
            "pairs_unfetched",
            "Prompts that vLLM's decode servers compute, as nothing was handed on to them.",
            &totals.unfetched,
        ),
        ("given_up", "Requests not tried again after deaths of backends.", &totals.given_up),
    ] {
        let metric = IntCounter::new(format!("forebay_router_{name}_total"), help)?;
        metric.inc_by(read(counter));
        registry.register(Box::new(metric))?;
    }
    let size = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    let gauge = |name: &str, help: &str| {
        let metric =
            IntGaugeVec::new(Opts::new(format!("forebay_router_{name}"), help), &["backend"])?;
        registry.register(Box::new(metric.clone()))?;
        prometheus::Result::Ok(metric)
    };
    let counter = |name: &str, help: &str| {
        let name = format!("forebay_router_backend_{name}_total");
        let metric = GenericCounterVec::<Counter>::new(Opts::new(name, help), &["backend"])?;
        registry.register(Box::new(metric.clone()))?;
        prometheus::Result::Ok(metric)
    };
    let bodies = IntGauge::new("forebay_router_body_bytes", "Bytes of request bodies held.")?;
    bodies.set(size(shared.budget.taken()));
    registry.register(Box::new(bodies))?;
    let waiting = IntGauge::new(
        "forebay_router_trials_waiting",
        "Requests that wait to be tried alone, since a backend died while it had them.",
    )?;
    waiting.set(size(shared.registry.trials.waiting()));
    registry.register(Box::new(waiting))?;
    let up = gauge("backend_up", "Whether the backend takes requests.")?;
    let requests = gauge("backend_requests", "Requests that the backend has, everybody's.")?;
    let own = gauge("backend_own_requests", "Requests of this router that the backend has.")?;
    let tries = gauge("backend_on_trial", "Whether a request is tried alone at the backend.")?;
    let held = gauge(
        "backend_held_bytes",
        "Bytes of the backend's answers that may not be passed on yet, beyond 64 KiB a request.",
    )?;
    let dispatched = counter("dispatched", "Requests sent to the backend.")?;
    let failed = counter("failed", "Requests that the backend failed.")?;
    let refused = counter("refused", "Requests that the backend refused for now: 429 or 503.")?;
    let taken = counter("taken_over", "Streams that the backend went on with.")?;
    let moved = counter("moved", "Queued requests that were sent to another backend.")?;
    for backend in shared.registry.current().iter() {
        let url = backend.url.url();
        let label = [url.as_str()];
        let (all, ours, _) = backend.load();
        up.with_label_values(&label).set(backend.is_up().into());
        requests.with_label_values(&label).set(all.into());
        own.with_label_values(&label).set(ours.into());
        tries.with_label_values(&label).set(backend.is_trying().into());
        held.with_label_values(&label).set(size(backend.memory.taken()));
        dispatched.with_label_values(&label).inc_by(read(&backend.counters.dispatched));
        failed.with_label_values(&label).inc_by(read(&backend.counters.failed));
        refused.with_label_values(&label).inc_by(read(&backend.counters.refused));
        moved.with_label_values(&label).inc_by(read(&backend.counters.moved));
        taken.with_label_values(&label).inc_by(read(&backend.counters.taken_over));
    }
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    Ok(text)
}
