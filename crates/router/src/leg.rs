//! Requests to both servers of a pair.
//!
//! The client gets the answer of the decode server; the request to the prefill server is a *leg*.
//! With SGLang both are sent at once, and a failed leg ends the other request: without this, a
//! decode server would wait for minutes for the KV cache. With vLLM the leg comes first, and its
//! answer is used once. Forebay's servers need no leg: the decode server contacts the prefill
//! server, and reports the outcome.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use forebay_api::peer::{PREFILL_CAME, PREFILL_FAILED};
use http::{HeaderValue, Response};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::ask::{Ask, Resume, keep_end_to_end};
use crate::attempt::{Beside, Failed, Reached, Trouble, answered, attempt, is_refusal, unanswered};
use crate::backend::Sent;
use crate::breaker::FailureOrigin;
use crate::budget::Held;
use crate::flow::{Broken, Flow, Vigil};
use crate::pairs::{BOOTSTRAP_PORT, PairEngine};
use crate::payload::Payload;
use crate::shared::Worker;
use crate::splice::{Room, decode_with, handed_on, prefill_alone};
use crate::tape::FREE;

/// The largest answer of a prefill server, in bytes.
const MAX_ANSWER: usize = 8 << 20;
/// The time that a leg may still take after the decode server's answer is complete.
const GRACE: Duration = Duration::from_millis(250);

/// A request to a prefill server, beside the request to the decode server. Dropping it closes the
/// connection, which aborts the request.
#[derive(Debug)]
pub(crate) struct Leg(Option<JoinHandle<Result<(), Failed>>>);

impl Leg {
    fn start(worker: &Arc<Worker>, ask: &Arc<Ask>, sent: Sent, body: Payload, fresh: bool) -> Self {
        let (worker, ask) = (Arc::clone(worker), Arc::clone(ask));
        let leg = async move { compute(&worker, &ask, sent, body, fresh).await.map(drop) };
        Self(Some(tokio::spawn(leg)))
    }

    /// Ready with the leg's failure. Never ready if the leg succeeds.
    pub(crate) fn poll_failed(&mut self, context: &mut Context<'_>) -> Poll<Failed> {
        let Some(task) = &mut self.0 else { return Poll::Pending };
        let Poll::Ready(ended) = std::pin::Pin::new(task).poll(context) else {
            return Poll::Pending;
        };
        self.0 = None;
        match ended {
            Ok(Ok(())) => Poll::Pending,
            Ok(Err(failed)) => Poll::Ready(failed),
            // The task panicked.
            Err(_) => Poll::Ready(Trouble::Broken(Broken::Prefill).into()),
        }
    }

