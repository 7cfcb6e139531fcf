//! The events of the feed.

use forebay_engine::{EngineHandle, Phase, PlannedStep, Since, Status, StepNote};
use forebay_webui::INTERVAL;
use serde::Serialize;

use crate::live::requests::RequestsSent;
use crate::live::shown::{ReplicaState, Snapshot};
use crate::state::Shared;

/// The number of earlier steps that a new viewer receives.
const FIRST_STEPS: u64 = 1024;

/// The first event of a feed. It is sent again when one of its values changes.
#[derive(Serialize)]
pub(super) struct Start {
    version: u32,
    server: String,
    model: String,
    now_us: u64,
    interval_ms: u128,
    replicas: Vec<ReplicaStart>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct ReplicaStart {
    index: usize,
    slots: u32,
    max_running: u32,
    page_size: u32,
    pages: u32,
    host_pages: u32,
    lookahead: u32,
}

/// The changes since the last tick.
#[derive(Serialize)]
pub(super) struct Tick {
    now_us: u64,
    replicas: Vec<ReplicaTick>,
    requests: Vec<RequestTick>,
    ended: Vec<String>,
}

#[derive(Serialize)]
struct ReplicaTick {
    index: usize,
    state: &'static str,
    respawns: u64,
    running: usize,
    waiting: usize,
    pages: Pages,
    host: HostPages,
    prefix: Prefix,
    preemptions: u64,
    replayed: u64,
    device_us: u64,
    gap_us: u64,
    lost: u64,
    steps: Vec<[u64; 10]>,
}

#[derive(Serialize)]
struct Pages {
    free: usize,
    cached: usize,
    held: usize,
}

#[derive(Serialize)]
struct HostPages {
    size: usize,
    held: usize,
    cached: usize,
}

#[derive(Serialize)]
struct Prefix {
    queries: u64,
    hits: u64,
}

/// The current state of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct RequestTick {
    pub(super) id: String,
    pub(super) replica: usize,
    pub(super) state: Phase,
    pub(super) prompt: u32,
    pub(super) cached: u32,
    pub(super) computed: u32,
    pub(super) generated: u32,
    pub(super) max_tokens: u32,
    pub(super) since_us: u64,
    /// The request whose prompt has to be computed before this request's prompt.
    pub(super) waits_for: Option<String>,
}

/// The data about the engines that a viewer has already received.
pub(super) struct Watch {
    /// The index of the next step to read, per replica.
    steps: Vec<u64>,
    told: RequestsSent,
    started: Vec<ReplicaStart>,
}

impl Watch {
    pub(super) fn new(state: &Shared) -> Self {
        let engines = state.engine.handles();
        let steps = engines.iter().map(|engine| {
            let next = engine.steps_since(u64::MAX).next;
            next.saturating_sub(FIRST_STEPS)
        });
        Self { steps: steps.collect(), told: RequestsSent::new(&engines), started: Vec::new() }
    }

    /// Returns the event with the initial state, unless it was sent already.
    pub(super) fn start(&mut self, state: &Shared, snapshot: &Snapshot) -> Option<Start> {
        let replicas = snapshot.replicas.iter().enumerate();
        let replicas: Vec<_> = replicas.map(|(at, seen)| begin(at, &seen.engine)).collect();
        if !self.started.is_empty() && self.started == replicas {
            return None;
        }
        self.started.clone_from(&replicas);
        // The web page drops its list of requests on this event, so all requests are sent again.
        self.told.forget();
        Some(Start {
            version: 1,
            server: format!("forebay {}", env!("CARGO_PKG_VERSION")),
            model: state.model.served_names.first().cloned().unwrap_or_default(),
            now_us: snapshot.now_us,
            interval_ms: INTERVAL.as_millis(),
            replicas,
        })
    }

    pub(super) fn tick(&mut self, snapshot: &Snapshot) -> Tick {
        let mut replicas = Vec::with_capacity(snapshot.replicas.len());
        for (at, seen) in snapshot.replicas.iter().enumerate() {
            let Some(place) = self.steps.get_mut(at) else { continue };
            let since = seen.engine.steps_since(*place);
            *place = since.next;
            replicas.push(ReplicaTick::new(at, seen, &since));
        }
        let (requests, ended) = self.told.changes(snapshot);
        let ended = ended.into_iter().map(|id| id.to_string()).collect();
        Tick { now_us: snapshot.now_us, replicas, requests, ended }
    }
}

fn begin(index: usize, engine: &EngineHandle) -> ReplicaStart {
    let (size, facts) = (engine.size(), engine.facts());
    let hand = facts.as_ref().map(|facts| &facts.hand);
    ReplicaStart {
        index,
        slots: size.slots,
        max_running: size.max_running,
        page_size: size.page_size,
        pages: hand.map_or(0, |hand| hand.page_count),
        host_pages: hand.map_or(0, |hand| hand.host_page_count),
        lookahead: size.lookahead,
    }
}

impl ReplicaTick {
    fn new(index: usize, seen: &ReplicaState, since: &Since<StepNote>) -> Self {
        let (scheduler, hand) = (&seen.report.stats.scheduler, &seen.report.stats.hand);
        Self {
            index,
            state: match seen.report.status {
                Status::Starting(_) => "starting",
                Status::Ready | Status::Draining => "ready",
                Status::Recovering(_) => "restarting",
                Status::Failed(_) => "down",
            },
            respawns: hand.deaths,
            running: scheduler.running,
            waiting: scheduler.waiting,
            pages: Pages {
                free: scheduler.pages_free,
                cached: scheduler.pages_cached,
                held: scheduler.pages_held,
            },
            host: HostPages {
                size: scheduler.host.pages,
                held: 0,
                cached: scheduler.host.pages_used,
            },
            prefix: Prefix {
                queries: scheduler.prefix_queries,
                hits: scheduler.prefix_hits + scheduler.host_hits,
            },
            preemptions: scheduler.preemptions,
            replayed: hand.replayed,
            device_us: hand.device_us,
            gap_us: hand.gap_us,
            lost: since.lost,
            steps: since.entries.iter().map(columns).collect(),
        }
    }
}

fn columns(note: &StepNote) -> [u64; 10] {
    let StepNote { step, planned_us, done_us, device_us, gap_us, planned, plan_us, in_flight } =
        *note;
    let PlannedStep { decode_rows, prefill_rows, tokens, .. } = planned;
    [
        step,
        planned_us,
        done_us,
        device_us.into(),
        gap_us.into(),
        decode_rows.into(),
        prefill_rows.into(),
        tokens.into(),
        plan_us.into(),
        in_flight.into(),
    ]
}
