//! Requests that wait for a model and run on it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use forebay_api::ApiError;
use forebay_fleet::{FleetEntry, ModelState, Ticket};
use forebay_http::ClientId;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;

use super::Front;

/// A request that runs on a model. The model stays loaded until the visit is dropped.
pub(crate) struct Visit {
    front: Arc<Front>,
    model: usize,
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.front.books.lock().fleet.finish(self.model, self.front.now_ms());
        self.front.visits.send_modify(|visits| *visits -= 1);
        self.front.step();
    }
}

/// A waiting request. Dropping it removes the request from the queue.
struct Wait {
    front: Arc<Front>,
    model: usize,
    ticket: Ticket,
    fate: oneshot::Receiver<Result<(), ()>>,
    /// True once the outcome was read.
    over: bool,
}

impl Drop for Wait {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        {
            let mut books = self.front.books.lock();
            books.waiting.remove(&self.ticket);
            // The request may have been admitted before it could be removed from the queue.
            if !books.fleet.give_up(self.ticket) && matches!(self.fate.try_recv(), Ok(Ok(()))) {
                books.fleet.finish(self.model, self.front.now_ms());
            }
        }
        self.front.visits.send_modify(|visits| *visits -= 1);
        self.front.step();
    }
}

impl Front {
    /// Waits until a client's request may run on a model, which is loaded if necessary.
    ///
    /// # Errors
    /// The model cannot be loaded, too many requests wait for it, or the server drains.
    pub(crate) async fn visit(
        self: &Arc<Self>,
        model: usize,
        client: ClientId,
    ) -> Result<Visit, ApiError> {
        if self.is_draining() {
            return Err(ApiError::Draining);
        }
        let mut wait = {
            let mut books = self.books.lock();
            if matches!(books.fleet.state(model), ModelState::Unloaded | ModelState::Asleep)
                && let Some(available) = self.loader.available()
            {
                // Other programs may have taken memory since this server started.
                let left = books.fleet.used().saturating_add(available);
                books.fleet.set_memory(self.memory_bytes.min(left));
            }
            let entry = books.fleet.enter(model, client.0, self.now_ms());
            let entry = match entry {
                Ok(entry) => entry,
                Err(refusal) => {
                    drop(books);
                    return Err(self.refused(model, refusal));
                }
            };
            self.visits.send_modify(|visits| *visits += 1);
            match entry {
                FleetEntry::Running => return Ok(Visit { front: Arc::clone(self), model }),
                FleetEntry::Waiting(ticket) => {
                    let (sender, fate) = oneshot::channel();
                    books.waiting.insert(ticket, sender);
                    Wait { front: Arc::clone(self), model, ticket, fate, over: false }
                }
            }
        };
        self.step();
        let fate = (&mut wait.fate).await;
        wait.over = true;
        match fate {
            Ok(Ok(())) => Ok(Visit { front: Arc::clone(self), model }),
            Ok(Err(())) | Err(_) => {
                self.visits.send_modify(|visits| *visits -= 1);
                Err(self.gave_up(model))
            }
        }
    }

    /// Creates the error for a request whose model did not become ready.
    fn gave_up(&self, model: usize) -> ApiError {
        if self.is_draining() {
            return ApiError::Draining;
        }
        let name = &self.entries[model].names[0];
        let fits = self.books.lock().fleet.fits(model);
        if let Err(refusal) = fits {
            return self.refused(model, refusal);
        }
        let why = self.books.lock().slots[model].error.clone().unwrap_or_default();
        let reason = format!("the model {name} is not available: {why}");
        ApiError::Unavailable { reason, code: "model_failed" }
    }
}

/// A response body of a model.
pub(crate) struct ModelBody {
    body: Body,
    /// Keeps the model loaded until the body is dropped; `None` if the body does not keep it
    /// loaded.
    _visit: Option<Visit>,
    /// The body ends when this future completes.
    until: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl ModelBody {
    /// Creates a body that keeps the model loaded until the body is complete.
    pub(crate) fn held(body: Body, visit: Visit) -> Body {
        Body::new(Self { body, _visit: Some(visit), until: None })
    }

    /// Creates a body that ends when `left` completes, at the unloading of the model.
    pub(crate) fn until(body: Body, left: impl Future<Output = ()> + Send + 'static) -> Body {
        Body::new(Self { body, _visit: None, until: Some(Box::pin(left)) })
    }
}

impl HttpBody for ModelBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(until) = &mut self.until
            && until.as_mut().poll(context).is_ready()
        {
            self.body = Body::empty();
            return Poll::Ready(None);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
