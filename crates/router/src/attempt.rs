//! One attempt at a request: one backend gets the request, and answers or fails.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use bytes::{Bytes, BytesMut};
use forebay_api::peer::{
    BLOCKS_HEADER, DEATHS_HEADER, LOAD_HEADER, LoadReport, MAX_SAMPLED_BLOCKS, PREFILL_HEADER,
    RESPONSE_HEADER, STREAM_HEADER, decode_blocks,
};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::ask::{Ask, Resume, keep_end_to_end};
use crate::backend::{Backend, Sent};
use crate::budget::Held;
use crate::flow::{Broken, Flow, Vigil};
use crate::leg::Leg;
use crate::link::{Link, LinkError};
use crate::payload::Payload;
use crate::shared::Worker;
use crate::tape::{FREE, Tape};

/// The largest number of bytes of a non-streamed answer that are held back. As long as an answer is
/// held back, a failed request can be retried.
const HOLD: usize = 1 << 20;

/// The largest error response that is kept while other backends are tried, in bytes.
const MAX_REFUSAL: usize = 64 << 10;
/// The longest name of a stream that another brain may continue, in bytes.
const MAX_NAME: usize = 2 << 10;

/// Media types of streamed responses.
const PIECES: [&[u8]; 2] = [b"text/event-stream", b"application/x-ndjson"];

/// How a response's body is forwarded.
pub(crate) enum Kind {
    /// Unchanged bytes.
    Plain,
    /// Events of a stream that no other backend can continue.
    Events,
    /// Events of a stream that another brain can continue; with the name of the stream.
    Tape(Box<Tape>, HeaderValue),
}

/// A response whose head and first bytes have arrived.
pub(crate) struct Reached {
    pub(crate) head: http::response::Parts,
    pub(crate) kind: Kind,
    /// The first bytes of the body.
    pub(crate) first: Bytes,
    /// The rest of the body; `None`: `first` is the whole body.
    pub(crate) flow: Option<Flow>,
    /// The value of a Forebay decode server's header about its request to the prefill server.
    pub(crate) fetched: Option<HeaderValue>,
}

/// The reason why an attempt failed.
#[derive(Debug)]
pub(crate) enum Trouble {
    Connect(LinkError),
    /// A reused connection had already been closed.
    Stale,
    Broken(Broken),
    /// The request is moved to this other backend, which will start it sooner.
    Moved(u32),
    Refused(Response<Bytes>),
    /// The backend does not have the response that the request names.
    Unkept(Response<Bytes>),
    /// The backend is a router, which has given the request up because backends of that router
    /// died.
    GivenUp(Response<Bytes>),
    /// The prefill server rejects the request itself, with this response.
    Answered(Response<Bytes>),
}

impl Trouble {
    /// True if the backend has failed, unless the request itself is the cause.
    pub(crate) fn is_failure(&self) -> bool {
        match self {
            Self::Broken(broken) => !matches!(broken, Broken::Deadline),
            Self::Refused(response) => is_failure(response.status()),
            Self::Connect(_) | Self::Stale | Self::Moved(_) => false,
            Self::Unkept(_) | Self::GivenUp(_) | Self::Answered(_) => false,
        }
    }
}

/// A failed attempt. The backend may have refused the request, with a response in `trouble`.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) trouble: Trouble,
    /// The prefill server, if that server failed rather than the decode server.
    pub(crate) leg: Option<Arc<Backend>>,
    /// The dispatch, if the request may have killed the backend. It is kept open, so that no other
    /// suspect is tried at this backend before the cause is known.
    pub(crate) sent: Option<Sent>,
}

impl From<Trouble> for Failed {
    fn from(trouble: Trouble) -> Self {
        Self { trouble, leg: None, sent: None }
    }
}

/// Creates the failure of an attempt without a response. `was_sent`: true if the request may have
/// killed the backend.
pub(crate) fn unanswered(trouble: Trouble, sent: Sent, was_sent: bool) -> Failed {
    if trouble.is_failure() || matches!(trouble, Trouble::Connect(_)) {
        sent.failed();
    }
    Failed { sent: was_sent.then_some(sent), ..trouble.into() }
}

