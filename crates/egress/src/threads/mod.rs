//! The egress threads: they convert the engine's outputs to text, and write it to the sockets of
//! streams.
//!
//! A request's id determines its thread. Each thread has one channel. A request is registered
//! before it is submitted, so the registration always precedes the outputs. A thread waits only for
//! its channel, since its writes to sockets do not block. Writes are nine tenths of the cost of a
//! token on an egress thread. So a thread that falls behind, with the next step already in its
//! channel, collects the tokens of several steps in one chunk. The engine does not wait for the
//! thread; streams get fewer, longer chunks. Even so, the channels have a limit,
//! `EgressConfig::capacity`.

mod stream;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use forebay_api::ApiError;
use forebay_engine::{Output, OutputSink, RequestId};
use forebay_http::Guard;
use rustc_hash::FxBuildHasher;
use serde::{Serialize, Serializer};

use crate::delta::End;
use crate::engine::Engine;
use crate::mailbox::{self, Sent};
use crate::metrics::{AdapterLoad, Metrics};
use crate::speller::Speller;
use stream::{Due, Scratch, Stream};

pub(crate) use stream::request_error;

/// How long a thread that falls behind collects tokens before it writes.
const GATHER: Duration = Duration::from_millis(5);

/// The settings of the egress threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct EgressConfig {
    /// The number of threads, at least one.
    pub egress_threads: usize,
    /// The number of steps and registrations that each thread's channel holds.
    #[serde(skip)]
    pub capacity: usize,
    /// The shortest interval between two chunks of a stream. Tokens that arrive sooner are merged.
    /// The first token and the end are sent at once.
    #[serde(rename = "stream_flush_us", serialize_with = "as_microseconds")]
    pub stream_flush: Duration,
}

impl Default for EgressConfig {
    /// The defaults of the flags, for a machine with few processors.
    fn default() -> Self {
        Self { egress_threads: 1, capacity: 1024, stream_flush: Duration::ZERO }
    }
}

fn as_microseconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

/// The data about a request that the egress thread needs.
pub struct Registration {
    /// The id of the request in the engine.
    pub id: RequestId,
    /// The sender of the request's mailbox.
    pub sender: mailbox::Sender,
    /// The engine, which aborts the request when a stop string ends it.
    pub engine: Arc<dyn Engine>,
    /// The speller. If another brain began the stream, the speller has already read the tokens so
    /// far.
    pub speller: Speller,
    /// The end-of-sequence ids, to distinguish them from the client's stop tokens.
    pub eos: Arc<[i32]>,
    /// The number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// When the client's request arrived.
    pub arrived: Instant,
    /// The number of tokens per chunk; `None` if the response is not streamed.
    pub interval: Option<u32>,
    /// The paths of the request's images, for errors.
    pub images: Arc<[String]>,
    /// The adapter whose metrics count the request; `None` if the request has no adapter.
    pub adapter: Option<Arc<AdapterLoad>>,
}

enum Message {
    Register(Box<Registration>),
    Outputs(Vec<Output>),
    Forget(RequestId),
    AbortAll,
    EngineGone,
}

/// The sending end, for engines. Each engine gets a clone when it is started. When the last sink is
/// dropped, the remaining requests fail.
#[derive(Debug, Clone)]
pub struct EgressSink {
    lanes: Lanes,
    _last: Arc<Last>,
}

/// Signals the threads when the last clone of the sink is dropped.
#[derive(Debug)]
struct Last(Lanes);

impl OutputSink for EgressSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        // A closed channel means that the thread has ended. By then no stream waits for output.
        if let [lane] = &self.lanes.0[..] {
            let _ = lane.send(Message::Outputs(outputs));
            return;
        }
        let mut parts = vec![Vec::new(); self.lanes.0.len()];
        for output in outputs {
            parts[self.lanes.index(output.id)].push(output);
        }
        for (lane, part) in self.lanes.0.iter().zip(parts) {
            if !part.is_empty() {
                let _ = lane.send(Message::Outputs(part));
            }
        }
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        self.0.send_all(|| Message::EngineGone);
    }
}

