//! The output of one request: its tokens become text, and its chunks are sent in time.

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

/// The approximate number of bytes that are collected for a chunk at most, whatever the interval.
const MOST_GATHERED: usize = 64 << 10;

/// Buffers that are used again from token to token.
#[derive(Default)]
pub(super) struct Scratch {
    fresh: String,
    chunk: Chunk,
}

/// The time of a stream's next chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// Now.
    Now,
    /// The chunk waits for more tokens.
    Later,
    /// The chunk is sent at this time.
    At(Instant),
}

/// A request on its way out.
pub(super) struct Stream {
    sender: mailbox::Sender,
    pub(super) engine: Arc<dyn Engine>,
    speller: Speller,
    eos: Arc<[i32]>,
    pub(super) timeline: Timeline,
    /// The part that has not been sent.
    delta: Delta,
    /// The number of tokens for a chunk; `None`: the answer comes in one piece.
    interval: Option<u32>,
    /// The least time between two chunks.
    window: Duration,
    /// The time of the last chunk.
    sent: Option<Instant>,
    /// True if a time for the next send is set already.
    pub(super) noted: bool,
    /// The paths of the request's images.
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

    /// The reason of its end.
    pub(super) fn end(&self) -> Option<&End> {
        self.delta.end.as_ref()
    }

    /// When to send the tokens that have come up to `now`: a first token and an end at once.
    pub(super) fn due(&self, now: Instant) -> Due {
        if self.delta.end.is_some() {
            return Due::Now;
        }
        // The mailbox counts the unread output of all choices, but not what is collected here.
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

    /// Sends the gathered parts.
    pub(super) fn send(&mut self, now: Instant, scratch: &mut Scratch) -> Sent {
        self.sent = Some(now);
        self.sender.send(&mut self.delta, &mut scratch.chunk)
    }

    /// Ends the stream with an error.
    pub(super) fn fail(self, error: ApiError) {
        self.sender.finish(End::Error(error));
    }

    /// Adds an output to the gathered parts.
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

/// The error for a client whose request failed. `images` are the paths of its images.
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
