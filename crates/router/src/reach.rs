//! The way to a response of some backend: a choice, an attempt, and further ones while nothing is
//! produced.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use forebay_api::ApiError;
use forebay_api::peer::{
    BLOCKS_HEADER, DEATHS_HEADER, LOAD_HEADER, LoadReport, RESPONSE_HEADER, STREAM_HEADER,
    decode_blocks,
};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::{sleep, timeout, timeout_at};

use crate::ask::{Ask, Resume, keep_end_to_end};
use crate::backend::{Backend, Check, Sent};
use crate::flow::{Broken, Flow, Vigil};
use crate::link::{Link, LinkError};
use crate::payload::Payload;
use crate::shared::{Choice, Shared, Worker};
use crate::tape::Tape;
use crate::watch::has_died;

/// The largest part of a whole answer that is held back. A held answer that breaks can be requested
/// again.
const HOLD: usize = 1 << 20;

/// Media types of answers that come in pieces.
const PIECES: [&[u8]; 2] = [b"text/event-stream", b"application/x-ndjson"];

/// The form in which a response's body is passed on.
pub(crate) enum Kind {
    /// Bytes.
    Plain,
    /// Events that only this backend can go on with.
    Events,
    /// Events that another brain can go on with.
    Tape(Tape, HeaderValue),
}

/// A response that has begun.
pub(crate) struct Reached {
    pub(crate) head: http::response::Parts,
    pub(crate) kind: Kind,
    /// The first bytes of its body.
    pub(crate) first: Bytes,
    /// The rest; `None`: there is none.
    pub(crate) flow: Option<Flow>,
}

/// A failure without a response, or a response to pass on although another backend might do better.
#[derive(Debug)]
pub(crate) enum Failure {
    /// No backend could be asked, or none answered.
    Api(ApiError),
    /// The last backend refused.
    Refused(Response<Bytes>),
}

/// The reason for another attempt.
enum Trouble {
    Connect(LinkError),
    /// A connection that had been idle turned out to be closed.
    Stale,
    Broken(Broken),
    Refused(Response<Bytes>),
    /// The backend does not keep the response that the request names.
    Unkept(Response<Bytes>),
    /// The backend is a router that has given the request up.
    GivenUp(Response<Bytes>),
}

/// An attempt that came to nothing.
struct Failed {
    trouble: Trouble,
    /// The dispatch, if the backend may have died of it. It is still open, so that no other suspect
    /// is tried there before that is known.
    sent: Option<Sent>,
}

impl From<Trouble> for Failed {
    fn from(trouble: Trouble) -> Self {
        Self { trouble, sent: None }
    }
}

/// Asks backends until one answers. With `resume`, until one goes on with that stream, whose
/// dispatch `broke`.
pub(crate) async fn reach(
    worker: &Arc<Worker>,
    ask: &Ask,
    resume: Option<&Resume>,
    broke: Option<Sent>,
) -> Result<Reached, Failure> {
    let shared = &worker.shared;
    let retry = shared.config.retry;
    let mut avoid: Vec<u32> = Vec::new();
    if let Some(sent) = broke {
        avoid.push(sent.backend.id);
        mourn(shared, ask, sent).await?;
    }
    let mut last = None;
    // The answer of backends that do not keep the response in question.
    let mut unkept = None;
    let (mut attempts, mut rounds) = (0, 0);
    // A connection that was idle says little when it fails. One such surprise is enough.
    let mut fresh = false;
    loop {
        let Some(sent) = choose(shared, ask, &avoid, resume.is_some()).await else {
            if let Some(unkept) = unkept {
                return Err(unkept);
            }
            // Everybody that can be asked has been.
            rounds += 1;
            let tried = !avoid.is_empty();
            if !tried || rounds > retry.retries || Instant::now() >= ask.deadline {
                return Err(last.unwrap_or_else(no_backend));
            }
            sleep(retry.pause(rounds, rand::random())).await;
            avoid.clear();
            continue;
        };
        let backend = Arc::clone(&sent.backend);
        let Failed { trouble, sent } = match attempt(worker, ask, resume, sent, fresh).await {
            Ok(reached) => {
                ask.past.lock().acquit();
                if let Some(flow) = &reached.flow {
                    backend.end_trial(flow.sent.seq);
                }
                return Ok(reached);
            }
            Err(failed) => failed,
        };
        let died = match sent {
            Some(sent) => mourn(shared, ask, sent).await?,
            None => false,
        };
        match verdict(shared, &backend, trouble, died) {
            Verdict::Again => {
                fresh = true;
                continue;
            }
            Verdict::Aside(failure) => {
                unkept = Some(failure);
                avoid.push(backend.id);
                continue;
            }
            Verdict::Final(failure) => return Err(failure),
            Verdict::Next(failure) => last = Some(failure),
        }
        attempts += 1;
        if attempts > retry.retries {
            return Err(last.unwrap_or_else(no_backend));
        }
        shared.totals.retries.fetch_add(1, Ordering::Relaxed);
        avoid.push(backend.id);
    }
}

