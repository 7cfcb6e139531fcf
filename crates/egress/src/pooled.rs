//! Delivers the outputs of pooling models (embeddings and scores) from the engine to the waiting
//! calls, on a separate thread.
//!
//! The thread has one channel. A call is registered before its inputs are submitted, so the
//! registration always precedes the outputs.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use forebay_api::ApiError;
use forebay_engine::{FinishReason, Output, OutputSink, RequestId};
use forebay_http::Guard;
use tokio::sync::oneshot;

use crate::metrics::{Metrics, Timeline};
use crate::threads::request_error;

/// The result of a call: the raw vector of each input, in order.
pub type PooledAnswer = Result<Vec<Box<[f32]>>, ApiError>;

/// The registration of a call that waits for its vectors.
pub struct PooledRegistration {
    /// The request ids of the inputs, at least one. The first is also the id of the call.
    pub ids: Vec<RequestId>,
    /// The number of tokens of each input.
    pub prompt_tokens: Vec<u32>,
    /// When the client's request arrived.
    pub arrived: Instant,
    /// The channel for the result.
    pub reply: oneshot::Sender<PooledAnswer>,
}

enum Message {
    Expect(PooledRegistration),
    Outputs(Vec<Output>),
    Forget(Vec<RequestId>),
    AbortAll,
    EngineGone,
    #[cfg(test)]
    Panic,
}

/// The sending end, for engines. Each engine gets a clone when it is started. When the last sink is
/// dropped, the remaining requests fail.
#[derive(Debug, Clone)]
pub struct PooledSink {
    lane: Sender<Message>,
    _last: Arc<Last>,
}

/// Signals the thread when the last clone of the sink is dropped.
#[derive(Debug)]
struct Last(Sender<Message>);

impl OutputSink for PooledSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        // A closed channel means that the thread has ended. By then every call has its result.
        let _ = self.lane.send(Message::Outputs(outputs));
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        let _ = self.0.send(Message::EngineGone);
    }
}

/// The receiving end, for the server. The thread ends when all clones of this value and all sinks
/// are dropped.
#[derive(Debug, Clone)]
pub struct Pooled {
    lane: Sender<Message>,
}

impl Pooled {
    /// Registers a call. The caller must do this before it submits the inputs.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn expect(&self, expected: PooledRegistration) -> Result<(), ApiError> {
        self.lane.send(Message::Expect(expected)).map_err(|_| engine_gone())
    }

    /// Unregisters a call that could not be submitted, and all of its inputs.
    pub fn forget(&self, ids: Vec<RequestId>) {
        let _ = self.lane.send(Message::Forget(ids));
    }

    /// Ends every call with an error. The callers abort their inputs.
    pub fn abort_all(&self) {
        let _ = self.lane.send(Message::AbortAll);
    }
}

/// Starts the thread, under `guard`. Its channel holds `capacity` steps and calls.
///
/// # Errors
/// The system cannot start another thread.
pub fn pooled(
    metrics: Arc<Metrics>,
    capacity: usize,
    guard: &Guard,
) -> io::Result<(PooledSink, Pooled)> {
    let (lane, receiver) = crossbeam_channel::bounded(capacity.max(1));
    let mut owner =
        Owner { metrics, inputs: HashMap::new(), calls: HashMap::new(), engine_gone: false };
    guard.spawn("pooled", move || owner.run(&receiver))?;
    let last = Arc::new(Last(lane.clone()));
    Ok((PooledSink { lane: lane.clone(), _last: last }, Pooled { lane }))
}

fn engine_gone() -> ApiError {
    ApiError::Unavailable { reason: "the engine has ended".into(), code: "failed" }
}

struct Input {
    call: RequestId,
    at: usize,
    timeline: Timeline,
}

struct Call {
    vectors: Vec<Box<[f32]>>,
    missing: usize,
    reply: oneshot::Sender<PooledAnswer>,
}

/// The state of the thread.
struct Owner {
    metrics: Arc<Metrics>,
    /// The inputs that have not ended.
    inputs: HashMap<RequestId, Input>,
    /// The calls that have no result yet.
    calls: HashMap<RequestId, Call>,
    engine_gone: bool,
}

