//! The router's own requests to backends: health, load and stored blocks.

use std::future::poll_fn;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::peer::{LoadReport, ROUTER_HEADER, ROUTER_KEY_HEADER, RouterTag};
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use tokio::select;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use crate::backend::{Backend, Check, Sent};
use crate::config::Watch;
use crate::identify::identify;
use crate::index::MAX_BLOCKS;
use crate::link::{Link, LinkError};
use crate::models::{LIST, Listed, conflicts};
use crate::pairs::Duty;
use crate::payload::Payload;
use crate::shared::Shared;

/// The interval of health checks for a backend that is down or has just failed.
const PROBE: Duration = Duration::from_secs(1);
/// The time for which an idle backend may hold a load request open.
const WAIT: Duration = Duration::from_secs(20);
/// The shortest interval between two load requests to the same backend.
const PACE: Duration = Duration::from_millis(5);
/// The interval at which a backend's block events are requested. Until the blocks of a text are
/// known, the text counts as cached at the backend to which it was sent.
const BLOCKS_PACE: Duration = Duration::from_millis(20);
/// The time that must pass after this router's last request before a backend is queried for its
/// load. Responses carry the load too. During a series of requests, the report would only arrive
/// when the next request does.
const QUIET: Duration = Duration::from_millis(100);
/// The largest load report, in bytes.
const MAX_REPORT: usize = 64 << 10;
/// The largest list of models, in bytes.
const MAX_LIST: usize = 4 << 20;
/// The largest response with block events, in bytes: two numbers and one event per block, of eight
/// bytes each.
const MAX_EVENTS: usize = 8 * (2 + MAX_BLOCKS);
/// The number of block events that are applied at once. Between such batches requests are
/// dispatched.
const EVENTS_AT_ONCE: usize = 1 << 13;

/// Watches a backend until it is removed from the list.
pub(crate) async fn watch(shared: Arc<Shared>, backend: Arc<Backend>) {
    let health = check_health(&shared, &backend);
    let load = async {
        match shared.config.watch {
            Watch::Polled(interval) => poll_load(&shared, &backend, interval).await,
            Watch::Acknowledged | Watch::Unacknowledged => follow_load(&shared, &backend).await,
        }
    };
    let blocks = async {
        if shared.uses_blocks() {
            follow_blocks(&shared, &backend).await;
        }
        std::future::pending::<()>().await;
    };
    // Only the first branch completes, when the backend is removed from the list.
    select! {
        () = health => {}
        () = follow_models(&shared, &backend) => {}
        () = load => {}
        () = blocks => {}
    }
}

async fn check_health(shared: &Shared, backend: &Backend) {
    let config = &shared.config.health;
    while !backend.removed.load(Ordering::Acquire) {
        let mut check = match health(shared, backend).await {
            Ok(StatusCode::OK) => Check::Fine,
            Ok(_) => Check::Refuses,
            Err(error) if error.is_refused() => Check::Absent,
            Err(_) => Check::Silent,
        };
        if check == Check::Fine && !backend.is_up() {
            // The backend's models have to be known before it gets requests, because a request
            // might be for a model of another backend.
            ask_models(shared, backend, &mut None).await;
            if backend.duty != Duty::Whole && !knows_peer(shared, backend).await {
                check = Check::Refuses;
            }
        }
        let fine = backend.checked(check, config) && check == Check::Fine;
        let pause = if fine { config.interval } else { PROBE.min(config.interval) };
        if !fine {
            sleep(pause).await;
            continue;
        }
        select! {
            () = sleep(pause) => {}
            // Wait a moment first, because a failed process may be starting again.
            () = backend.suspected.notified() => sleep(PACE).await,
        }
    }
}

/// Queries a server of a pair for its engine. Returns false if it can't be in a pair now.
async fn knows_peer(shared: &Shared, backend: &Backend) -> bool {
    let peer = identify(shared, backend).await.transpose();
    let fits = matches!(peer, Some(Ok(_)));
    if let Some(peer) = peer {
        backend.set_peer(peer);
    }
    fits
}

