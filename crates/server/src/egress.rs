//! The egress thread: from the engine's outputs to text in mailboxes.
//!
//! One lane leads into it, so that a request's registration, sent before the request is submitted, is always ahead of its outputs.
//! The lane is bounded: an engine that is faster than detokenisation waits here. The thread itself waits for nothing
//! but the lane, so a place in it is never more than one step's work away, for HTTP threads too.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use forebay_api::ApiError;
use forebay_engine::{FinishReason, Output, OutputSink, RequestError, RequestId, SampledToken};
use forebay_text::{Detokenizer, StopStrings, Tokenizer};

use crate::engine::Engine;
use crate::mailbox::{self, Candidate, Delta, End, TokenLogprobs};
use crate::metrics::{Metrics, Timeline};

/// Log-probabilities below this are written as this: JSON has no minus infinity.
const SMALLEST_LOGPROB: f32 = -9999.0;

/// What the egress thread has to know of a request.
pub(crate) struct Registration {
    pub(crate) id: RequestId,
    pub(crate) sender: mailbox::Sender,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) skip_special_tokens: bool,
    /// Stop strings do not count up to here.
    pub(crate) min_tokens: u32,
    /// To tell end-of-sequence from the client's own stop tokens.
    pub(crate) eos: Arc<[i32]>,
    pub(crate) prompt_tokens: u32,
    pub(crate) arrived: Instant,
}

enum Message {
    Register(Box<Registration>),
    Outputs(Vec<Output>),
    Forget(RequestId),
    AbortAll,
    EngineGone,
}

/// The engine's side of the egress thread: give it to the engine when it is started.
#[derive(Debug)]
pub struct EgressSink {
    lane: Sender<Message>,
}

impl OutputSink for EgressSink {
    fn deliver(&mut self, outputs: Vec<Output>) {
        // A closed lane means that the thread has ended; every stream has got its end by then.
        let _ = self.lane.send(Message::Outputs(outputs));
    }
}

impl Drop for EgressSink {
    fn drop(&mut self) {
        let _ = self.lane.send(Message::EngineGone);
    }
}

/// The server's side of the egress thread. The thread ends when every clone and the sink are gone.
#[derive(Debug, Clone)]
pub struct Egress {
    lane: Sender<Message>,
}

impl Egress {
    /// Announces a request; to be called before it is submitted.
    pub(crate) fn register(&self, registration: Registration) -> Result<(), ApiError> {
        self.lane.send(Message::Register(Box::new(registration))).map_err(|_| ApiError::Internal {
            reason: "the egress thread has ended".into(),
            code: Some("egress_gone"),
        })
    }

    /// Takes back the registration of a request that could not be submitted.
    pub(crate) fn forget(&self, id: RequestId) {
        let _ = self.lane.send(Message::Forget(id));
    }

    /// Aborts every request; each gets its end at once.
    pub(crate) fn abort_all(&self) {
        let _ = self.lane.send(Message::AbortAll);
    }
}

/// Starts the egress thread with room for `capacity` steps and registrations.
///
/// # Errors
/// The system has no room for a thread.
pub fn egress(
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    capacity: usize,
) -> io::Result<(EgressSink, Egress)> {
    let (lane, receiver) = crossbeam_channel::bounded(capacity.max(1));
    let owner = Owner { tokenizer, metrics, streams: HashMap::new(), engine_gone: false };
    std::thread::Builder::new().name("egress".into()).spawn(move || owner.run(&receiver))?;
    Ok((EgressSink { lane: lane.clone() }, Egress { lane }))
}

/// The state of the egress thread.
struct Owner {
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    streams: HashMap<RequestId, Stream>,
    engine_gone: bool,
}

impl Owner {
    fn run(mut self, lane: &Receiver<Message>) {
        let mut scratch = Scratch::default();
        for message in lane {
            match message {
                Message::Register(registration) => self.register(*registration),
                Message::Outputs(outputs) => {
                    let now = Instant::now();
                    for output in outputs {
                        self.apply(output, now, &mut scratch);
                    }
                }
                Message::Forget(id) => drop(self.streams.remove(&id)),
                Message::AbortAll => {
                    for (id, stream) in self.streams.drain() {
                        stream.engine.abort(id);
                        self.metrics.finished(&stream.timeline, "abort", Instant::now());
                        stream.sender.fail(ApiError::Aborted);
                    }
                }
                Message::EngineGone => {
                    self.engine_gone = true;
                    for (_, stream) in self.streams.drain() {
                        self.metrics.finished(&stream.timeline, "error", Instant::now());
                        stream.sender.fail(engine_gone());
                    }
                }
            }
        }
    }

    fn register(&mut self, registration: Registration) {
        if self.engine_gone {
            return registration.sender.fail(engine_gone());
        }
        let id = registration.id;
        self.streams.insert(id, Stream::new(registration, &self.tokenizer));
    }

