//! A body for a backend: the router's addition, and behind it the client's body.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

/// Two pieces, one after the other, so that adding something does not copy the rest.
#[derive(Debug, Default)]
pub(crate) struct Payload([Bytes; 2]);

impl Payload {
    pub(crate) fn new(head: Bytes, tail: Bytes) -> Self {
        Self([head, tail])
    }
}

impl From<Bytes> for Payload {
    fn from(whole: Bytes) -> Self {
        Self([Bytes::new(), whole])
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.get_mut().0.iter_mut().find(|piece| !piece.is_empty());
        Poll::Ready(next.map(|piece| Ok(Frame::data(std::mem::take(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
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
        let payload = Payload::new(ids, body.clone());
        assert_eq!(payload.size_hint().exact(), Some(6));
        assert_eq!(payload.collect().await.unwrap().to_bytes(), "1,2,{}");
        assert_eq!(Payload::from(body).collect().await.unwrap().to_bytes(), "{}");
        assert!(Payload::default().is_end_stream());
    }
}