/// The consequence of an attempt that came to nothing.
enum Verdict {
    /// The same backends are asked, on a new connection.
    Again,
    /// Another backend is asked, and this attempt does not count.
    Aside(Failure),
    /// Another backend is asked, if attempts are left.
    Next(Failure),
    /// No other backend is asked.
    Final(Failure),
}

fn verdict(shared: &Shared, backend: &Backend, trouble: Trouble, died: bool) -> Verdict {
    match trouble {
        Trouble::Stale if !died => Verdict::Again,
        Trouble::Stale => Verdict::Next(not_reached()),
        Trouble::Refused(response) => Verdict::Next(Failure::Refused(response)),
        Trouble::Unkept(response) => Verdict::Aside(Failure::Refused(response)),
        Trouble::GivenUp(response) => Verdict::Final(Failure::Refused(response)),
        Trouble::Broken(Broken::Deadline) => Verdict::Final(broken(&Broken::Deadline)),
        Trouble::Broken(reason) => {
            tracing::debug!(backend = backend.url.url(), %reason, died, "no response");
            Verdict::Next(broken(&reason))
        }
        Trouble::Connect(reason) => {
            tracing::debug!(backend = backend.url.url(), %reason, "no connection");
            if reason.is_refused() {
                backend.checked(Check::Absent, &shared.config.health);
            }
            Verdict::Next(not_reached())
        }
    }
}

/// A backend for the next attempt. A suspect waits until it can be tried alone somewhere.
async fn choose(shared: &Shared, ask: &Ask, avoid: &[u32], resumed: bool) -> Option<Sent> {
    loop {
        let freed = shared.registry.trials.notified();
        tokio::pin!(freed);
        freed.as_mut().enable();
        let trial = ask.past.lock().trial();
        match shared.dispatch(ask, avoid, resumed, trial) {
            Choice::Sent(sent) => return Some(sent),
            Choice::Nobody => return None,
            Choice::OnTrial => timeout_at(ask.deadline.into(), freed).await.ok()?,
        }
    }
}

/// Finds out whether a dispatch that broke was in flight at its backend's death, and notes it.
///
/// # Errors
/// It was, and the request is not to be tried again.
async fn mourn(shared: &Shared, ask: &Ask, sent: Sent) -> Result<bool, Failure> {
    if !has_died(shared, &sent).await {
        return Ok(false);
    }
    let backend = &sent.backend;
    let role = backend.role(sent.seq, sent.life);
    let (goes_on, deaths) = {
        let mut past = ask.past.lock();
        (past.died(role, sent.since, Instant::now()), past.deaths())
    };
    shared.totals.suspects.fetch_add(1, Ordering::Relaxed);
    tracing::debug!(backend = backend.url.url(), ?role, deaths, "a backend died");
    if goes_on {
        return Ok(true);
    }
    shared.totals.given_up.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(deaths, "backends died while they had this request: it is not tried again");
    Err(Failure::Api(ApiError::BackendDied { deaths }))
}

