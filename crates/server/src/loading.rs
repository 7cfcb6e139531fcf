//! Requests that arrive before the model is loaded wait for it.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use forebay_engine::Status;

use crate::state::Shared;

fn is_loading(state: &Shared) -> bool {
    matches!(state.status(), Status::Starting(_))
}

/// Delays a request until the model is loaded, before any of its body is read.
pub(crate) async fn hold(State(state): State<Shared>, request: Request, next: Next) -> Response {
    if state.config.queue_while_loading && is_loading(&state) {
        let asked = Arc::clone(&state);
        state.loaded.wait(move || is_loading(&asked)).await;
    }
    next.run(request).await
}
