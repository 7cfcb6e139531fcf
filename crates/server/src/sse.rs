//! Server-sent events: a call's deltas as the frames of a response body.
//!
//! A frame carries everything that was pending when the connection could take more. A stream ends with `data: [DONE]`, also
//! after an error, which is an event `data: {"error": ...}` of its own.

use std::convert::Infallible;
use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use bytes::Bytes;
use forebay_api::{ApiError, Streaming, Usage};
use hyper::body::Frame;
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

use crate::call::{Call, Tally};
use crate::mailbox::{Delta, End};

const DONE: &[u8] = b"data: [DONE]\n\n";

/// Writes the events of one dialect. A delta never has an error for an end.
pub(crate) trait Encoder: Send + Unpin + 'static {
    /// Appends the events of a delta.
    fn delta(
        &mut self,
        choice: u32,
        delta: Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()>;
    /// Appends what comes after the last delta.
    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()>;
}

/// JSON without the characters that are line ends to Unicode but not to server-sent events: clients that cut streams with
/// Python's `splitlines`, as httpx does, would cut an event at them.
struct OneLine;

impl Formatter for OneLine {
    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut written = 0;
        for (at, found) in fragment.match_indices(['\u{85}', '\u{2028}', '\u{2029}']) {
            writer.write_all(&fragment.as_bytes()[written..at])?;
            let code = found.chars().next().map_or(0, u32::from);
            write!(writer, "\\u{code:04x}")?;
            written = at + found.len();
        }
        writer.write_all(&fragment.as_bytes()[written..])
    }
}

fn write_json<T: Serialize>(value: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    value.serialize(&mut Serializer::with_formatter(out, OneLine))
}

/// Appends an event.
pub(crate) fn event<T: Serialize>(value: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    out.extend_from_slice(b"data: ");
    write_json(value, out)?;
    out.extend_from_slice(b"\n\n");
    Ok(())
}

/// Events of OpenAI's dialects: all that is the same in every chunk is written once.
pub(crate) struct Chunks {
    head: Vec<u8>,
    streaming: Streaming,
}

impl Chunks {
    /// Chunks of the response `id`.
    pub(crate) fn new(
        id: &str,
        object: &str,
        created: u64,
        model: &str,
        streaming: Streaming,
    ) -> serde_json::Result<Self> {
        #[derive(Serialize)]
        struct Head<'a> {
            id: &'a str,
            object: &'a str,
            created: u64,
            model: &'a str,
            choices: [(); 0],
        }
        let mut head = b"data: ".to_vec();
        serde_json::to_writer(&mut head, &Head { id, object, created, model, choices: [] })?;
        head.truncate(head.len() - b"]}".len());
        Ok(Self { head, streaming })
    }

    /// Appends a chunk with one choice.
    pub(crate) fn choice<T: Serialize>(
        &self,
        choice: &T,
        usage: impl FnOnce() -> Usage,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        out.extend_from_slice(&self.head);
        write_json(choice, out)?;
        let usage = self.streaming.continuous_usage.then(usage);
        self.tail(usage, out)
    }

    /// Appends the chunk that has only the usage, if it was asked for.
    pub(crate) fn usage(&self, usage: Usage, out: &mut Vec<u8>) -> serde_json::Result<()> {
        if !self.streaming.include_usage {
            return Ok(());
        }
        out.extend_from_slice(&self.head);
        self.tail(Some(usage), out)
    }

    fn tail(&self, usage: Option<Usage>, out: &mut Vec<u8>) -> serde_json::Result<()> {
        out.push(b']');
        if self.streaming.include_usage {
            out.extend_from_slice(b",\"usage\":");
            serde_json::to_writer(&mut *out, &usage)?;
        }
        out.extend_from_slice(b"}\n\n");
        Ok(())
    }
}

/// The body of a streamed response. Dropping it drops the call, which aborts what has not ended.
struct EventBody<E> {
    /// `None` once the stream has ended.
    call: Option<Call>,
    encoder: E,
    batch: Vec<(u32, Delta)>,
}

impl<E: Encoder> EventBody<E> {
    /// Encodes the batch; true if the stream goes on.
    fn encode(&mut self, call: &Call, more: bool, out: &mut Vec<u8>) -> Result<bool, ApiError> {
        let failed = |error: serde_json::Error| ApiError::Internal {
            reason: format!("a chunk could not be written as JSON: {error}"),
            code: None,
        };
        for (choice, delta) in self.batch.drain(..) {
            if let Some(End::Error(error)) = delta.end {
                return Err(error);
            }
            self.encoder.delta(choice, delta, call.tally(), out).map_err(failed)?;
        }
        if !more {
            self.encoder.end(call.tally(), out).map_err(failed)?;
            out.extend_from_slice(DONE);
        }
        Ok(more)
    }
}

impl<E: Encoder> HttpBody for EventBody<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let mut out = Vec::new();
        // A delta may leave nothing to write, such as a token whose text is held back.
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
                    if event(&error.body(), &mut out).is_ok() {
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

/// A streamed response.
pub(crate) fn stream<E: Encoder>(call: Call, encoder: E) -> Response {
    let body = EventBody { call: Some(call), encoder, batch: Vec::new() };
    let mut response = Response::new(Body::new(body));
    for (name, value) in [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache"),
        // Asks reverse proxies not to hold events back.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(include_usage: bool, continuous_usage: bool) -> String {
        let streaming = Streaming { include_usage, continuous_usage };
        let chunks = Chunks::new("i\"d", "chunk", 7, "m", streaming).unwrap();
        let mut out = Vec::new();
        chunks.choice(&1, || Usage::new(1, 2, 0), &mut out).unwrap();
        chunks.usage(Usage::new(1, 3, 0), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn an_event_is_one_line_by_any_definition() {
        let text = "a\u{85}b\u{2028}\u{2029}c\n\u{1c}\u{b}é\u{1f600}";
        let mut out = Vec::new();
        event(&text, &mut out).unwrap();
        let line = String::from_utf8(out).unwrap();
        let body = line.strip_prefix("data: ").and_then(|l| l.strip_suffix("\n\n")).unwrap();
        assert!(
            !body.contains(['\u{85}', '\u{2028}', '\u{2029}']) && !body.contains(char::is_control)
        );
        assert_eq!(serde_json::from_str::<String>(body).unwrap(), text);
    }

    #[test]
    fn chunks_are_json_in_events() {
        let head = r#"data: {"id":"i\"d","object":"chunk","created":7,"model":"m","choices":["#;
        let usage = |total: u32, new: u32| {
            format!(
                r#""usage":{{"prompt_tokens":1,"total_tokens":{total},"completion_tokens":{new},"prompt_tokens_details":{{"cached_tokens":0}}}}"#
            )
        };
        assert_eq!(chunks(false, false), format!("{head}1]}}\n\n"));
        let last = format!("{head}],{}}}\n\n", usage(4, 3));
        assert_eq!(chunks(true, false), format!("{head}1],\"usage\":null}}\n\n{last}"));
        assert_eq!(chunks(true, true), format!("{head}1],{}}}\n\n{last}", usage(3, 2)));
    }
}
