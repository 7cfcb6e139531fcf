//! Computes batches by calling the server's own routes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Request, StatusCode};
use axum::response::Response;
use forebay_api::ApiError;
use forebay_api::peer::BACKGROUND;
use forebay_batches::{
    ANSWER, BatchModel, BatchOutcome, BatchRequest, BatchStore, Owner, run_batches,
};
use forebay_engine::Status;
use forebay_http::Keys;
use http_body_util::{BodyExt, Limited};
use tokio::task::AbortHandle;
use tokio::time::sleep;
use tower::ServiceExt;

use crate::names::REQUEST_ID;
use crate::reply::ReplyError;
use crate::routes;
use crate::state::{Shared, now};

/// The wait before the first retry, if the server had no room for a request. The wait doubles with
/// each retry, up to `LONGEST_WAIT`.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Starts computing the batches of a store.
pub(crate) fn start(store: &Arc<BatchStore>, state: &Shared) -> AbortHandle {
    let config = &state.config;
    let mut keys = HashMap::new();
    if config.api_keys.is_empty() {
        keys.insert(store.owner(None), None);
    } else {
        for key in texts(&config.api_keys).chain(texts(&config.admin_keys)) {
            if let Ok(header) = HeaderValue::from_str(&format!("Bearer {key}")) {
                keys.insert(store.owner(Some(key)), Some(header));
            }
        }
    }
    let model = OwnRoutes { router: routes::computed(state), keys, state: Arc::clone(state) };
    tokio::spawn(run_batches(Arc::clone(store), Arc::new(model), now)).abort_handle()
}

fn texts(keys: &Keys) -> impl Iterator<Item = &str> {
    (0..keys.len()).filter_map(|at| keys.text(at))
}

/// The server's own routes, called without a socket.
struct OwnRoutes {
    router: Router,
    /// The `Authorization` header of each owner whose key is accepted; `None`: no key is needed.
    keys: HashMap<Owner, Option<HeaderValue>>,
    state: Shared,
}

impl BatchModel for OwnRoutes {
    async fn answer(&self, owner: &Owner, request: BatchRequest) -> BatchOutcome {
        let Some(key) = self.keys.get(owner) else { return BatchOutcome::Unauthorized };
        let mut wait = FIRST_WAIT;
        loop {
            let mut head = Request::post(request.path)
                .header(CONTENT_TYPE, "application/json")
                .header(BACKGROUND.0, BACKGROUND.1);
            if let Some(key) = key {
                head = head.header(AUTHORIZATION, key);
            }
            let Ok(asked) = head.body(Body::from(request.body.clone())) else {
                return BatchOutcome::Stopped;
            };
            let Ok(response) = self.router.clone().oneshot(asked).await;
            match response.status() {
                StatusCode::UNAUTHORIZED => return BatchOutcome::Unauthorized,
                StatusCode::TOO_MANY_REQUESTS => {}
                StatusCode::SERVICE_UNAVAILABLE if self.is_stopping(&response) => {
                    return BatchOutcome::Stopped;
                }
                StatusCode::SERVICE_UNAVAILABLE if !is_abort(&response) => {}
                _ => return whole(response).await,
            }
            sleep(retry_after(&response).unwrap_or(wait).min(LONGEST_WAIT)).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }
}

impl OwnRoutes {
    fn is_stopping(&self, response: &Response) -> bool {
        let error = response.extensions().get::<ReplyError>().map(|ReplyError(error)| error);
        error == Some(&ApiError::Draining) || self.state.engine.status() == Status::Draining
    }
}

/// True if the server aborted the request: a retry would not help.
fn is_abort(response: &Response) -> bool {
    matches!(response.extensions().get::<ReplyError>(), Some(ReplyError(ApiError::Aborted)))
}

fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

async fn whole(response: Response) -> BatchOutcome {
    let status = response.status().as_u16();
    let id = response.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
    match Limited::new(response.into_body(), ANSWER).collect().await {
        Ok(body) => BatchOutcome::Answer { status, id, body: body.to_bytes().to_vec() },
        Err(error) => {
            let reason = format!("the answer broke off: {error}");
            let body = ApiError::Internal { reason, code: Some("no_answer") }.body();
            let body = serde_json::to_vec(&body).unwrap_or_default();
            BatchOutcome::Answer { status: 500, id, body }
        }
    }
}
