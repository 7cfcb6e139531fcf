//! Getting a response out of some backend: choice, attempt, and again while nothing has been produced.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use forebay_api::ApiError;
use forebay_api::peer::{BLOCKS_HEADER, LOAD_HEADER, LoadReport, STREAM_HEADER, decode_blocks};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::{sleep, timeout};

use crate::ask::{Ask, Resume, keep_end_to_end};
use crate::backend::{Check, Sent};
use crate::flow::{Broken, Flow, Vigil};
use crate::link::{Link, LinkError};
use crate::shared::Worker;
use crate::tape::Tape;

/// Most of an answer in one piece that is held back until it is whole, so that it can be asked for again if it breaks.
const HOLD: usize = 1 << 20;

/// How a response's body is passed on.
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

/// No response, or one that is to be passed on although another backend might do better.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Nobody could be asked, or nobody answered.
    Api(ApiError),
    /// The last backend refused.
    Refused(Response<Bytes>),
}

/// Why an attempt has to be followed by another.
enum Trouble {
    Connect(LinkError),
    /// A connection that had been idle turned out to be closed.
    Stale,
    Broken(Broken),
    Refused(Response<Bytes>),
}

/// Asks backends until one answers. With `resume`, until one goes on with that stream; `failed` is the one that broke it.
pub(crate) async fn reach(
    worker: &Arc<Worker>,
    ask: &Ask,
    resume: Option<&Resume>,
    failed: Option<u32>,
) -> Result<Reached, Failure> {
    let shared = &worker.shared;
    let retry = shared.config.retry;
    let mut avoid: Vec<u32> = failed.into_iter().collect();
    let mut last = None;
    let (mut attempts, mut rounds) = (0, 0);
    loop {
        let Some(sent) = shared.dispatch(ask, &avoid, resume.is_some()) else {
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
        let trouble = match attempt(worker, ask, resume, sent).await {
            Ok(reached) => return Ok(reached),
            Err(Trouble::Stale) => continue,
            Err(trouble) => trouble,
        };
        let url = backend.url.url();
        last = Some(match trouble {
            Trouble::Refused(response) => Failure::Refused(response),
            Trouble::Broken(Broken::Deadline) => return Err(broken(&Broken::Deadline)),
            Trouble::Broken(reason) => {
                tracing::debug!(backend = url, %reason, "no response");
                broken(&reason)
            }
            Trouble::Connect(reason) => {
                tracing::debug!(backend = url, %reason, "no connection");
                if reason.is_refused() {
                    backend.checked(Check::Absent, &shared.config.health);
                }
                let reason = "the backend could not be reached".to_owned();
                Failure::Api(ApiError::Unavailable { reason, code: "backend_failed" })
            }
            Trouble::Stale => continue,
        });
        attempts += 1;
        if attempts > retry.retries {
            return Err(last.unwrap_or_else(no_backend));
        }
        shared.totals.retries.fetch_add(1, Ordering::Relaxed);
        avoid.push(backend.id);
    }
}

fn no_backend() -> Failure {
    let reason = "no backend takes requests now".to_owned();
    Failure::Api(ApiError::Unavailable { reason, code: "no_backend" })
}

fn broken(reason: &Broken) -> Failure {
    Failure::Api(unanswered(reason))
}

/// What a client is told whose response broke.
pub(crate) fn unanswered(reason: &Broken) -> ApiError {
    let code = match reason {
        Broken::Deadline => "timeout",
        Broken::Link(_) | Broken::Gone => "backend_failed",
    };
    ApiError::Unavailable { reason: reason.to_string(), code }
}

async fn attempt(
    worker: &Arc<Worker>,
    ask: &Ask,
    resume: Option<&Resume>,
    mut sent: Sent,
) -> Result<Reached, Trouble> {
    let shared = &worker.shared;
    let request = ask.request(shared.id, &sent, resume);
    let mut vigil = Vigil::new(&sent.backend, ask.deadline);
    let (link, response) = match answered(worker, &sent, request, &mut vigil).await {
        Ok(answered) => answered,
        Err(trouble) => {
            if !matches!(trouble, Trouble::Stale) {
                sent.failed();
            }
            return Err(trouble);
        }
    };
    let (mut head, body) = response.into_parts();
    let report = report(&head.headers).filter(|_| shared.uses_reports());
    let retriable = is_retriable(head.status);
    if retriable && head.status != StatusCode::TOO_MANY_REQUESTS {
        sent.failed();
    }
    sent.answered(report);
    if let Some(texts) = &ask.texts
        && let Some(blocks) = head.headers.get(BLOCKS_HEADER)
        && let Ok(blocks) = decode_blocks(blocks.to_str().unwrap_or_default())
    {
        shared.index.lock().learn(texts, &blocks);
    }
    let kind = kind(&head.headers, resume);
    let goes_on = head.status == StatusCode::OK && matches!(kind, Kind::Tape(..));
    keep_end_to_end(&mut head.headers);
    let flow = Flow::new(sent, link, body, vigil, Arc::clone(worker));
    let reached = first(Reached { head, kind, first: Bytes::new(), flow: Some(flow) }).await?;
    // A client that has half of a stream must not get something else after it.
    if retriable || resume.is_some() && !goes_on {
        return Err(Trouble::Refused(Response::from_parts(reached.head, reached.first)));
    }
    Ok(reached)
}

/// Sends a request and waits for a response's head.
async fn answered(
    worker: &Worker,
    sent: &Sent,
    request: Request<Full<Bytes>>,
    vigil: &mut Vigil,
) -> Result<(Link, Response<Incoming>), Trouble> {
    let backend = &sent.backend;
    let mut link = match worker.idle.take(backend.id) {
        Some(link) => link,
        None => match timeout(worker.shared.config.connect_timeout, Link::open(&backend.url)).await
        {
            Ok(link) => link.map_err(Trouble::Connect)?,
            Err(_) => {
                let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
                return Err(Trouble::Connect(LinkError::Connect(late)));
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
        Err(Broken::Link(_)) if stale => Err(Trouble::Stale),
        Err(broken) => Err(Trouble::Broken(broken)),
    }
}

/// Waits for the first bytes of a response's body; of an answer in one piece, for all of it, unless it is large.
async fn first(mut reached: Reached) -> Result<Reached, Trouble> {
    let Some(mut flow) = reached.flow.take() else { return Ok(reached) };
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
            Some(Err(broken)) => {
                if !matches!(broken, Broken::Deadline) {
                    flow.sent.failed();
                }
                return Err(Trouble::Broken(broken));
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
        .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
    match headers.get(STREAM_HEADER) {
        _ if !events => Kind::Plain,
        Some(name) => {
            let tape = resume.map_or_else(Tape::default, |resume| Tape::after(resume.ids.clone()));
            Kind::Tape(tape, name.clone())
        }
        None => Kind::Events,
    }
}

fn report(headers: &HeaderMap) -> Option<LoadReport> {
    LoadReport::decode(headers.get(LOAD_HEADER)?.to_str().ok()?).ok()
}

/// Whether another backend may do better: it is overloaded, drains, or is itself a proxy whose server is gone.
fn is_retriable(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}
