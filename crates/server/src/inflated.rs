//! A compressed body as a stream of inflated frames.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use bytes::{Buf, Bytes};
use forebay_api::{ApiError, Inflater};
use hyper::body::Frame;

/// Inflates a body in small frames, so that limits apply before much has been inflated.
pub(crate) struct Inflated {
    /// `None`: the body has ended.
    body: Option<Body>,
    inflater: Inflater,
    /// Compressed bytes that have arrived but are not inflated yet.
    rest: Bytes,
    /// True if other tasks should run before the next frame.
    yields: bool,
}

impl Inflated {
    pub(crate) fn new(body: Body, inflater: Inflater) -> Self {
        Self { body: Some(body), inflater, rest: Bytes::new(), yields: false }
    }

    /// Returns the next inflated chunk; `Ready(None)`: the end of the body.
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Vec<u8>, ApiError>>> {
        if std::mem::take(&mut self.yields) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            while !self.rest.is_empty() {
                let mut input = &self.rest[..];
                let out = self.inflater.step(&mut input)?;
                let used = self.rest.len() - input.len();
                self.rest.advance(used);
                if !out.is_empty() {
                    self.yields = true;
                    return Poll::Ready(Some(Ok(out)));
                }
            }
            let Some(body) = &mut self.body else { return Poll::Ready(None) };
            match std::task::ready!(Pin::new(body).poll_frame(context)) {
                Some(Ok(frame)) => self.rest = frame.into_data().unwrap_or_default(),
                Some(Err(error)) => {
                    let reason = error.to_string();
                    return Poll::Ready(Some(Err(ApiError::BrokenBody { reason })));
                }
                None => {
                    self.body = None;
                    return Poll::Ready(Some(self.inflater.finish()));
                }
            }
        }
    }
}

impl HttpBody for Inflated {
    type Data = Bytes;
    type Error = ApiError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ApiError>>> {
        let piece = std::task::ready!(self.poll_piece(context));
        Poll::Ready(piece.map(|piece| piece.map(|piece| Frame::data(piece.into()))))
    }
}