/// The receiving end, for the server. The threads end when all clones and sinks are dropped.
#[derive(Debug, Clone)]
pub struct Egress {
    lanes: Lanes,
}

impl Egress {
    /// Registers a request. The caller must do this before it submits the request.
    ///
    /// # Errors
    /// The egress thread has ended.
    pub fn register(&self, registration: Registration) -> Result<(), ApiError> {
        let lane = self.lanes.of(registration.id);
        lane.send(Message::Register(Box::new(registration))).map_err(|_| ApiError::Internal {
            reason: "the egress thread has ended".into(),
            code: Some("egress_gone"),
        })
    }

    /// Unregisters a request that could not be submitted.
    pub fn forget(&self, id: RequestId) {
        let _ = self.lanes.of(id).send(Message::Forget(id));
    }

    /// Aborts every request. Each stream ends at once.
    pub fn abort_all(&self) {
        self.lanes.send_all(|| Message::AbortAll);
    }
}

/// The channels of the threads, one per thread.
#[derive(Debug, Clone)]
struct Lanes(Arc<[Sender<Message>]>);

impl Lanes {
    fn index(&self, id: RequestId) -> usize {
        // Ids are assigned in sequence, so this spreads requests evenly.
        (id.0 % self.0.len() as u64) as usize
    }

    fn of(&self, id: RequestId) -> &Sender<Message> {
        &self.0[self.index(id)]
    }

    fn send_all(&self, message: impl Fn() -> Message) {
        for lane in self.0.iter() {
            let _ = lane.send(message());
        }
    }
}

/// Starts the egress threads, under `guard`.
///
/// # Errors
/// The system cannot start another thread.
pub fn egress(
    metrics: &Arc<Metrics>,
    config: EgressConfig,
    guard: &Guard,
) -> io::Result<(EgressSink, Egress)> {
    let start = |_| {
        let (lane, receiver) = crossbeam_channel::bounded(config.capacity.max(1));
        let mut owner = Owner {
            metrics: Arc::clone(metrics),
            window: config.stream_flush,
            streams: HashMap::default(),
            alarms: BinaryHeap::new(),
            gathered: Vec::new(),
            engine_gone: false,
        };
        guard.spawn("egress", move || owner.run(&receiver))?;
        Ok(lane)
    };
    let lanes = Lanes((0..config.egress_threads.max(1)).map(start).collect::<io::Result<_>>()?);
    let last = Arc::new(Last(lanes.clone()));
    Ok((EgressSink { lanes: lanes.clone(), _last: last }, Egress { lanes }))
}

type Streams = HashMap<RequestId, Stream, FxBuildHasher>;

/// The state of an egress thread.
struct Owner {
    metrics: Arc<Metrics>,
    window: Duration,
    streams: Streams,
    /// The streams whose output the flush interval holds back, with the time at which to send it.
    alarms: BinaryHeap<Reverse<(Instant, RequestId)>>,
    /// The streams whose output is held back until the channel is empty.
    gathered: Vec<RequestId>,
    engine_gone: bool,
}

