//! The output of one request: converts its tokens to text, and decides when to send chunks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::ApiError;
use forebay_engine::{FinishReason, Output, PictureError, RequestError};

use super::Registration;
use crate::delta::{Delta, End};
use crate::engine::Engine;
use crate::mailbox::{self, Sent};
use crate::metrics::{AdapterUse, Timeline};
use crate::outlet::Chunk;
use crate::speller::{EarlyEnd, Speller};

/// The approximate number of bytes after which a chunk is sent, whatever the interval.
const MOST_GATHERED: usize = 64 << 10;

/// Buffers that are reused for every token.
#[derive(Default)]
pub(super) struct Scratch {
    fresh: String,
    chunk: Chunk,
}

/// When the next chunk of a stream is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// The chunk is sent now.
    Now,
    /// The chunk waits for more tokens.
    Later,
    /// The chunk is sent at this time.
    At(Instant),
}

/// A request whose output the thread processes.
pub(super) struct Stream {
    sender: mailbox::Sender,
    pub(super) engine: Arc<dyn Engine>,
    speller: Speller,
    eos: Arc<[i32]>,
    pub(super) timeline: Timeline,
    /// The output that has not been sent.
    delta: Delta,
    /// The number of tokens per chunk; `None` if the response is not streamed.
    interval: Option<u32>,
    /// The shortest interval between two chunks.
    window: Duration,
    /// When the last chunk was sent; `None` before the first.
    sent: Option<Instant>,
    /// True if an alarm for the next chunk is set already.
    pub(super) noted: bool,
    /// The paths of the request's images, for errors.
    images: Arc<[String]>,
    adapter: Option<AdapterUse>,
}

impl Stream {
    pub(super) fn new(registration: Registration, window: Duration) -> Self {
        Self {
            sender: registration.sender,
            engine: registration.engine,
            speller: registration.speller,
            eos: registration.eos,
            timeline: Timeline::new(registration.arrived, registration.prompt_tokens),
            delta: Delta::default(),
            interval: registration.interval,
            window,
            sent: None,
            noted: false,
            images: registration.images,
            adapter: registration.adapter.map(AdapterUse::new),
        }
    }

    /// Returns why the request ended; `None` while it has not ended.
    pub(super) fn end(&self) -> Option<&End> {
        self.delta.end.as_ref()
    }

    /// Returns when to send the tokens collected up to `now`. A first token and an end are sent at
    /// once.
    pub(super) fn due(&self, now: Instant) -> Due {
        if self.delta.end.is_some() {
            return Due::Now;
        }
        // The mailbox limits the unread output of all choices, but not the output collected here.
        if self.delta.weight() >= MOST_GATHERED {
            return Due::Now;
        }
        let (Some(interval), gathered) = (self.interval, self.delta.tokens.len()) else {
            return Due::Later;
        };
        match self.sent {
            _ if gathered == 0 => Due::Later,
            None => Due::Now,
            Some(_) if gathered < interval as usize => Due::Later,
            Some(sent) if now < sent + self.window => Due::At(sent + self.window),
            Some(_) => Due::Now,
        }
    }

    /// Sends the collected output.
    pub(super) fn send(&mut self, now: Instant, scratch: &mut Scratch) -> Sent {
        self.sent = Some(now);
        self.sender.send(&mut self.delta, &mut scratch.chunk)
    }

    /// Ends the stream with an error.
    pub(super) fn fail(self, error: ApiError) {
        self.sender.finish(End::Error(error));
    }

    /// Adds an output of the engine to the collected output.
    pub(super) fn apply(&mut self, output: Output, scratch: &mut Scratch) {
        if let Some(admission) = output.admission {
            self.delta.cached_tokens = Some(admission.cached_tokens);
            self.adapter.iter_mut().for_each(AdapterUse::runs);
        }
        if let Some(predicted) = output.predicted {
            self.delta.predicted += predicted;
        }
        if let Some(prompt) = &output.prompt {
            self.delta.prompt.push(prompt);
        }
        let mut found = None;
        if let Some(token) = output.token {
            let ends = matches!(output.finish, Some(FinishReason::Stop { .. }));
            let (fresh, parts) = (&mut scratch.fresh, &mut self.delta.parts);
            found = self.speller.push(token.id, ends, fresh, parts);
            self.delta.reasoning_tokens += u32::from(self.speller.reasons());
            self.delta.tokens.push(token.id);
            self.delta.logprobs.push(token.logprobs.as_deref().unwrap_or_default());
        }
        let end = match output.finish {
            _ if found.is_some() => None,
            None => None,
            Some(FinishReason::Stop { token }) if self.eos.contains(&token) => {
                Some(End::Eos(token))
            }
            Some(FinishReason::Stop { token }) => Some(End::Token(token)),
            Some(FinishReason::Length) => Some(End::Length),
            Some(FinishReason::Abort) => Some(End::Error(ApiError::Aborted)),
            Some(FinishReason::Error(error)) => {
                Some(End::Error(request_error(&error, &self.images)))
            }
        };
        if end.is_some() {
            let complete = matches!(end, Some(End::Eos(_) | End::Token(_)));
            found = self.speller.finish(complete, &mut scratch.fresh, &mut self.delta.parts);
        }
        self.delta.end = match found {
            Some(EarlyEnd::Stop(index)) => Some(End::Text(self.speller.stop(index))),
            Some(EarlyEnd::Call) => Some(End::Call),
            None => end,
        };
        self.delta.called = self.delta.end.is_some() && self.speller.has_called();
    }
}

/// Converts the failure of a request to the client's error. `images` are the paths of its images.
pub(crate) fn request_error(error: &RequestError, images: &[String]) -> ApiError {
    let reason = error.to_string();
    match error {
        RequestError::NotFinite => ApiError::Internal { reason, code: Some("not_finite") },
        RequestError::Poisoned => ApiError::Internal { reason, code: Some("poisoned") },
        RequestError::HandFailed(_) => ApiError::Unavailable { reason, code: "failed" },
        RequestError::Constraint(_) => ApiError::invalid("response_format", reason),
        RequestError::Image { index, error: PictureError::Unreadable(why) } => {
            let param = images.get(*index).map_or("messages", String::as_str);
            ApiError::invalid(param, format!("`{param}`: {why}"))
        }
        RequestError::Image { error: PictureError::Failed(_), .. } => {
            ApiError::Internal { reason, code: Some("image") }
        }
        RequestError::Adapter(_) => ApiError::Unavailable { reason, code: "adapter_unavailable" },
        RequestError::QueueTimeout { retry_after, .. } => {
            ApiError::QueueTimeout { reason, retry_after: *retry_after }
        }
    }
}
