//! Snapshots of the engines' state, shared by all viewers.

use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{EngineHandle, RequestView};
use forebay_webui::INTERVAL;
use tokio::sync::{oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::shown::{ReplicaState, Snapshot};
use crate::state::Shared;

/// How long an engine thread may take to list its requests. After that the previous list is shown.
const PATIENCE: Duration = Duration::from_millis(200);

/// Returns the stream of snapshots. Its task starts with the first subscriber and ends after the
/// last.
pub(super) fn follow(state: &Shared) -> watch::Receiver<Arc<Snapshot>> {
    let mut shown = state.live.shown.lock();
    if let Some(shown) = &*shown {
        return shown.clone();
    }
    let (show, follower) = watch::channel(Arc::new(Snapshot::default()));
    *shown = Some(follower.clone());
    drop(shown);
    tokio::spawn(look(Arc::clone(state), show));
    follower
}

async fn look(state: Shared, show: watch::Sender<Arc<Snapshot>>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        {
            let mut shown = state.live.shown.lock();
            // The state keeps one receiver for later subscribers.
            if show.receiver_count() <= 1 {
                *shown = None;
                return;
            }
        }
        let before = Arc::clone(&show.borrow());
        show.send_replace(Arc::new(snapshot(&state, &before).await));
    }
}

async fn snapshot(state: &Shared, before: &Snapshot) -> Snapshot {
    let engines = state.engine.handles();
    let told = views(&engines).await;
    let now_us = engines.first().map_or(0, EngineHandle::now_us);
    let reports = state.engine.replicas();
    let replicas = engines.into_iter().zip(reports).zip(told).enumerate();
    let replicas = replicas.map(|(at, ((engine, report), views))| {
        let old = || before.replicas.get(at).map(|seen| Arc::clone(&seen.views));
        let views = views.map(Arc::from).or_else(old).unwrap_or_default();
        ReplicaState { engine, report, views }
    });
    Snapshot { now_us, replicas: replicas.collect() }
}

/// Returns the requests of each engine; `None` for an engine that did not reply in time.
pub(crate) async fn views(engines: &[EngineHandle]) -> Vec<Option<Vec<RequestView>>> {
    let asked: Vec<_> = engines.iter().map(ask).collect();
    let mut told = Vec::with_capacity(asked.len());
    for reply in asked {
        told.push(timeout(PATIENCE, reply).await.ok().and_then(Result::ok));
    }
    told
}

fn ask(engine: &EngineHandle) -> oneshot::Receiver<Vec<RequestView>> {
    let (reply, told) = oneshot::channel();
    engine.look(Box::new(move |views| {
        let _ = reply.send(views);
    }));
    told
}