/// Returns whether the backend has died since the dispatch `sent`, whose response broke off. A
/// backend has died if its health check gets no response, or if another process responds.
pub(crate) async fn has_died(shared: &Shared, sent: &Sent) -> bool {
    let backend = &sent.backend;
    let broke = Instant::now();
    let died = || backend.deaths() != sent.life;
    if died() {
        return true;
    }
    // One check suffices for all dispatches that broke at the same time.
    let mut found_alive = backend.inquest.lock().await;
    if died() {
        return true;
    }
    if found_alive.is_some_and(|asked| asked >= broke) {
        return false;
    }
    let config = &shared.config.health;
    let asked = Instant::now();
    // A brain's report contains a random number that its process chose at its start. It shows
    // whether another process has been started since the dispatch.
    if backend.is_forebay() {
        let limits = (config.timeout, MAX_REPORT);
        let answer = question(shared, backend, &mut None, "/v1/loads", limits).await;
        take_report(backend, &answer);
    }
    if health(shared, backend).await.is_err() {
        backend.checked(Check::Absent, config);
    } else {
        *found_alive = Some(asked);
    }
    died()
}

/// The status and the body of a response.
type Answer = Result<(StatusCode, Bytes), LinkError>;

/// Sends a request on the connection in `link`, or on a new one. Returns the connection and the
/// head of the response.
async fn ask(
    shared: &Shared,
    backend: &Backend,
    link: &mut Option<Link>,
    path: &str,
) -> Result<(Link, Response<Incoming>), LinkError> {
    let mut open = match link.take() {
        Some(open) => open,
        None => Link::open(&backend.url).await?,
    };
    let mut request = Request::new(Payload::default());
    *request.uri_mut() = path.parse().unwrap_or(Uri::from_static("/"));
    let headers = request.headers_mut();
    headers.insert(HOST, backend.host.clone());
    let tag = RouterTag { router: shared.id, seq: 0, floor: 0, seed: 0, blocks: false };
    // The tag consists of digits, letters and semicolons.
    if let Ok(tag) = HeaderValue::from_str(&tag.encode()) {
        headers.insert(HeaderName::from_static(ROUTER_HEADER), tag);
    }
    for (name, key) in [
        (HeaderName::from_static(ROUTER_KEY_HEADER), &shared.router_key),
        (AUTHORIZATION, &shared.own_key),
    ] {
        if let Some(key) = key {
            headers.insert(name, key.clone());
        }
    }
    let response = open.send(request).await?;
    Ok((open, response))
}

/// Reads a response up to a size limit. Puts its connection into `link` for reuse.
async fn read(
    (mut open, response): (Link, Response<Incoming>),
    link: &mut Option<Link>,
    most: usize,
) -> Answer {
    let (head, mut body) = response.into_parts();
    let mut whole = Vec::new();
    while let Some(frame) = poll_fn(|context| open.poll_frame(&mut body, context)).await {
        if let Ok(data) = frame?.into_data() {
            if whole.len() + data.len() > most {
                return Err(LinkError::Excess(most));
            }
            whole.extend_from_slice(&data);
        }
    }
    *link = Some(open);
    Ok((head.status, whole.into()))
}

/// Sends a request and reads its response, within a time limit and a size limit.
pub(crate) async fn question(
    shared: &Shared,
    backend: &Backend,
    link: &mut Option<Link>,
    path: &str,
    (time, most): (Duration, usize),
) -> Answer {
    let answer = async {
        let answer = ask(shared, backend, link, path).await?;
        read(answer, link, most).await
    };
    timeout(time, answer).await.unwrap_or_else(|_| Err(late()))
}

/// Returns the status of a backend's health check. The body of the response is not read.
async fn health(shared: &Shared, backend: &Backend) -> Result<StatusCode, LinkError> {
    let config = &shared.config.health;
    let mut link = None;
    let answer = timeout(config.timeout, ask(shared, backend, &mut link, &config.path)).await;
    answer.unwrap_or_else(|_| Err(late())).map(|(_, response)| response.status())
}

fn late() -> LinkError {
    LinkError::Connect(ErrorKind::TimedOut.into())
}

/// Applies the load report in a response. Returns false if it contains none, as from servers other
/// than Forebay.
fn take_report(backend: &Backend, answer: &Answer) -> bool {
    let Ok((StatusCode::OK, body)) = answer else { return false };
    match serde_json::from_slice::<LoadReport>(body) {
        Ok(report) => {
            backend.report(report);
            true
        }
        Err(_) => false,
    }
}

