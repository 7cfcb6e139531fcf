//! Streams of named events (server-sent events), each sent by a separate task.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use http::{HeaderValue, Response};
use http_body::{Body, Frame};
use serde::Serialize;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The time between two updates of a feed.
pub const INTERVAL: Duration = Duration::from_millis(250);
/// The maximum number of open feeds.
const MOST: usize = 64;

/// Limits the number of open feeds.
#[derive(Debug)]
pub struct Watchers(Arc<Semaphore>);

impl Default for Watchers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST)))
    }
}

impl Watchers {
    /// Opens a feed. Returns the feed and its response; `None`: too many feeds are open.
    #[must_use]
    pub fn open(&self) -> Option<(Feed, Response<FeedBody>)> {
        let place = Arc::clone(&self.0).try_acquire_owned().ok()?;
        // At most one event waits, so a client that reads slowly gets fewer events.
        let (events, body) = channel(1);
        let mut response = Response::new(FeedBody(body));
        for (name, value) in [
            (CONTENT_TYPE, "text/event-stream"),
            (CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("x-accel-buffering"), "no"),
        ] {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        Some((Feed { events, _place: place }, response))
    }
}

/// The sender of a feed. Dropping it ends the response.
#[derive(Debug)]
pub struct Feed {
    events: Sender<Bytes>,
    _place: OwnedSemaphorePermit,
}

impl Feed {
    /// Sends an event once the client has received the previous one. Returns false if the client
    /// has disconnected.
    pub async fn send(&self, name: &str, data: &impl Serialize) -> bool {
        let mut event = format!("event: {name}\ndata: ").into_bytes();
        if serde_json::to_writer(&mut event, data).is_err() {
            return false;
        }
        event.extend_from_slice(b"\n\n");
        self.events.send(event.into()).await.is_ok()
    }

    /// Waits until the client has disconnected.
    pub async fn left(&self) {
        self.events.closed().await;
    }
}

/// The body of a feed's response.
#[derive(Debug)]
pub struct FeedBody(Receiver<Bytes>);

impl Body for FeedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn events_come_in_order_and_places_come_back() {
        let watchers = Watchers::default();
        let (feed, response) = watchers.open().unwrap();
        let writing = tokio::spawn(async move {
            assert!(feed.send("start", &json!({"a": "line\nbreak"})).await);
            assert!(feed.send("tick", &json!(1)).await);
        });
        let body = response.into_body().collect().await.unwrap().to_bytes();
        writing.await.unwrap();
        assert_eq!(
            &body[..],
            b"event: start\ndata: {\"a\":\"line\\nbreak\"}\n\nevent: tick\ndata: 1\n\n"
        );
        let mut open: Vec<_> = (0..MOST).map(|_| watchers.open().unwrap()).collect();
        assert!(watchers.open().is_none());
        open.pop();
        assert!(watchers.open().is_some());
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_noticed() {
        let (feed, response) = Watchers::default().open().unwrap();
        drop(response);
        feed.left().await;
        assert!(!feed.send("tick", &1).await);
    }
}
