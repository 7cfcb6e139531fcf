//! Server-sent events: a call's deltas as the frames of a response body.
//!
//! A frame contains everything that was pending when the connection became writable. Most chunks
//! take another path: see `mailbox`.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use bytes::Bytes;
use forebay_api::ApiError;
use forebay_api::peer::{RESUME_HEADER, StreamName};
use forebay_egress::{
    Delta, End, EventEncoder, Outlet,
    events::{DONE, event},
};
use hyper::body::Frame;

use crate::call::Call;
use crate::peers::Peer;
use crate::reply::Failure;
use crate::state::Shared;
use crate::wire::Wire;

/// The body of a streamed response. Dropping it drops the call, which aborts its engine requests.
struct EventBody {
    /// `None` once the stream has ended.
    call: Option<Call>,
    batch: Vec<(u32, Delta)>,
}

impl EventBody {
    /// Encodes the batch of deltas. `more` is false after the last delta. Returns true if the
    /// stream continues.
    fn encode(&mut self, call: &Call, more: bool, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let failed = |error: serde_json::Error| ApiError::Internal {
            reason: format!("a chunk could not be written as JSON: {error}"),
            code: None,
        };
        let encoded = call.encode(|encoder, tally| {
            for (choice, mut delta) in self.batch.drain(..) {
                match delta.end.take() {
                    Some(End::Error(error)) => return Err(error),
                    end => delta.end = end,
                }
                encoder.delta(choice, &mut delta, tally, out).map_err(failed)?;
            }
            if !more {
                encoder.end(tally, out).map_err(failed)?;
                if encoder.is_said_done() {
                    out.extend_from_slice(DONE);
                }
            }
            Ok(more)
        });
        encoded.unwrap_or(Err(ApiError::Aborted))
    }
}

impl HttpBody for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let mut out = Vec::new();
        // Repeats, because a delta may produce no bytes, such as a token whose text is held back.
        while out.is_empty() {
            let Some(mut call) = this.call.take() else { return Poll::Ready(None) };
            let Poll::Ready(more) = call.poll(context, &mut this.batch) else {
                this.call = Some(call);
                return Poll::Pending;
            };
            match this.encode(&call, more, &mut out) {
                Ok(true) => this.call = Some(call),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(%error, "stream failed");
                    // An error that cannot be encoded is left out: the connection closes anyway.
                    let told = call.encode(|encoder, _| encoder.fail(&error, &mut out));
                    if told.is_none() && event(&error.body(), &mut out).is_ok() {
                        out.extend_from_slice(DONE);
                    }
                }
            }
        }
        Poll::Ready(Some(Ok(Frame::data(out.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.call.is_none()
    }
}

/// Creates a streamed response with the name `name`, to a request from `peer` on connection `wire`.
///
/// # Errors
/// The request continues another brain's stream, which this API does not support.
pub(crate) fn stream(
    state: &Shared,
    mut call: Call,
    encoder: impl EventEncoder,
    wire: Wire,
    (peer, name): (&Peer, &StreamName),
) -> Result<Response, Failure> {
    let mut encoder: Box<dyn EventEncoder> = Box::new(encoder);
    if let Some(before) = call.take_before() {
        if !encoder.resumable() {
            let reason = format!("`{RESUME_HEADER}`: streams of this route can't be resumed");
            return Err(Failure(ApiError::invalid(RESUME_HEADER, reason)));
        }
        encoder.resume(&before);
    }
    let media_type = encoder.media_type();
    call.lend(Outlet { encoder: peer.tagged(state, name, encoder), line: wire.0 });
    let body = EventBody { call: Some(call), batch: Vec::new() };
    let mut response = Response::new(Body::new(body));
    for (name, value) in [
        (CONTENT_TYPE, media_type),
        (CACHE_CONTROL, "no-cache"),
        // This header makes reverse proxies send events without buffering.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}