    fn apply(&mut self, output: Output, now: Instant, scratch: &mut Scratch) {
        let id = output.id;
        // Outputs of a request that a stop string ended keep coming until the engine has seen the abort.
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let alive = output.finish.is_none();
        if let Some(admission) = output.admission {
            stream.timeline.admitted(admission.queue_us);
            stream.delta.cached_tokens = Some(admission.cached_tokens);
        }
        if output.token.is_some() {
            self.metrics.token(&mut stream.timeline, now);
        }
        stream.apply(output, &self.tokenizer, scratch);
        if let Some(end) = &stream.delta.end {
            self.metrics.finished(&stream.timeline, reason_label(end), now);
            if alive {
                stream.engine.abort(id);
            }
        }
        let ended = stream.delta.end.is_some();
        stream.sender.send(&mut stream.delta);
        if ended {
            self.streams.remove(&id);
        }
    }
}

fn engine_gone() -> ApiError {
    ApiError::Unavailable { reason: "the engine has ended".into(), code: "failed" }
}

fn reason_label(end: &End) -> &'static str {
    match end {
        End::Eos(_) | End::Token(_) | End::Text(_) => "stop",
        End::Length => "length",
        End::Error(ApiError::Aborted) => "abort",
        End::Error(_) => "error",
    }
}

/// Buffers that are used again from token to token.
#[derive(Default)]
struct Scratch {
    fresh: String,
}

/// A request on its way out.
struct Stream {
    sender: mailbox::Sender,
    engine: Arc<dyn Engine>,
    detokenizer: Detokenizer,
    stops: StopStrings,
    stop: Vec<String>,
    include_stop: bool,
    min_tokens: u32,
    eos: Arc<[i32]>,
    timeline: Timeline,
    /// Empty between outputs.
    delta: Delta,
}

impl Stream {
    fn new(registration: Registration, tokenizer: &Arc<Tokenizer>) -> Self {
        let Registration { stop, include_stop, skip_special_tokens, .. } = registration;
        Self {
            sender: registration.sender,
            engine: registration.engine,
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), skip_special_tokens),
            stops: StopStrings::new(&stop, include_stop),
            stop,
            include_stop,
            min_tokens: registration.min_tokens,
            eos: registration.eos,
            timeline: Timeline::new(registration.arrived, registration.prompt_tokens),
            delta: Delta::default(),
        }
    }

    /// Adds what an output brings to the delta.
    fn apply(&mut self, output: Output, tokenizer: &Tokenizer, scratch: &mut Scratch) {
        scratch.fresh.clear();
        let mut matched = None;
        if let Some(token) = output.token {
            let stopped = matches!(output.finish, Some(FinishReason::Stop { .. }));
            if !stopped || self.include_stop {
                self.detokenizer.push(token.id, &mut scratch.fresh);
            }
            self.delta.tokens.push(token.id);
            self.logprobs(token, tokenizer);
            matched = self.text(&scratch.fresh);
        }
        let end = match output.finish {
            _ if matched.is_some() => None,
            None => None,
            Some(FinishReason::Stop { token }) if self.eos.contains(&token) => {
                Some(End::Eos(token))
            }
            Some(FinishReason::Stop { token }) => Some(End::Token(token)),
            Some(FinishReason::Length) => Some(End::Length),
            Some(FinishReason::Abort) => Some(End::Error(ApiError::Aborted)),
            Some(FinishReason::Error(error)) => Some(End::Error(request_error(&error))),
        };
        if end.is_some() {
            scratch.fresh.clear();
            self.detokenizer.finish(&mut scratch.fresh);
            matched = self.text(&scratch.fresh);
            if matched.is_none() {
                self.stops.finish(&mut self.delta.text);
            }
        }
        self.delta.end = matched.map(|index| End::Text(self.stop[index].clone())).or(end);
    }

    /// Adds new text, less what may become a stop string; `Some(index)` if one was found.
    fn text(&mut self, fresh: &str) -> Option<usize> {
        if self.timeline.generated <= self.min_tokens {
            self.delta.text.push_str(fresh);
            return None;
        }
        self.stops.push(fresh, &mut self.delta.text)
    }

    fn logprobs(&mut self, token: SampledToken, tokenizer: &Tokenizer) {
        let Some(entries) = token.logprobs else { return };
        let mut candidates = entries.iter().map(|&(id, logprob)| Candidate {
            id,
            text: tokenizer.token_text(id),
            bytes: tokenizer.token_bytes(id),
            logprob: logprob.max(SMALLEST_LOGPROB),
        });
        if let Some(sampled) = candidates.next() {
            let top = candidates.collect();
            self.delta.logprobs.push(TokenLogprobs { sampled, top });
        }
    }
}

/// What a client is told whose request failed.
pub(crate) fn request_error(error: &RequestError) -> ApiError {
    let reason = error.to_string();
    match error {
        RequestError::NotFinite => ApiError::Internal { reason, code: Some("not_finite") },
        RequestError::Poisoned => ApiError::Internal { reason, code: Some("poisoned") },
        RequestError::HandFailed(_) => ApiError::Unavailable { reason, code: "failed" },
    }
}
