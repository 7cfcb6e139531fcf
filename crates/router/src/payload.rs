//! The body of a request to a backend: chunks of the client's body, and the router's additions
//! around and between them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// Consecutive chunks of a body, so that the router's insertions do not require a copy of the
/// client's body. No chunk is empty.
#[derive(Debug, Default)]
pub(crate) struct Payload(VecDeque<Bytes>);

impl From<Vec<Bytes>> for Payload {
    fn from(mut pieces: Vec<Bytes>) -> Self {
        pieces.retain(|piece| !piece.is_empty());
        Self(pieces.into())
    }
}

impl From<Bytes> for Payload {
    fn from(whole: Bytes) -> Self {
        Self::from(vec![whole])
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.get_mut().0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|piece| piece.len() as u64).sum())
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn pieces_come_in_order_and_their_length_is_known() {
        let (ids, body) = (Bytes::from_static(b"1,2,"), Bytes::from_static(b"{}"));
        let payload = Payload::from(vec![ids, Bytes::new(), body.clone()]);
        assert_eq!(payload.size_hint().exact(), Some(6));
        assert_eq!(payload.collect().await.unwrap().to_bytes(), "1,2,{}");
        assert_eq!(Payload::from(body).collect().await.unwrap().to_bytes(), "{}");
        assert!(Payload::default().is_end_stream());
    }
}
