//! A backend's response, read frame by frame.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use hyper::body::Incoming;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Sleep, sleep_until};

use crate::attempt::Failed;
use crate::backend::Sent;
use crate::leg::Leg;
use crate::link::Link;
use crate::movable::Place;
use crate::shared::Worker;

/// The reason why a response does not arrive, or breaks off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the connection to the backend broke: {0}")]
    Link(#[from] hyper::Error),
    #[error("the backend does not answer its health checks")]
    Gone,
    #[error("the backend sent more of its answer than the router can buffer")]
    Excess,
    #[error("the request goes to another backend, which computes it sooner")]
    Moved(u32),
    #[error("the prefill server has failed the request")]
    Prefill,
    #[error("{0}")]
    Params(&'static str),
    #[error("the request took longer than --request-timeout-secs allows")]
    Deadline,
}

/// A future that is ready when waiting for the backend has become pointless.
pub(crate) struct Vigil {
    gone: Pin<Box<OwnedNotified>>,
    deadline: Pin<Box<Sleep>>,
    /// The request's entry in the list of requests that may move; `None`: the request stays with
    /// this backend.
    place: Option<Place>,
    /// The request to the prefill server, if it may still fail.
    leg: Option<Leg>,
    /// The failure of the request to the prefill server, once it has failed.
    failed: Option<Failed>,
}

impl Vigil {
    pub(crate) fn new(
        sent: &Sent,
        deadline: Instant,
        place: Option<Place>,
        leg: Option<Leg>,
    ) -> Self {
        let mut gone = Box::pin(Arc::clone(&sent.backend.gone).notified_owned());
        gone.as_mut().enable();
        Self { gone, deadline: Box::pin(sleep_until(deadline.into())), place, leg, failed: None }
    }

    /// Takes the failure of the request to the prefill server, if it has failed. The response of
    /// the decode server will then not arrive.
    pub(crate) fn failed_leg(&mut self) -> Option<Failed> {
        self.failed.take()
    }

    /// Aborts the request to the prefill server.
    pub(crate) fn end_leg(&mut self) {
        self.leg = None;
    }

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Broken> {
        if self.gone.as_mut().poll(context).is_ready() {
            return Poll::Ready(Broken::Gone);
        }
        if let Some(Poll::Ready(to)) = self.place.as_mut().map(|place| place.poll(context)) {
            return Poll::Ready(Broken::Moved(to));
        }
        if let Some(Poll::Ready(failed)) = self.leg.as_mut().map(|leg| leg.poll_failed(context)) {
            (self.leg, self.failed) = (None, Some(failed));
            return Poll::Ready(Broken::Prefill);
        }
        self.deadline.as_mut().poll(context).map(|()| Broken::Deadline)
    }
}

/// A response's body while it is being received. Dropping it closes the connection, which aborts
/// the request.
pub(crate) struct Flow {
    pub(crate) sent: Sent,
    link: Link,
    body: Incoming,
    vigil: Vigil,
    worker: Arc<Worker>,
}

impl Flow {
    pub(crate) fn new(
        sent: Sent,
        link: Link,
        body: Incoming,
        vigil: Vigil,
        worker: Arc<Worker>,
    ) -> Self {
        Self { sent, link, body, vigil, worker }
    }

    /// Polls for the next bytes of the body; `None` at the end.
    pub(crate) fn poll_data(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Broken>>> {
        loop {
            let frame = match self.link.poll_frame(&mut self.body, context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error.into()))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return self.vigil.poll(context).map(|broken| Some(Err(broken))),
            };
            // Trailers are dropped.
            if let Ok(data) = frame.into_data()
                && !data.is_empty()
            {
                self.vigil.place = None;
                return Poll::Ready(Some(Ok(data)));
            }
        }
    }

    /// Takes the failure of the request to the prefill server, if that failure has ended the
    /// response.
    pub(crate) fn failed_leg(&mut self) -> Option<Failed> {
        self.vigil.failed_leg()
    }

    /// Returns the dispatch, and drops the connection.
    pub(crate) fn into_sent(self) -> Sent {
        self.sent
    }

    /// The worker of the thread that handles the response.
    pub(crate) fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// Returns the connection for reuse, because the body has ended.
    pub(crate) fn end(mut self) {
        if let Some(leg) = self.vigil.leg.take() {
            leg.linger();
        }
        self.worker.idle.put(self.sent.backend.id, self.link);
    }
}