/// The data that the router adds to a request that a pair computes.
#[derive(Default)]
pub(crate) struct Beside {
    /// A body that replaces the client's.
    pub(crate) body: Option<Payload>,
    /// The request to the prefill server.
    pub(crate) leg: Option<Leg>,
    /// The URL of the prefill server from which a Forebay decode server is to borrow.
    pub(crate) prefill: Option<HeaderValue>,
}

/// Makes one attempt. With `fresh`, it opens a new connection.
pub(crate) async fn attempt(
    worker: &Arc<Worker>,
    ask: &Arc<Ask>,
    resume: Option<&Resume>,
    (sent, fresh): (Sent, bool),
    beside: Beside,
) -> Result<Reached, Failed> {
    let shared = &worker.shared;
    let mut request = ask.request(shared.names(), &sent, resume, beside.body);
    if let Some(prefill) = beside.prefill {
        request.headers_mut().insert(HeaderName::from_static(PREFILL_HEADER), prefill);
    }
    let moves = shared.moves() && resume.is_none() && sent.backend.is_forebay();
    let place = (moves && ask.may_move()).then(|| sent.backend.movable.enter(sent.seq, ask));
    let mut vigil = Vigil::new(&sent, ask.deadline, place, beside.leg);
    let (link, response) = match answered(worker, &sent, request, &mut vigil, fresh).await {
        Ok(answered) => answered,
        Err((trouble, was_sent)) => {
            let failed = vigil.failed_leg();
            return Err(failed.unwrap_or_else(|| unanswered(trouble, sent, was_sent)));
        }
    };
    let (mut head, body) = response.into_parts();
    let report = report(&head.headers).filter(|_| shared.uses_reports());
    // Routers in front of this one need this header too, so it is put back below.
    let given_up = head.headers.remove(DEATHS_HEADER);
    let fetched = head.headers.remove(PREFILL_HEADER);
    // In a pair, one server's error may be caused by the other server.
    let by_others = ask.pair.is_some() && !sent.backend.is_forebay();
    let paired = by_others && head.status.is_server_error();
    let retriable = is_failure(head.status) || is_refusal(head.status) || paired;
    if !head.status.is_success() {
        vigil.end_leg();
    }
    if is_failure(head.status) && given_up.is_none() {
        sent.failed();
    } else if is_refusal(head.status) {
        sent.refused();
    }
    sent.answered(report);
    if let Some(texts) = &ask.texts
        && let Some(blocks) = head.headers.get(BLOCKS_HEADER)
        && let Ok(blocks) = decode_blocks(blocks.to_str().unwrap_or_default())
        && blocks.len() <= MAX_SAMPLED_BLOCKS
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
    let kind = kind(&head, resume, &sent.backend);
    let goes_on = head.status == StatusCode::OK && matches!(kind, Kind::Tape(..));
    keep_end_to_end(&mut head.headers);
    if let Some(deaths) = &given_up {
        head.headers.insert(DEATHS_HEADER, deaths.clone());
    }
    let flow = Flow::new(sent, link, body, vigil, Arc::clone(worker));
    let kept = retriable || unkept.is_some();
    let reached = Reached { head, kind, first: Bytes::new(), flow: None, fetched };
    let reached = first(reached, flow, kept).await?;
    if unkept.is_some() && resume.is_none() {
        let response = Response::from_parts(reached.head, reached.first);
        return Err(Trouble::Unkept(response).into());
    }
    // A client that has received part of a stream must not get an error response after it.
    if retriable || resume.is_some() && !goes_on {
        let response = Response::from_parts(reached.head, reached.first);
        return Err(match given_up {
            Some(_) => Trouble::GivenUp(response).into(),
            None => Trouble::Refused(response).into(),
        });
    }
    Ok(reached)
}

/// Sends a request and waits for the head of the response. The flag of an error is true if the
/// backend may have received the request.
pub(crate) async fn answered(
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
            // hyper reports the request as cancelled if the connection was closed before anything
            // was sent.
            let unsent = error.is_canceled();
            Err((Trouble::Stale, !unsent))
        }
        Err(Broken::Deadline) => Err((Trouble::Broken(Broken::Deadline), false)),
        Err(Broken::Moved(to)) => Err((Trouble::Moved(to), false)),
        Err(broken) => Err((Trouble::Broken(broken), true)),
    }
}

