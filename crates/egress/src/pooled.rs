//! Brings vectors from the engine's outputs to the waiting requests, on a thread of its own as for
//! text.
//!
//! The thread has one channel. A call is announced before its inputs are submitted, so the
//! announcement always precedes their outputs.

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

/// A call's answer: the raw vectors of its inputs, in order.
pub type PooledAnswer = Result<Vec<Box<[f32]>>, ApiError>;

/// A call that waits for vectors.
pub struct PooledRegistration {
    /// The ids of the inputs, at least one. The first is also the id of the call.
    pub ids: Vec<RequestId>,
    /// The number of tokens of each input.
    pub prompt_tokens: Vec<u32>,
    /// The time at which the client's request came.
    pub arrived: Instant,
    /// The receiver of the answer.
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

/// The sending end, for engines. Each engine gets a clone when it is started. After the last sink
/// is dropped, remaining requests never end.
#[derive(Debug, Clone)]
pub struct PooledSink {
    lane: Sender<Message>,
    _last: Arc<Last>,
}

/// Dropped with the last clone of the sink.
#[derive(Debug)]
struct Last(Sender<Message>);

impl OutputSink for PooledSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        // A closed channel means that the thread has ended; every call has its answer by then.
        let _ = self.lane.send(Message::Outputs(outputs));
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        let _ = self.0.send(Message::EngineGone);
    }
}

/// The receiving end, for the server. The thread ends when all clones and the sink are dropped.
#[derive(Debug, Clone)]
pub struct Pooled {
    lane: Sender<Message>,
}

impl Pooled {
    /// Announces a call; to be called before its inputs are submitted.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn expect(&self, expected: PooledRegistration) -> Result<(), ApiError> {
        self.lane.send(Message::Expect(expected)).map_err(|_| engine_gone())
    }

    /// Unregisters a call that could not be submitted, with all of its inputs.
    pub fn forget(&self, ids: Vec<RequestId>) {
        let _ = self.lane.send(Message::Forget(ids));
    }

    /// Ends every call. Its waiter aborts its inputs.
    pub fn abort_all(&self) {
        let _ = self.lane.send(Message::AbortAll);
    }
}

/// Starts the thread, under `guard`, with room for `capacity` steps and calls.
///
/// # Errors
/// The system has no room for a thread.
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
    /// Inputs that have not ended.
    inputs: HashMap<RequestId, Input>,
    /// Calls that have not been answered.
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
            // A caller that has stopped waiting needs no answer; the same below.
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
        // The first error is the answer to the call; the caller aborts the other inputs.
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
        // A full channel does not delay the engines.
        for _ in 0..10 {
            sink.deliver(Vec::new());
        }
    }
}