impl Owner {
    fn run(&mut self, lane: &Receiver<Message>) {
        let mut scratch = Scratch::default();
        let mut gathering = None;
        loop {
            let message = match self.alarms.peek() {
                None => lane.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(&Reverse((next, _))) => lane.recv_deadline(next),
            };
            let now = Instant::now();
            match message {
                Ok(message) => {
                    let since = *gathering.get_or_insert(now);
                    let behind = !lane.is_empty() && now < since + GATHER;
                    self.take(message, now, behind, &mut scratch);
                    if !behind {
                        gathering = None;
                        self.send_gathered(now, &mut scratch);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.ring(now, &mut scratch);
        }
    }

    fn take(&mut self, message: Message, now: Instant, behind: bool, scratch: &mut Scratch) {
        match message {
            Message::Register(registration) => self.register(*registration),
            Message::Outputs(mut outputs) => {
                // Outputs with first tokens are the most urgent, and writing the chunks of a large
                // step takes time.
                if outputs.iter().any(|output| output.admission.is_some()) {
                    outputs.sort_by_key(|output| output.admission.is_none());
                }
                for output in outputs {
                    self.apply(output, now, behind, scratch);
                }
            }
            Message::Forget(id) => drop(self.streams.remove(&id)),
            Message::AbortAll => {
                for (id, stream) in self.streams.drain() {
                    stream.engine.abort(id);
                    self.metrics.finished(&stream.timeline, "abort", now);
                    stream.fail(ApiError::Aborted);
                }
            }
            Message::EngineGone => {
                self.engine_gone = true;
                for (_, stream) in self.streams.drain() {
                    self.metrics.finished(&stream.timeline, "error", now);
                    stream.fail(engine_gone());
                }
            }
        }
    }

    fn send_gathered(&mut self, now: Instant, scratch: &mut Scratch) {
        for id in self.gathered.drain(..) {
            // The output of the last step may have flushed the output that was collected before.
            if let Some(stream) = self.streams.get_mut(&id)
                && stream.due(now) == Due::Now
                && stream.send(now, scratch) == Sent::Ended
            {
                give_up(&mut self.streams, &self.metrics, id, now);
            }
        }
    }

    /// Sends the output whose flush interval has passed.
    fn ring(&mut self, now: Instant, scratch: &mut Scratch) {
        while let Some(&Reverse((next, id))) = self.alarms.peek()
            && next <= now
        {
            self.alarms.pop();
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.noted = false;
                if stream.due(now) == Due::Now && stream.send(now, scratch) == Sent::Ended {
                    give_up(&mut self.streams, &self.metrics, id, now);
                }
            }
        }
    }

    fn register(&mut self, registration: Registration) {
        if self.engine_gone {
            return registration.sender.finish(End::Error(engine_gone()));
        }
        let id = registration.id;
        self.streams.insert(id, Stream::new(registration, self.window));
    }

    fn apply(&mut self, output: Output, now: Instant, behind: bool, scratch: &mut Scratch) {
        let id = output.id;
        // After a stop string ended a request, outputs still arrive until the engine has handled
        // the abort.
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let alive = output.finish.is_none();
        if let Some(admission) = output.admission {
            stream.timeline.admitted(admission.queue_us, admission.cached_tokens);
        }
        if output.token.is_some() {
            self.metrics.token(&mut stream.timeline, now);
        }
        stream.apply(output, scratch);
        if let Some(end) = stream.end() {
            self.metrics.finished(&stream.timeline, reason_label(end), now);
            if alive {
                stream.engine.abort(id);
            }
            // The mailbox accepts an end, however much output is unread.
            let _ = stream.send(now, scratch);
            self.streams.remove(&id);
            return;
        }
        match stream.due(now) {
            Due::Now if behind => self.gathered.push(id),
            Due::Now => {
                if stream.send(now, scratch) == Sent::Ended {
                    give_up(&mut self.streams, &self.metrics, id, now);
                }
            }
            Due::Later => {}
            Due::At(time) if !stream.noted => {
                stream.noted = true;
                self.alarms.push(Reverse((time, id)));
            }
            Due::At(_) => {}
        }
    }
}

/// Aborts a request whose output is no longer read.
fn give_up(streams: &mut Streams, metrics: &Metrics, id: RequestId, now: Instant) {
    if let Some(stream) = streams.remove(&id) {
        stream.engine.abort(id);
        metrics.finished(&stream.timeline, "abort", now);
    }
}

fn engine_gone() -> ApiError {
    ApiError::Unavailable { reason: "the engine has ended".into(), code: "failed" }
}

fn reason_label(end: &End) -> &'static str {
    match end {
        End::Eos(_) | End::Token(_) | End::Text(_) | End::Call => "stop",
        End::Length => "length",
        End::Error(ApiError::Aborted) => "abort",
        End::Error(_) => "error",
    }
}
