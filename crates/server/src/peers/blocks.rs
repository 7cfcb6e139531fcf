//! The blocks of this brain's prefix caches. Routers use them to send a prompt to the brain that
//! has the prompt's prefix cached.

use std::time::Duration;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Uri};
use axum::response::Response;
use forebay_api::ApiError;
use serde::Deserialize;

use super::log::short;
use crate::limits;
use crate::reply::Failure;
use crate::state::Shared;

/// The longest wait for an event.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Returns the names of a prompt's blocks, for requests with this salt.
pub(super) fn names(state: &Shared, salt: u64, prompt: &[i32]) -> Vec<u64> {
    state.engine.block_names(salt, prompt).into_iter().map(short).collect()
}

/// The query parameters: the number of the first requested event, and the longest wait.
#[derive(Debug, Deserialize)]
pub(crate) struct Since {
    #[serde(default)]
    after: u64,
    /// Seconds to wait for a change.
    #[serde(default)]
    wait: f64,
}

/// Returns changes of the blocks in prefix caches, for routers.
///
/// The body is little-endian numbers of 64 bits. First comes the value of `after` for the next
/// request, then 1 if all earlier responses are void (0 otherwise), then names of blocks. The
/// lowest two bits of a name are the block's new tiers: bit 0 for device memory, bit 1 for host
/// memory. With neither bit the block was dropped.
#[utoipa::path(
    get,
    path = "/v1/blocks",
    params(
        ("after" = Option<u64>, Query, description = "The number that the last answer began with"),
        ("wait" = Option<f64>, Query, description = "Seconds to wait for a change"),
    ),
    responses((status = 200, description = "Numbers", content_type = "application/octet-stream")),
)]
pub(crate) async fn blocks(State(state): State<Shared>, uri: Uri) -> Result<Response, Failure> {
    let since: Since = limits::query(&uri)?;
    let Some(blocks) = &state.blocks else {
        let reason = "the prefix cache is off".to_owned();
        return Err(Failure(ApiError::Unavailable { reason, code: "no_prefix_cache" }));
    };
    let body = blocks.follow(since.after, wait(since.wait)?).await;
    let mut response = Response::new(body.into());
    let bytes = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(CONTENT_TYPE, bytes);
    Ok(response)
}

/// Converts a client's number of seconds to the duration of a wait.
pub(crate) fn wait(seconds: f64) -> Result<Duration, ApiError> {
    let wait = Duration::try_from_secs_f64(seconds)
        .map_err(|error| ApiError::invalid("wait", format!("`wait`: {error}")))?;
    Ok(wait.min(LONGEST_WAIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits() {
        assert_eq!(wait(0.5).unwrap(), Duration::from_millis(500));
        assert_eq!(wait(1e9).unwrap(), LONGEST_WAIT);
        assert!(wait(-1.0).is_err() && wait(f64::NAN).is_err());
    }
}