/// Waits for the first bytes of a response's body. A response that is not streamed is read
/// completely, unless it is large. `kept`: true if the response has to be read completely, so that
/// a large one is an error.
async fn first(mut reached: Reached, mut flow: Flow, kept: bool) -> Result<Reached, Failed> {
    let mut held = BytesMut::new();
    let mut share = Held::new(&flow.sent.backend.memory);
    let refusal = is_refusal(reached.head.status) || is_failure(reached.head.status);
    loop {
        let broken = match poll_fn(|context| flow.poll_data(context)).await {
            Some(Ok(piece)) => match &mut reached.kind {
                Kind::Plain if kept && held.len() + piece.len() > MAX_REFUSAL => Broken::Excess,
                Kind::Plain if held.is_empty() && piece.len() > HOLD => {
                    held = piece.into();
                    break;
                }
                Kind::Plain => {
                    held.extend_from_slice(&piece);
                    if held.len() > HOLD || !share.hold(held.len().saturating_sub(FREE)) {
                        break;
                    }
                    continue;
                }
                Kind::Events => {
                    held = piece.into();
                    break;
                }
                Kind::Tape(tape, _) => {
                    held = tape.push(&piece).into();
                    tell(tape, &flow);
                    match (tape.begun(), tape.is_full()) {
                        (true, _) => break,
                        (false, true) => Broken::Excess,
                        (false, false) => continue,
                    }
                }
            },
            Some(Err(Broken::Deadline)) => return Err(Trouble::Broken(Broken::Deadline).into()),
            Some(Err(Broken::Moved(to))) => return Err(Trouble::Moved(to).into()),
            Some(Err(broken)) => match flow.failed_leg() {
                Some(failed) => return Err(failed),
                None => broken,
            },
            None => {
                if let Kind::Tape(tape, _) = &mut reached.kind {
                    held = tape.finish().into();
                }
                reached.first = held.freeze();
                if !refusal {
                    flow.sent.completed();
                }
                flow.end();
                return Ok(reached);
            }
        };
        flow.sent.failed();
        return Err(Failed { sent: Some(flow.into_sent()), ..Trouble::Broken(broken).into() });
    }
    reached.first = held.freeze();
    if !refusal {
        flow.sent.produced();
    }
    reached.flow = Some(flow);
    Ok(reached)
}

/// Updates the backend's ledger with the newest load report that `tape` has read from the stream.
pub(crate) fn tell(tape: &mut Tape, flow: &Flow) {
    if let Some(report) = tape.take_report()
        && flow.worker().shared.uses_reports()
    {
        flow.sent.backend.report(report);
    }
}

fn kind(head: &http::response::Parts, resume: Option<&Resume>, backend: &Backend) -> Kind {
    let pieces = |value: &HeaderValue| {
        head.status.is_success() && PIECES.iter().any(|kind| value.as_bytes().starts_with(kind))
    };
    if !head.headers.get(CONTENT_TYPE).is_some_and(pieces) {
        return Kind::Plain;
    }
    let memory = &backend.memory;
    let short = |name: &&HeaderValue| name.len() <= MAX_NAME;
    let name = head.headers.get(STREAM_HEADER).filter(short);
    // Copies the name alone, because the header value shares the buffer of the whole head.
    match name.and_then(|name| HeaderValue::from_bytes(name.as_bytes()).ok()) {
        Some(name) => {
            let tape = match resume {
                None => Tape::new(memory),
                Some(Resume { ids, share, .. }) => {
                    Tape::after(ids.to_vec(), Some(Arc::clone(share)), memory)
                }
            };
            Kind::Tape(Box::new(tape), name)
        }
        None => Kind::Events,
    }
}

fn report(headers: &HeaderMap) -> Option<LoadReport> {
    LoadReport::decode(headers.get(LOAD_HEADER)?.to_str().ok()?).ok()
}

/// True if the status means that this backend takes no more requests for now. Another backend may
/// take them.
pub(crate) fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
}

/// True if the status means that the backend is a proxy, and that its own server has failed.
fn is_failure(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT)
}
