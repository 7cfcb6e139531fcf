//! Requests that come before the model is there, and wait for it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use forebay_engine::Status;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::state::Shared;

/// The time between two questions to the engine, by one task for all that wait.
const PERIOD: Duration = Duration::from_millis(10);

/// Tells that the model no longer loads. It has a task only once somebody waits.
#[derive(Debug, Default)]
pub(crate) struct Loaded(OnceLock<watch::Receiver<bool>>);

impl Loaded {
    /// Waits until the model has been loaded, or cannot be.
    async fn wait(&self, state: &Shared) {
        let told = self.0.get_or_init(|| {
            let (tell, told) = watch::channel(false);
            let state = Arc::clone(state);
            tokio::spawn(async move {
                while is_loading(&state) {
                    sleep(PERIOD).await;
                }
                let _ = tell.send(true);
            });
            told
        });
        // A sender that is gone has told it, or the server ends.
        let _ = told.clone().wait_for(|&loaded| loaded).await;
    }
}

fn is_loading(state: &Shared) -> bool {
    matches!(state.status(), Status::Starting(_))
}

/// Holds a request until the model is there, before anything of its body is read.
pub(crate) async fn hold(State(state): State<Shared>, request: Request, next: Next) -> Response {
    if state.config.queue_while_loading && is_loading(&state) {
        state.loaded.wait(&state).await;
    }
    next.run(request).await
}