fn no_backend() -> Failure {
    let reason = "no backend takes requests now".to_owned();
    Failure::Api(ApiError::Unavailable { reason, code: "no_backend" })
}

fn not_reached() -> Failure {
    let reason = "the backend could not be reached".to_owned();
    Failure::Api(ApiError::Unavailable { reason, code: "backend_failed" })
}

fn broken(reason: &Broken) -> Failure {
    Failure::Api(unanswered(reason))
}

/// The error for a client whose response broke.
pub(crate) fn unanswered(reason: &Broken) -> ApiError {
    let code = match reason {
        Broken::Deadline => "timeout",
        Broken::Link(_) | Broken::Gone => "backend_failed",
    };
    ApiError::Unavailable { reason: reason.to_string(), code }
}

/// One attempt, with `fresh` on a connection that was not used before.
async fn attempt(
    worker: &Arc<Worker>,
    ask: &Ask,
    resume: Option<&Resume>,
    mut sent: Sent,
    fresh: bool,
) -> Result<Reached, Failed> {
    let shared = &worker.shared;
    let request = ask.request((shared.id, shared.router_key.as_ref()), &sent, resume);
    let mut vigil = Vigil::new(&sent, ask.deadline);
    let (link, response) = match answered(worker, &sent, request, &mut vigil, fresh).await {
        Ok(answered) => answered,
        Err((trouble, was_sent)) => {
            if !matches!(trouble, Trouble::Stale) {
                sent.failed();
            }
            return Err(Failed { trouble, sent: was_sent.then_some(sent) });
        }
    };
    let (mut head, body) = response.into_parts();
    let report = report(&head.headers).filter(|_| shared.uses_reports());
    // For routers in front of this one, too.
    let given_up = head.headers.remove(DEATHS_HEADER);
    let retriable = is_retriable(head.status);
    if retriable && head.status != StatusCode::TOO_MANY_REQUESTS && given_up.is_none() {
        sent.failed();
    }
    sent.answered(report);
    if let Some(texts) = &ask.texts
        && let Some(blocks) = head.headers.get(BLOCKS_HEADER)
        && let Ok(blocks) = decode_blocks(blocks.to_str().unwrap_or_default())
    {
        shared.index.lock().learn(texts, sent.backend.names(), &blocks);
    }
    let unkept = ask.response.as_deref().filter(|_| head.status == StatusCode::NOT_FOUND);
    if let Some(response) = unkept {
        shared.homes.lacks(sent.backend.id, response);
    }
    if let Some(Ok(response)) = head.headers.get(RESPONSE_HEADER).map(HeaderValue::to_str) {
        shared.homes.keeps(sent.backend.id, response);
    }
    let kind = kind(&head.headers, resume);
    let goes_on = head.status == StatusCode::OK && matches!(kind, Kind::Tape(..));
    keep_end_to_end(&mut head.headers);
    if let Some(deaths) = &given_up {
        head.headers.insert(DEATHS_HEADER, deaths.clone());
    }
    let flow = Flow::new(sent, link, body, vigil, Arc::clone(worker));
    let reached = first(Reached { head, kind, first: Bytes::new(), flow: None }, flow).await?;
    if unkept.is_some() && resume.is_none() {
        let response = Response::from_parts(reached.head, reached.first);
        return Err(Trouble::Unkept(response).into());
    }
    // A client that has half of a stream must not get something else after it.
    if retriable || resume.is_some() && !goes_on {
        let response = Response::from_parts(reached.head, reached.first);
        return Err(match given_up {
            Some(_) => Trouble::GivenUp(response).into(),
            None => Trouble::Refused(response).into(),
        });
    }
    Ok(reached)
}

