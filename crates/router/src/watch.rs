//! Questions of the router itself to backends: health, load and stored blocks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::peer::{LoadReport, ROUTER_HEADER, ROUTER_KEY_HEADER, RouterTag};
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri};
use tokio::select;
use tokio::time::{sleep, timeout};

use crate::backend::{Backend, Check, Sent};
use crate::config::Watch;
use crate::link::{Link, LinkError};
use crate::payload::Payload;
use crate::shared::Shared;

/// The time between two questions to a backend that is down or has just failed.
const PROBE: Duration = Duration::from_secs(1);
/// The longest time that an idle backend may keep a question about its load.
const WAIT: Duration = Duration::from_secs(20);
/// The least time between two questions to the same backend about its load.
const PACE: Duration = Duration::from_millis(5);
/// The time between two questions about a backend's blocks. Until they are known, a text counts for
/// the backend that it was sent to.
const BLOCKS_PACE: Duration = Duration::from_millis(20);
/// The time that a backend has to be without requests of ours before it is asked about its load.
/// Requests that come one after the other bring the load along. A question between them would be
/// answered just as the next one arrives.
const QUIET: Duration = Duration::from_millis(100);
/// The longest answer to any of these questions.
const MAX_ANSWER: usize = 64 << 20;

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
    // Only the first ends, when the backend is off the list.
    select! {
        () = health => {}
        () = load => {}
        () = blocks => {}
    }
}

async fn check_health(shared: &Shared, backend: &Backend) {
    let config = &shared.config.health;
    while !backend.removed.load(Ordering::Acquire) {
        let check = match question(shared, backend, None, &config.path, config.timeout).await {
            Ok((StatusCode::OK, ..)) => Check::Fine,
            Ok(_) => Check::Refuses,
            Err(error) if error.is_refused() => Check::Absent,
            Err(_) => Check::Silent,
        };
        let fine = backend.checked(check, config) && check == Check::Fine;
        let pause = if fine { config.interval } else { PROBE.min(config.interval) };
        if !fine {
            sleep(pause).await;
            continue;
        }
        select! {
            () = sleep(pause) => {}
            // Not sooner than a moment from now: what failed may just be starting again.
            () = backend.suspected.notified() => sleep(PACE).await,
        }
    }
}

/// Checks if a backend has died since dispatch `sent`, which broke: its address does not answer, or
/// another process does.
pub(crate) async fn has_died(shared: &Shared, sent: &Sent) -> bool {
    let backend = &sent.backend;
    let broke = Instant::now();
    let died = || backend.deaths() != sent.life;
    if died() {
        return true;
    }
    // All that broke at the same time are answered by one question.
    let mut found_alive = backend.inquest.lock().await;
    if died() {
        return true;
    }
    if found_alive.is_some_and(|asked| asked >= broke) {
        return false;
    }
    let config = &shared.config.health;
    let asked = Instant::now();
    // What a brain calls itself tells it from one that was started in its place.
    if backend.is_forebay() {
        let answer = question(shared, backend, None, "/v1/loads", config.timeout).await;
        take_report(backend, &answer);
    }
    let answer = question(shared, backend, None, &config.path, config.timeout).await;
    if answer.is_err() {
        backend.checked(Check::Absent, config);
    } else {
        *found_alive = Some(asked);
    }
    died()
}

/// Asks a backend something on a connection that is kept in `link`; status, headers and body.
async fn ask(
    shared: &Shared,
    backend: &Backend,
    link: &mut Option<Link>,
    path: &str,
) -> Result<(StatusCode, HeaderMap, Bytes), LinkError> {
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
    let (head, mut body) = open.send(request).await?.into_parts();
    let mut whole = Vec::new();
    while let Some(frame) =
        std::future::poll_fn(|context| open.poll_frame(&mut body, context)).await
    {
        if let Ok(data) = frame?.into_data() {
            whole.extend_from_slice(&data);
        }
        if whole.len() > MAX_ANSWER {
            break;
        }
    }
    *link = Some(open);
    Ok((head.status, head.headers, whole.into()))
}

async fn question(
    shared: &Shared,
    backend: &Backend,
    link: Option<&mut Option<Link>>,
    path: &str,
    limit: Duration,
) -> Result<(StatusCode, HeaderMap, Bytes), LinkError> {
    let mut once = None;
    let link = link.unwrap_or(&mut once);
    let asked = timeout(limit, ask(shared, backend, link, path)).await;
    asked.unwrap_or_else(|_| Err(LinkError::Connect(std::io::ErrorKind::TimedOut.into())))
}

/// Takes an answer's report; false if there is none, as with servers of others.
fn take_report(
    backend: &Backend,
    answer: &Result<(StatusCode, HeaderMap, Bytes), LinkError>,
) -> bool {
    let Ok((StatusCode::OK, _, body)) = answer else { return false };
    match serde_json::from_slice::<LoadReport>(body) {
        Ok(report) => {
            backend.report(report);
            true
        }
        Err(_) => false,
    }
}

async fn poll_load(shared: &Shared, backend: &Backend, interval: Duration) {
    let mut link = None;
    loop {
        let limit = interval.max(PROBE);
        let answer = question(shared, backend, Some(&mut link), "/v1/loads", limit).await;
        let known = take_report(backend, &answer);
        sleep(if known { interval } else { interval.max(PROBE) }).await;
    }
}

/// Follows the load of a backend. It comes with responses as long as there are any. Otherwise the
/// backend is asked to answer when it has another number of requests.
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
        let answer = question(shared, backend, Some(&mut link), &path, 2 * WAIT).await;
        first = !take_report(backend, &answer);
        sleep(if first { PROBE } else { PACE.saturating_sub(asked.elapsed()) }).await;
    }
}

async fn follow_blocks(shared: &Shared, backend: &Backend) {
    let mut link = None;
    let mut after = 0;
    loop {
        let path = format!("/v1/blocks?after={after}&wait={}", WAIT.as_secs());
        let answer = question(shared, backend, Some(&mut link), &path, 2 * WAIT).await;
        match answer.ok().and_then(|(status, _, body)| (status == StatusCode::OK).then_some(body)) {
            Some(body) if body.len() >= 16 => {
                let mut numbers = body.chunks_exact(8).map(number);
                let (next, reset) = (numbers.next(), numbers.next());
                let mut stored = backend.stored.lock();
                if reset != Some(0) {
                    stored.clear();
                }
                stored.apply(numbers);
                after = next.unwrap_or(0);
            }
            _ => {
                backend.stored.lock().clear();
                after = 0;
                sleep(PROBE).await;
            }
        }
        sleep(BLOCKS_PACE).await;
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