    /// Gives the leg some time to finish, because the decode server's answer is complete.
    pub(crate) fn linger(mut self) {
        if let Some(mut task) = self.0.take() {
            tokio::spawn(async move {
                if timeout(GRACE, &mut task).await.is_err() {
                    task.abort();
                }
            });
        }
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// Makes one attempt at a request with a pair of servers.
pub(crate) async fn attempt_pair(
    worker: &Arc<Worker>,
    ask: &Arc<Ask>,
    resume: Option<&Resume>,
    (prefill, decode): (Sent, Sent),
    fresh: bool,
) -> Result<Reached, Failed> {
    worker.shared.totals.pairs.fetch_add(1, Ordering::Relaxed);
    let backend = Arc::clone(&prefill.backend);
    let peer = backend.peer();
    let port = peer.map_or(BOOTSTRAP_PORT, |peer| peer.bootstrap_port);
    let beside = match peer.map(|peer| peer.engine) {
        Some(PairEngine::Vllm) => {
            let answer = compute(worker, ask, prefill, prefill_alone(ask.body()), fresh).await?;
            let lies = |reason| {
                backend.counters.failed.fetch_add(1, Ordering::Relaxed);
                let leg = Some(Arc::clone(&backend));
                Failed { leg, ..Trouble::Broken(Broken::Params(reason)).into() }
            };
            let params = handed_on(&answer).map_err(lies)?;
            match params {
                Some(params) if !worker.shared.used.take(params) => {
                    let reason = "the prefill server has handed the same kv_transfer_params on \
                                  for another request";
                    return Err(lies(reason));
                }
                Some(_) => {}
                None => {
                    worker.shared.totals.unfetched.fetch_add(1, Ordering::Relaxed);
                }
            }
            Beside { body: Some(decode_with(ask.body(), params)), ..Beside::default() }
        }
        Some(PairEngine::Forebay) => {
            let told = HeaderValue::from_str(&backend.url.url()).ok();
            let beside = Beside { prefill: told, ..Beside::default() };
            let reached = attempt(worker, ask, resume, (decode, fresh), beside).await;
            if let Ok(Reached { fetched: Some(fetched), .. }) = &reached {
                settle(prefill, fetched, ask);
            }
            return reached;
        }
        Some(PairEngine::SgLang) | None => {
            let room = Room::new(backend.url.host(), port);
            let leg = Leg::start(worker, ask, prefill, room.prefill(ask.body()), fresh);
            Beside { body: Some(room.decode(ask.body())), leg: Some(leg), prefill: None }
        }
    };
    attempt(worker, ask, None, (decode, fresh), beside).await
}

/// Records a prefill server's success or failure, which the decode server reports. The breaker
/// opens if the prefill server has failed requests of several clients.
fn settle(mut prefill: Sent, fetched: &HeaderValue, ask: &Ask) {
    if fetched == PREFILL_CAME {
        prefill.completed();
    } else if fetched == PREFILL_FAILED {
        prefill.failed();
        prefill.backend.charge(FailureOrigin::Client(ask.client.0));
    }
}

/// Makes a prefill server compute a prompt. Returns its answer.
async fn compute(
    worker: &Arc<Worker>,
    ask: &Ask,
    sent: Sent,
    body: Payload,
    fresh: bool,
) -> Result<Bytes, Failed> {
    let backend = Arc::clone(&sent.backend);
    let answer = whole(worker, ask, sent, body, fresh).await;
    answer.map_err(|failed| Failed { leg: Some(backend), ..failed })
}

/// Sends a request and returns the complete answer.
async fn whole(
    worker: &Arc<Worker>,
    ask: &Ask,
    sent: Sent,
    body: Payload,
    fresh: bool,
) -> Result<Bytes, Failed> {
    let request = ask.request(worker.shared.names(), &sent, None, Some(body));
    let mut vigil = Vigil::new(&sent, ask.deadline, None, None);
    let (link, response) = match answered(worker, &sent, request, &mut vigil, fresh).await {
        Ok(answered) => answered,
        Err((trouble, was_sent)) => return Err(unanswered(trouble, sent, was_sent)),
    };
    let (mut head, body) = response.into_parts();
    sent.answered(None);
    let mut share = Held::new(&sent.backend.memory);
    let mut flow = Flow::new(sent, link, body, vigil, Arc::clone(worker));
    let mut held = BytesMut::new();
    loop {
        let broken = match poll_fn(|context| flow.poll_data(context)).await {
            None => break,
            Some(Ok(piece)) => {
                held.extend_from_slice(&piece);
                let fits = held.len() <= MAX_ANSWER;
                if fits && share.hold(held.len().saturating_sub(FREE)) {
                    continue;
                }
                Broken::Excess
            }
            Some(Err(Broken::Deadline)) => return Err(Trouble::Broken(Broken::Deadline).into()),
            Some(Err(broken)) => broken,
        };
        flow.sent.failed();
        return Err(Failed { sent: Some(flow.into_sent()), ..Trouble::Broken(broken).into() });
    }
    let (status, answer) = (head.status, held.freeze());
    if status.is_success() {
        flow.sent.completed();
        flow.end();
        return Ok(answer);
    }
    if is_refusal(status) {
        flow.sent.refused();
    } else if status.is_server_error() {
        flow.sent.failed();
    }
    keep_end_to_end(&mut head.headers);
    let response = Response::from_parts(head, answer);
    flow.end();
    // The response does not show which server of the pair is at fault.
    Err(match is_refusal(status) || status.is_server_error() {
        true => Trouble::Refused(response).into(),
        false => Trouble::Answered(response).into(),
    })
}