/// Requests a load report from a backend, and applies it. Returns the body of the response; `None`:
/// it contains no report.
pub(crate) async fn report_of(
    shared: &Shared,
    backend: &Backend,
    link: &mut Option<Link>,
    path: &str,
) -> Option<Bytes> {
    let answer = question(shared, backend, link, path, (PROBE, MAX_REPORT)).await;
    take_report(backend, &answer).then(|| answer.ok().map(|(_, body)| body)).flatten()
}

async fn poll_load(shared: &Shared, backend: &Backend, interval: Duration) {
    let mut link = None;
    loop {
        let limits = (interval.max(PROBE), MAX_REPORT);
        let answer = question(shared, backend, &mut link, "/v1/loads", limits).await;
        let known = take_report(backend, &answer);
        sleep(if known { interval } else { interval.max(PROBE) }).await;
    }
}

/// Keeps the load of a backend up to date. While there are requests, reports come with the
/// responses. Otherwise a request waits at the backend until its number of requests changes.
async fn follow_load(shared: &Shared, backend: &Backend) {
    let mut link = None;
    let mut first = true;
    loop {
        let (_, own, report) = backend.load();
        if own > 0 && !first {
            sleep(PROBE).await;
            continue;
        }
        let quiet = backend.ended().map_or(QUIET, |ended| ended.elapsed());
        if quiet < QUIET && !first {
            sleep(QUIET - quiet).await;
            continue;
        }
        let path = match report {
            Some(report) if !first => {
                format!("/v1/loads?wait={}&requests={}", WAIT.as_secs(), report.requests)
            }
            _ => "/v1/loads".to_owned(),
        };
        let asked = Instant::now();
        let answer = question(shared, backend, &mut link, &path, (2 * WAIT, MAX_REPORT)).await;
        first = !take_report(backend, &answer);
        sleep(if first { PROBE } else { PACE.saturating_sub(asked.elapsed()) }).await;
    }
}

/// Keeps a backend's list of models up to date. It is also read on demand.
async fn follow_models(shared: &Shared, backend: &Backend) {
    let mut link = None;
    loop {
        select! {
            () = sleep(shared.config.health.interval) => {}
            () = backend.models.wanted.notified() => {}
        }
        if backend.is_up() {
            ask_models(shared, backend, &mut link).await;
        }
        sleep(PACE).await;
    }
}

/// Reads a backend's list of models. Warns about names whose content is not the same at all
/// backends.
async fn ask_models(shared: &Shared, backend: &Backend, link: &mut Option<Link>) {
    let number = backend.models.begin();
    let limits = (shared.config.health.timeout, MAX_LIST);
    let listed = match question(shared, backend, link, LIST, limits).await {
        Ok((StatusCode::OK, body)) => Listed::read(&body),
        Ok(_) => None,
        // The backend will probably have the same models when it is up again.
        Err(_) => return backend.models.fail(number),
    };
    if backend.models.end(number, listed) {
        for conflict in conflicts(&shared.registry.current()) {
            tracing::warn!("{conflict}");
        }
    }
}

async fn follow_blocks(shared: &Shared, backend: &Backend) {
    let mut link = None;
    let mut after = 0;
    loop {
        let path = format!("/v1/blocks?after={after}&wait={}", WAIT.as_secs());
        let answer = question(shared, backend, &mut link, &path, (2 * WAIT, MAX_EVENTS)).await;
        let mut pause = BLOCKS_PACE;
        match answer.ok().filter(|(status, body)| *status == StatusCode::OK && body.len() >= 16) {
            Some((_, body)) => {
                let (head, events) = body.split_at(16);
                if number(&head[8..]) != 0 {
                    backend.stored.lock().clear();
                }
                for events in events.chunks(8 * EVENTS_AT_ONCE) {
                    backend.stored.lock().apply(events.chunks_exact(8).map(number));
                    pause += BLOCKS_PACE;
                    yield_now().await;
                }
                after = number(&head[..8]);
            }
            None => {
                backend.stored.lock().clear();
                after = 0;
                sleep(PROBE).await;
            }
        }
        sleep(pause).await;
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
