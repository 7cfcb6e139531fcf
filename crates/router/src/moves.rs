//! Moves queued requests to another backend when loads have drifted apart.
//!
//! The rule is the same as between the replicas of a brain ([`forebay_balance::move_pays`]). The
//! reports in responses are not recent enough to base a move on, because a backend with a long
//! queue responds seldom. They only show which brains to query. Such a brain is queried for this
//! router's waiting dispatches, and for the work before each. A dispatch that was never admitted is
//! dropped there, and sent to another backend. See ADR 78.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::peer::QueuedDispatch;
use forebay_balance::{Load, drifted, move_pays};
use serde::Deserialize;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::ask::Ask;
use crate::backend::Backend;
use crate::link::Link;
use crate::models::without;
use crate::shared::Shared;
use crate::watch::report_of;

/// The interval at which the router checks whether loads have drifted apart. Reports older than
/// this are requested again.
const PACE: Duration = Duration::from_millis(50);
/// The largest number of waiting dispatches to request from a backend.
const LOOKED_AT: usize = 8;

/// The field of a brain's load report that lists waiting dispatches.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    queued: Vec<QueuedDispatch>,
}

/// A brain and its load, for decisions about moves.
struct Brain {
    backend: Arc<Backend>,
    load: Load,
    /// The brain's waiting dispatches, latest first, if they were requested.
    queued: Vec<QueuedDispatch>,
}

impl Brain {
    fn new(backend: Arc<Backend>) -> Self {
        Self { load: backend.balance(), backend, queued: Vec::new() }
    }

    /// True if the brain may get requests that were queued elsewhere.
    fn is_open(&self) -> bool {
        let candidate = self.backend.candidate(Instant::now());
        candidate.is_some_and(|(_, tries)| !tries)
    }
}

/// Moves requests for as long as the router runs.
pub(crate) async fn follow(shared: Arc<Shared>) {
    let mut links = HashMap::new();
    loop {
        shared.busy().await;
        sleep(PACE).await;
        look(&shared, &mut links).await;
    }
}

async fn look(shared: &Arc<Shared>, links: &mut HashMap<u32, Link>) {
    let backends = shared.registry.current();
    let knows = |backend: &&Arc<Backend>| backend.is_up() && backend.is_forebay();
    let mut brains: Vec<Brain> = backends.iter().filter(knows).cloned().map(Brain::new).collect();
    if brains.len() < 2 || brains.iter().all(|brain| brain.backend.movable.is_empty()) {
        return;
    }
    links.retain(|id, _| backends.iter().any(|backend| backend.id == *id));
    let question: Arc<str> = format!("/v1/loads?queued={LOOKED_AT}").into();
    let mut questions = JoinSet::new();
    for at in unclear(&brains) {
        let (shared, backend) = (Arc::clone(shared), Arc::clone(&brains[at].backend));
        let question = Arc::clone(&question);
        let mut link = links.remove(&backend.id);
        questions.spawn(async move {
            let answer = report_of(&shared, &backend, &mut link, &question).await;
            let answer = answer.and_then(|body| serde_json::from_slice::<Answer>(&body).ok());
            (at, link, answer)
        });
    }
    while let Some(told) = questions.join_next().await {
        // A task that panicked is skipped: the next round queries that brain again.
        let Ok((at, link, answer)) = told else { continue };
        let brain = &mut brains[at];
        if let Some(link) = link {
            links.insert(brain.backend.id, link);
        }
        if let Some(Answer { mut queued }) = answer {
            queued.truncate(LOOKED_AT);
            brain.queued = queued;
        }
    }
    for brain in &mut brains {
        brain.load = brain.backend.balance();
        // A report may still count a dispatch that ended after the report was made.
        for queued in brain.queued.extract_if(.., |queued| !brain.backend.has(queued.seq)) {
            let prefill = &mut brain.load.work.prefill;
            *prefill = prefill.saturating_sub(queued.tokens);
        }
    }
    while let Some((from, queued, to, uncached)) = best(shared, &brains, &backends) {
        brains[from].queued.retain(|other| other.seq != queued.seq);
        let target = brains[to].backend.id;
        if brains[from].backend.movable.order(queued.seq, target) {
            leave(&mut brains[from].load, queued.tokens);
            let load = &mut brains[to].load;
            load.requests += 1;
            load.work.prefill = load.work.prefill.saturating_add(uncached);
        }
    }
}

