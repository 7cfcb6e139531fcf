//! Handles the part of a request's body that was not read before the response, such as after an
//! error.
//!
//! hyper closes such a connection after the response without announcing it. A client that sends its
//! next request on that connection would lose the request. So the rest of a short body is read
//! first. If the body is longer, the response has `Connection: close` (RFC 9112, 9.6).

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::http::header::{CONNECTION, EXPECT};
use axum::http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::{Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use tokio::time::timeout;

/// The maximum size in bytes of a body that is read before the response is sent.
const MOST_READ: u64 = 64 << 10;
/// How long a longer body is read and discarded, so that a client that is still sending can read
/// the response.
const LINGER: Duration = Duration::from_secs(5);

/// The body of a request. Dropping it hands an unread rest back to the connection.
#[derive(Debug)]
pub struct RequestBody<B: HttpBody = Incoming> {
    body: Option<B>,
    is_begun: bool,
    left: Left<B>,
}

/// A body that was dropped before its end, and whether reading it had begun.
type Left<B> = Arc<Mutex<Option<(B, bool)>>>;

impl<B: HttpBody> Drop for RequestBody<B> {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            *self.left.lock() = Some((body, self.is_begun));
        }
    }
}

impl<B: HttpBody + Unpin> HttpBody for RequestBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.is_begun = true;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(&mut *body).poll_frame(context));
        if body.is_end_stream() || !matches!(frame, Some(Ok(_))) {
            self.body = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

/// Serves a request with `respond`. If `respond` did not read a short body, reads it for up to
/// `patience`.
pub async fn answer<B, A, F>(
    respond: impl FnOnce(Request<RequestBody<B>>) -> F,
    request: Request<B>,
    patience: Duration,
) -> Response<A>
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    F: Future<Output = Response<A>>,
{
    let left = Left::default();
    // A client that waits for `100 Continue` has not sent any of its body.
    let asks = request.headers().contains_key(EXPECT);
    let request = request.map(|body| RequestBody {
        body: Some(body).filter(|body| !body.is_end_stream()),
        is_begun: false,
        left: Arc::clone(&left),
    });
    let mut response = respond(request).await;
    let left = left.lock().take();
    let Some((mut body, is_begun)) = left else { return response };
    let is_short = body.size_hint().exact().is_some_and(|bytes| bytes <= MOST_READ);
    if is_short && !is_begun && !asks && timeout(patience, is_read(&mut body)).await == Ok(true) {
        return response;
    }
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    // A client that was too slow gets no more time.
    if !asks && response.status() != StatusCode::REQUEST_TIMEOUT {
        tokio::spawn(async move { timeout(LINGER, is_read(&mut body)).await });
    }
    response
}

/// Reads a body to its end. Returns false if it is broken.
async fn is_read(body: &mut (impl HttpBody + Unpin)) -> bool {
    while !body.is_end_stream() {
        match poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
            Some(Ok(_)) => {}
            Some(Err(_)) => return false,
            None => break,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::{Body, to_bytes};

    use super::*;

    /// Returns the header `Connection` in the response of a service that reads no bodies.
    async fn refused(request: Request<Body>) -> Option<HeaderValue> {
        let refuse = async |_| Response::new(());
        let response = answer(refuse, request, Duration::from_secs(5)).await;
        response.headers().get(CONNECTION).cloned()
    }

    /// A body of ten bytes that never arrive.
    struct Endless;

    impl HttpBody for Endless {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(10)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_says_when_its_connection_ends() {
        let close = Some(HeaderValue::from_static("close"));
        assert_eq!(refused(Request::new(Body::empty())).await, None);
        assert_eq!(refused(Request::new(Body::from(vec![b'x'; MOST_READ as usize]))).await, None);
        let long = Body::from(vec![b'x'; MOST_READ as usize + 1]);
        assert_eq!(refused(Request::new(long)).await, close);
        assert_eq!(refused(Request::new(Body::new(Endless))).await, close);
        let asks = Request::builder().header(EXPECT, "100-continue");
        assert_eq!(refused(asks.body(Body::from("x")).unwrap()).await, close);
    }

    #[tokio::test]
    async fn a_body_that_was_read_leaves_nothing() {
        let read = async |request: Request<RequestBody<Body>>| {
            assert_eq!(to_bytes(Body::new(request.into_body()), 9).await.unwrap(), "abc");
            Response::new(())
        };
        let response = answer(read, Request::new(Body::from("abc")), Duration::ZERO).await;
        assert!(response.headers().is_empty());
    }
}
