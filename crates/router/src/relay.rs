//! Forwards a response to the client, and survives failures of backends.
//!
//! A brain may send a name for its stream. If such a stream breaks off, another brain continues it.
//! Any other broken stream ends with an error event. A response that is not streamed ends with a
//! closed connection, because its announced length can't be met.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;
use forebay_api::ApiError;
use forebay_http::ClientId;
use hyper::body::{Body, Frame, SizeHint};

use crate::ask::{Ask, Resume};
use crate::attempt::{Kind, Reached, tell};
use crate::backend::Sent;
use crate::breaker::FailureOrigin;
use crate::flow::{Broken, Flow};
use crate::reach::{Failure, reach, unanswered};
use crate::shared::{Live, Worker};

/// The error that closes the client's connection, because the response can't be completed.
#[derive(Debug, thiserror::Error)]
#[error("the response broke: {0}")]
pub(crate) struct Cut(Broken);

type Recovery = Pin<Box<dyn Future<Output = Result<Reached, Failure>> + Send>>;

/// The last event of a stream in OpenAI's APIs.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// The result of a poll.
type Polled = Poll<Option<Result<Frame<Bytes>, Cut>>>;

enum State {
    /// A backend's bytes are being forwarded.
    Flowing(Box<Flow>),
    /// The router is looking for another backend to continue the stream.
    Recovering(Recovery),
    /// The whole body was forwarded.
    Over,
}

/// The body of a response to a client.
pub(crate) struct Relay {
    worker: Arc<Worker>,
    /// The request, kept with its body only if another backend may have to continue.
    ask: Option<Arc<Ask>>,
    client: ClientId,
    kind: Kind,
    /// The bytes to forward first.
    first: Bytes,
    state: State,
    /// The last bytes sent, at most as many as [`DONE`] has.
    tail: Vec<u8>,
    /// Ready when the router aborts all running requests.
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    _live: Live,
}

impl Relay {
    /// Creates a relay of the response to a client's request.
    pub(crate) fn new(
        worker: Arc<Worker>,
        ask: Arc<Ask>,
        kind: Kind,
        first: Bytes,
        flow: Option<Flow>,
        live: Live,
    ) -> Self {
        let state = flow.map_or(State::Over, |flow| State::Flowing(Box::new(flow)));
        let client = ask.client;
        let ask = Some(ask).filter(|_| matches!(kind, Kind::Tape(..)));
        let mut cut = worker.shared.cut.subscribe();
        let cut = Box::pin(async move {
            // Waiting can't fail, because the sender lives as long as the worker thread.
            let _ = cut.wait_for(|&cut| cut).await;
        });
        let tail = Vec::new();
        Self { worker, ask, client, kind, first, state, tail, cut, _live: live }
    }