fn leave(load: &mut Load, tokens: u64) {
    load.requests = load.requests.saturating_sub(1);
    load.work.prefill = load.work.prefill.saturating_sub(tokens);
}

/// Returns the indices of the brains to query: those whose known loads have drifted apart, and one
/// of the others. That brain has the oldest report, after which other routers may have sent work to
/// it.
fn unclear(brains: &[Brain]) -> Vec<usize> {
    let loads: Vec<Load> = brains.iter().map(|brain| brain.load).collect();
    let mut asked: Vec<usize> = drifted(&loads, |at| brains[at].is_open())
        .into_iter()
        .flat_map(<[usize; 2]>::from)
        .collect();
    let stale = |brain: &Brain| {
        let age = brain.backend.reported().map_or(Duration::MAX, |reported| reported.elapsed());
        let waits = brain.load.work.prefill > 0 || !brain.backend.movable.is_empty();
        (waits && age >= PACE).then_some(age)
    };
    let others = brains.iter().enumerate().filter(|(at, _)| !asked.contains(at));
    let oldest = others.filter_map(|(at, brain)| Some((stale(brain)?, at))).max();
    asked.extend(oldest.map(|(_, at)| at));
    asked
}

/// Returns the next move: the index of the source, the dispatch, the index of the target, and the
/// number of the dispatch's tokens that are not cached at the target. Sources with the most work,
/// and their latest dispatches, are tried first. The target is the brain that would compute the
/// dispatch soonest.
fn best(
    shared: &Shared,
    brains: &[Brain],
    backends: &[Arc<Backend>],
) -> Option<(usize, QueuedDispatch, usize, u64)> {
    let mut sources: Vec<usize> =
        (0..brains.len()).filter(|&at| !brains[at].queued.is_empty()).collect();
    sources.sort_by_key(|&at| std::cmp::Reverse(brains[at].load.work.prefill));
    for from in sources {
        let here = &brains[from];
        // A single request does not wait for another.
        if here.load.requests < 2 {
            continue;
        }
        for &queued in &here.queued {
            let Some(ask) = here.backend.movable.ask(queued.seq) else { continue };
            let strange =
                ask.model.as_deref().map_or_else(Vec::new, |name| without(backends, name));
            let fits = |at: &usize| {
                let Brain { backend, .. } = &brains[*at];
                *at != from && !strange.contains(&backend.id) && brains[*at].is_open()
            };
            let others: Vec<usize> = (0..brains.len()).filter(fits).collect();
            let uncached =
                uncached(shared, &ask, queued.tokens, others.iter().map(|&at| &brains[at]));
            let paying = uncached
                .into_iter()
                .zip(others)
                .filter(|&(tokens, at)| move_pays(&here.load, &brains[at].load, tokens));
            let first = paying
                .min_by_key(|&(tokens, at)| brains[at].load.work.prefill.saturating_add(tokens));
            if let Some((tokens, to)) = first {
                return Some((from, queued, to, tokens));
            }
        }
    }
    None
}

/// Returns, for each brain, the number of the request's tokens that it would have to compute, at
/// least one.
fn uncached<'a>(
    shared: &Shared,
    ask: &Ask,
    tokens: u64,
    brains: impl ExactSizeIterator<Item = &'a Brain>,
) -> Vec<u64> {
    let count = brains.len();
    let mut shares = shared.cached(ask, brains.map(|brain| &*brain.backend));
    shares.resize(count, 0.0);
    let left = |share: f32| (tokens as f64 * (1.0 - f64::from(share))).ceil() as u64;
    shares.into_iter().map(|share| left(share).max(1)).collect()
}
