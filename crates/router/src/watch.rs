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

/// The interval of health checks of a backend that is down or has just failed.
const PROBE: Duration = Duration::from_secs(1);
/// How long an idle backend may hold a load request open.
const WAIT: Duration = Duration::from_secs(20);
/// The shortest interval between two load requests to the same backend.
const PACE: Duration = Duration::from_millis(5);
/// The interval of requests for a backend's blocks. Until they are known, a text counts as cached
/// at the backend that it was sent to.
const BLOCKS_PACE: Duration = Duration::from_millis(20);
/// How long a backend has to be without requests from this router before it is asked for its load.
/// Responses carry the load anyway, and with requests in quick succession the answer would come
/// together with the next request.
const QUIET: Duration = Duration::from_millis(100);
/// The longest report of a load, in bytes.
const MAX_REPORT: usize = 64 << 10;
/// The longest list of models, in bytes.
const MAX_LIST: usize = 4 << 20;
/// The largest answer about blocks: two numbers, and an event for each block.
const MAX_EVENTS: usize = 8 * (2 + MAX_BLOCKS);
/// The number of block events that are applied at a time. Requests are dispatched in between.
const EVENTS_AT_ONCE: usize = 1 << 13;

/// Watches a backend until it is taken off the list.
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
    // Only the first branch ends, when the backend leaves the list.
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
            // Its models have to be known before it gets requests, which might be for another
            // backend's.
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
            // Wait a moment first: what has failed may be starting again.
            () = backend.suspected.notified() => sleep(PACE).await,
        }
    }
}

/// Asks a server that should be in pairs for its engine; false: it can't be in a pair now.
async fn knows_peer(shared: &Shared, backend: &Backend) -> bool {
    let peer = identify(shared, backend).await.transpose();
    let fits = matches!(peer, Some(Ok(_)));
    if let Some(peer) = peer {
        backend.set_peer(peer);
    }
    fits
}

/// Checks whether a backend has died since dispatch `sent`, which broke: its address does not
/// answer, or another process does.
pub(crate) async fn has_died(shared: &Shared, sent: &Sent) -> bool {
    let backend = &sent.backend;
    let broke = Instant::now();
    let died = || backend.deaths() != sent.life;
    if died() {
        return true;
    }
    // One check answers for all dispatches that broke at the same time.
    let mut found_alive = backend.inquest.lock().await;
    if died() {
        return true;
    }
    if found_alive.is_some_and(|asked| asked >= broke) {
        return false;
    }
    let config = &shared.config.health;
    let asked = Instant::now();
    // A brain's process id tells it from a process that was started in its place.
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

/// An answer's status and body.
type Answer = Result<(StatusCode, Bytes), LinkError>;

/// Sends a request on a connection kept in `link`. Returns the answer's head, and the connection
/// for the rest.
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
    // Digits, letters and semicolons.
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

/// Reads an answer up to a size limit. Its connection is kept in `link`.
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

/// Gets an answer within a time limit and a size limit.
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

/// The status of a backend's health check. The body of that answer is not read.
async fn health(shared: &Shared, backend: &Backend) -> Result<StatusCode, LinkError> {
    let config = &shared.config.health;
    let mut link = None;
    let answer = timeout(config.timeout, ask(shared, backend, &mut link, &config.path)).await;
    answer.unwrap_or_else(|_| Err(late())).map(|(_, response)| response.status())
}

fn late() -> LinkError {
    LinkError::Connect(ErrorKind::TimedOut.into())
}

/// Applies the load report in an answer; false: there is none, as with other servers.
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

/// Asks a backend that reports loads for a report, and applies it. Returns the answer.
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

/// Follows the load of a backend. It comes with responses as long as there are any. Otherwise a
/// request waits at the backend until its number of requests changes.
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

/// Follows a backend's list of models, which is read again on demand.
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

/// Reads a backend's list of models, and warns of names that mean something else at other backends.
async fn ask_models(shared: &Shared, backend: &Backend, link: &mut Option<Link>) {
    let number = backend.models.begin();
    let limits = (shared.config.health.timeout, MAX_LIST);
    let listed = match question(shared, backend, link, LIST, limits).await {
        Ok((StatusCode::OK, body)) => Listed::read(&body),
        Ok(_) => None,
        // It will have the same models again when it comes back.
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
