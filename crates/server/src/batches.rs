//! Clients' files and batches: their owners, and the errors of the store.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use forebay_api::ApiError;
use forebay_api::limits::{SHOWN_BYTES, cut};
use forebay_batches::{BatchStore, Owner, StoreError};
use forebay_http::KeyId;
use tokio::task::spawn_blocking;

use crate::reply::Failure;
use crate::state::Shared;

/// The store, and the owner for whom a request uses the store.
#[derive(Clone)]
pub(crate) struct StoreClient {
    store: Arc<BatchStore>,
    owner: Owner,
}

impl FromRequestParts<Shared> for StoreClient {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Failure> {
        let reason = "this server keeps no files and batches: --batch-dir is not set";
        let off = || ApiError::NotKept { reason: reason.into(), code: "batches_off" };
        let store = Arc::clone(state.batches.as_ref().ok_or_else(off)?);
        let Ok(KeyId(key)) = KeyId::from_request_parts(parts, state).await;
        let config = &state.config;
        let admin = || config.admin_keys.text(config.admin_keys.shown(&parts.headers)?);
        let key = key.and_then(|at| config.api_keys.text(at)).or_else(admin);
        let owner = store.owner(key.filter(|_| !config.api_keys.is_empty()));
        Ok(Self { store, owner })
    }
}

impl StoreClient {
    /// Runs `work` on a thread that may block on the disk.
    ///
    /// # Errors
    /// The errors of the store.
    pub(crate) async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce(&Arc<BatchStore>, &Owner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        on_disk(move || work(&self.store, &self.owner)).await
    }
}

/// Runs `work` on a thread that may block on the disk.
///
/// # Errors
/// The errors of the store.
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
