//! Files and batches of clients: whose they are, and the errors of their store.

use std::sync::Arc;

use axum::http::HeaderMap;
use forebay_api::ApiError;
use forebay_api::limits::{SHOWN_BYTES, cut};
use forebay_batches::{BatchStore, Owner, StoreError};
use forebay_http::KeyId;
use tokio::task::spawn_blocking;

use crate::state::Shared;

/// The store of a server that keeps any.
///
/// # Errors
/// The server has no folder for them.
pub(crate) fn store(state: &Shared) -> Result<&Arc<BatchStore>, ApiError> {
    let reason = "this server keeps no files and batches: --batch-dir is not set";
    let off = || ApiError::NotKept { reason: reason.into(), code: "batches_off" };
    state.batches.as_ref().ok_or_else(off)
}

/// The owner of what a client sends.
pub(crate) fn owner(store: &BatchStore, state: &Shared, key: KeyId, headers: &HeaderMap) -> Owner {
    let config = &state.config;
    if config.api_keys.is_empty() {
        return store.owner(None);
    }
    let user = key.0.and_then(|at| config.api_keys.text(at));
    let admin = || config.admin_keys.text(config.admin_keys.shown(headers)?);
    store.owner(user.or_else(admin))
}

/// Does what may wait for the disk.
///
/// # Errors
/// Those of the store.
pub(crate) async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, ApiError> {
    let panicked = |_| ApiError::Internal { reason: "the store failed".into(), code: None };
    spawn_blocking(work).await.map_err(panicked)?.map_err(told)
}

fn told(error: StoreError) -> ApiError {
    let reason = cut(&error.to_string(), SHOWN_BYTES).into_owned();
    match error {
        StoreError::UnknownFile(_) => ApiError::NotKept { reason, code: "file_not_found" },
        StoreError::UnknownBatch(_) => ApiError::NotKept { reason, code: "batch_not_found" },
        StoreError::Invalid { param, .. } => ApiError::invalid(param, reason),
        StoreError::Conflict(_) => ApiError::Conflict { reason },
        StoreError::TooLarge(limit) => ApiError::BodyTooLarge {
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            flag: "--batch-max-file-bytes",
        },
        StoreError::Full(_) => ApiError::Forbidden { reason, code: "storage_quota_exceeded" },
        StoreError::Disk(_) => ApiError::Internal { reason, code: Some("storage_error") },
    }
}