    fn give(&mut self, bytes: Bytes) -> Polled {
        if !matches!(self.kind, Kind::Plain) {
            self.tail.extend_from_slice(&bytes[bytes.len().saturating_sub(DONE.len())..]);
            self.tail.drain(..self.tail.len().saturating_sub(DONE.len()));
        }
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    /// Ends the stream with an error event that the client can read.
    fn fail(&mut self, error: &ApiError) -> Polled {
        self.worker.shared.totals.errors.fetch_add(1, Ordering::Relaxed);
        self.state = State::Over;
        tracing::warn!(%error, "stream failed");
        // If an event was sent only in part, end it first.
        let between = self.tail.is_empty() || self.tail.ends_with(b"\n\n");
        let gap = if between { "" } else { "\n\n" };
        let body = serde_json::to_string(&error.body()).unwrap_or_default();
        let end = format!("{gap}data: {body}\n\ndata: [DONE]\n\n");
        Poll::Ready(Some(Ok(Frame::data(end.into()))))
    }

    /// Handles a backend's failure in the middle of a response: another brain continues, or the
    /// client gets an error. `None`: the caller continues polling.
    fn broke(&mut self, reason: Broken) -> Option<Polled> {
        let State::Flowing(mut flow) = std::mem::replace(&mut self.state, State::Over) else {
            return None;
        };
        let is_failure = !matches!(reason, Broken::Deadline | Broken::Prefill);
        if let Some(prefill) = flow.failed_leg().and_then(|failed| failed.leg) {
            prefill.charge(FailureOrigin::Client(self.client.0));
        }
        if is_failure {
            flow.sent.failed();
        }
        tracing::debug!(backend = flow.sent.backend.url.url(), %reason, "a response broke");
        if self.tail == DONE {
            // Only the end of the body was missing.
            return Some(Poll::Ready(None));
        }
        let kind = std::mem::replace(&mut self.kind, Kind::Events);
        let plain = matches!(kind, Kind::Plain);
        if let (Kind::Tape(tape, name), Some(ask)) = (kind, self.ask.clone())
            && is_failure
            && let Some((ids, share)) = tape.into_ids()
        {
            let resume = Resume { name, ids: ids.into(), share };
            self.recover(flow.into_sent(), ask, resume);
            return None;
        }
        if is_failure {
            // No other backend is tried, so the failure is charged at once.
            flow.sent.backend.charge(FailureOrigin::Client(self.client.0));
        }
        if plain {
            self.worker.shared.totals.errors.fetch_add(1, Ordering::Relaxed);
            return Some(Poll::Ready(Some(Err(Cut(reason)))));
        }
        Some(self.fail(&unanswered(&reason)))
    }

    fn recover(&mut self, broke: Sent, ask: Arc<Ask>, resume: Resume) {
        self.worker.shared.totals.failovers.fetch_add(1, Ordering::Relaxed);
        let worker = Arc::clone(&self.worker);
        self.state = State::Recovering(Box::pin(async move {
            let reached = reach(&worker, &ask, Some(&resume), Some(broke)).await?;
            if let Some(flow) = &reached.flow {
                flow.sent.backend.counters.taken_over.fetch_add(1, Ordering::Relaxed);
            }
            Ok(reached)
        }));
    }

    /// True if the backend has sent more bytes than may be held back.
    fn is_full(&self) -> bool {
        matches!(&self.kind, Kind::Tape(tape, _) if tape.is_full())
    }

    /// Processes bytes of a backend. Returns the bytes for the client.
    fn pass(&mut self, bytes: Bytes) -> Bytes {
        match (&mut self.kind, &self.state) {
            (Kind::Tape(tape, _), State::Flowing(flow)) => {
                let bytes = tape.push(&bytes);
                tell(tape, flow);
                bytes
            }
            _ => bytes,
        }
    }

    /// Returns the bytes that were held back until the end.
    fn rest(&mut self) -> Bytes {
        match &mut self.kind {
            Kind::Tape(tape, _) => tape.finish(),
            Kind::Plain | Kind::Events => Bytes::new(),
        }
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Polled {
        let this = self.get_mut();
        if !this.first.is_empty() {
            let first = std::mem::take(&mut this.first);
            return this.give(first);
        }
        loop {
            let full = this.is_full();
            match &mut this.state {
                State::Over => return Poll::Ready(None),
                State::Flowing(_) if full => {
                    if let Some(answer) = this.broke(Broken::Excess) {
                        return answer;
                    }
                }
                State::Flowing(flow) => match flow.poll_data(context) {
                    Poll::Ready(Some(Ok(bytes))) => {
                        let bytes = this.pass(bytes);
                        if !bytes.is_empty() {
                            return this.give(bytes);
                        }
                    }
                    Poll::Ready(Some(Err(reason))) => {
                        if let Some(answer) = this.broke(reason) {
                            return answer;
                        }
                    }
                    Poll::Ready(None) => {
                        if let State::Flowing(mut flow) =
                            std::mem::replace(&mut this.state, State::Over)
                        {
                            flow.sent.completed();
                            flow.end();
                        }
                        let rest = this.rest();
                        if !rest.is_empty() {
                            return this.give(rest);
                        }
                    }
                    Poll::Pending => break,
                },
                State::Recovering(recovery) => match recovery.as_mut().poll(context) {
                    Poll::Ready(Ok(Reached { kind, first, flow, .. })) => {
                        this.kind = kind;
                        this.state =
                            flow.map_or(State::Over, |flow| State::Flowing(Box::new(flow)));
                        if !first.is_empty() {
                            return this.give(first);
                        }
                    }
                    Poll::Ready(Err(Failure::Api(error))) => return this.fail(&error),
                    Poll::Ready(Err(Failure::Refused(response))) => {
                        let status = response.status().as_u16();
                        let reason = format!(
                            "no other backend continues the stream: the last answered {status}"
                        );
                        let error = ApiError::Unavailable { reason, code: "backend_failed" };
                        return this.fail(&error);
                    }
                    Poll::Pending => break,
                },
            }
        }
        // Polled last, because it rarely becomes ready.
        if this.cut.as_mut().poll(context).is_ready() {
            return match this.kind {
                Kind::Plain => {
                    this.state = State::Over;
                    Poll::Ready(Some(Err(Cut(Broken::Gone))))
                }
                Kind::Events | Kind::Tape(..) => this.fail(&ApiError::Aborted),
            };
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_empty() && matches!(self.state, State::Over)
    }

    fn size_hint(&self) -> SizeHint {
        match self.state {
            State::Over => SizeHint::with_exact(self.first.len() as u64),
            State::Flowing(_) | State::Recovering(_) => SizeHint::default(),
        }
    }
}