impl Owner {
    fn run(&mut self, lane: &Receiver<Message>) {
        for message in lane {
            match message {
                Message::Expect(expected) => self.expect(expected),
                Message::Outputs(outputs) => {
                    let now = Instant::now();
                    for output in outputs {
                        self.apply(output, now);
                    }
                }
                Message::Forget(ids) => {
                    for id in ids {
                        self.inputs.remove(&id);
                        self.calls.remove(&id);
                    }
                }
                Message::AbortAll => self.answer_all(&ApiError::Aborted),
                #[cfg(test)]
                Message::Panic => panic!("as the test wants"),
                Message::EngineGone => {
                    self.engine_gone = true;
                    self.answer_all(&engine_gone());
                    for (_, input) in self.inputs.drain() {
                        self.metrics.finished(&input.timeline, "error", Instant::now());
                    }
                }
            }
        }
    }

    fn expect(&mut self, expected: PooledRegistration) {
        let PooledRegistration { ids, prompt_tokens, arrived, reply } = expected;
        let Some(&call) = ids.first() else { return };
        if self.engine_gone {
            // The send fails if the caller has stopped waiting; the same below.
            let _ = reply.send(Err(engine_gone()));
            return;
        }
        let missing = ids.len();
        let vectors = vec![Box::default(); missing];
        self.calls.insert(call, Call { vectors, missing, reply });
        for (at, (id, tokens)) in ids.into_iter().zip(prompt_tokens).enumerate() {
            self.inputs.insert(id, Input { call, at, timeline: Timeline::new(arrived, tokens) });
        }
    }

    fn apply(&mut self, output: Output, now: Instant) {
        let Some(input) = self.inputs.get_mut(&output.id) else { return };
        if let Some(admission) = output.admission {
            input.timeline.admitted(admission.queue_us, admission.cached_tokens);
        }
        let (call, at) = (input.call, input.at);
        if let (Some(vector), Some(call)) = (output.pooled, self.calls.get_mut(&call)) {
            call.vectors[at] = vector;
        }
        let Some(finish) = output.finish else { return };
        let (label, error) = match finish {
            FinishReason::Stop { .. } | FinishReason::Length => ("stop", None),
            FinishReason::Abort => ("abort", Some(ApiError::Aborted)),
            FinishReason::Error(error) => ("error", Some(request_error(&error, &[]))),
        };
        self.metrics.finished(&input.timeline, label, now);
        self.inputs.remove(&output.id);
        let Some(waiting) = self.calls.get_mut(&call) else { return };
        waiting.missing -= 1;
        if waiting.missing > 0 && error.is_none() {
            return;
        }
        // The call returns the first error. The caller then aborts the other inputs.
        if let Some(Call { vectors, reply, .. }) = self.calls.remove(&call) {
            let _ = reply.send(error.map_or(Ok(vectors), Err));
        }
    }

    fn answer_all(&mut self, error: &ApiError) {
        for (_, call) in self.calls.drain() {
            let _ = call.reply.send(Err(error.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_panics_ends_its_calls_and_the_server_knows() {
        let guard = Guard::default();
        let metrics = Arc::new(Metrics::new("tiny", 100, 1).unwrap());
        let (mut sink, pooled) = pooled(metrics, 4, &guard).unwrap();
        let (reply, answer) = oneshot::channel();
        let (ids, arrived) = (vec![RequestId(1)], Instant::now());
        let expected = PooledRegistration { ids, prompt_tokens: vec![1], arrived, reply };
        pooled.expect(expected).unwrap();
        pooled.lane.send(Message::Panic).unwrap();
        assert!(answer.await.is_err(), "the waiting side gets an error");
        let cause = guard.cause().expect("the cause is known");
        assert!(cause.starts_with("the thread pooled panicked"), "{cause}");
        // After the thread has ended, its full channel does not block the engines.
        for _ in 0..10 {
            sink.deliver(Vec::new());
        }
    }
}