/// Sends a request and waits for a response's head. An error comes with a flag, true if the backend
/// may have the request.
async fn answered(
    worker: &Worker,
    sent: &Sent,
    request: Request<Payload>,
    vigil: &mut Vigil,
    fresh: bool,
) -> Result<(Link, Response<Incoming>), (Trouble, bool)> {
    let backend = &sent.backend;
    let mut link = match worker.idle.take(backend.id).filter(|_| !fresh) {
        Some(link) => link,
        None => match timeout(worker.shared.config.connect_timeout, Link::open(&backend.url)).await
        {
            Ok(link) => link.map_err(|error| (Trouble::Connect(error), false))?,
            Err(_) => {
                let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
                return Err((Trouble::Connect(LinkError::Connect(late)), false));
            }
        },
    };
    let stale = link.is_used();
    let response = {
        let sending = link.send(request);
        tokio::pin!(sending);
        let response = poll_fn(|context| match sending.as_mut().poll(context) {
            Poll::Ready(response) => Poll::Ready(response.map_err(Broken::Link)),
            Poll::Pending => vigil.poll(context).map(Err),
        });
        response.await
    };
    match response {
        Ok(response) => Ok((link, response)),
        Err(Broken::Link(error)) if stale => {
            // It was closed before anything was sent.
            let unsent = error.is_canceled();
            Err((Trouble::Stale, !unsent))
        }
        Err(Broken::Deadline) => Err((Trouble::Broken(Broken::Deadline), false)),
        Err(broken) => Err((Trouble::Broken(broken), true)),
    }
}

/// Waits for the first bytes of a response's body; of an answer in one piece, for all of it, unless
/// it is large.
async fn first(mut reached: Reached, mut flow: Flow) -> Result<Reached, Failed> {
    let mut held = BytesMut::new();
    loop {
        match poll_fn(|context| flow.poll_data(context)).await {
            Some(Ok(piece)) => match &mut reached.kind {
                Kind::Plain if held.is_empty() && piece.len() > HOLD => held = piece.into(),
                Kind::Plain => held.extend_from_slice(&piece),
                Kind::Events => {
                    reached.first = piece;
                    break;
                }
                Kind::Tape(tape, _) => {
                    reached.first = tape.push(&piece);
                    tell(tape, &flow);
                    if tape.begun() {
                        break;
                    }
                }
            },
            Some(Err(Broken::Deadline)) => return Err(Trouble::Broken(Broken::Deadline).into()),
            Some(Err(broken)) => {
                flow.sent.failed();
                let trouble = Trouble::Broken(broken);
                return Err(Failed { trouble, sent: Some(flow.into_sent()) });
            }
            None => {
                if let Kind::Tape(tape, _) = &mut reached.kind {
                    held = tape.finish().into();
                }
                reached.first = held.freeze();
                flow.end();
                return Ok(reached);
            }
        }
        if held.len() > HOLD {
            reached.first = held.freeze();
            break;
        }
    }
    reached.flow = Some(flow);
    Ok(reached)
}

/// Has the backend's books take what its stream says of its load.
pub(crate) fn tell(tape: &mut Tape, flow: &Flow) {
    if let Some(report) = tape.take_report()
        && flow.worker().shared.uses_reports()
    {
        flow.sent.backend.report(report);
    }
}

fn kind(headers: &HeaderMap, resume: Option<&Resume>) -> Kind {
    let events = headers
        .get(CONTENT_TYPE)
        .is_some_and(|value| PIECES.iter().any(|kind| value.as_bytes().starts_with(kind)));
    match headers.get(STREAM_HEADER) {
        _ if !events => Kind::Plain,
        Some(name) => {
            let tape = resume.map_or_else(Tape::default, |resume| Tape::after(resume.ids.to_vec()));
            Kind::Tape(tape, name.clone())
        }
        None => Kind::Events,
    }
}

fn report(headers: &HeaderMap) -> Option<LoadReport> {
    LoadReport::decode(headers.get(LOAD_HEADER)?.to_str().ok()?).ok()
}

/// True if another backend may do better: this one is overloaded, drains, or is itself a proxy
/// whose server is gone.
fn is_retriable(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}
