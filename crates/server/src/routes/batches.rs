//! `/v1/batches`: files of requests that are computed in the background.

use std::sync::Arc;

use axum::extract::{FromRequest, FromRequestParts, Path, Request, State};
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use forebay_batches::{BatchObject, NewBatch};
use forebay_http::KeyId;

use super::files::PageQuery;
use crate::batches::{on_disk, owner, store};
use crate::limits::{Upload, whole};
use crate::reply::{self, Failure};
use crate::state::{Shared, now};

/// The largest number of batches of a page of a list, and the usual one.
const PAGE: usize = 100;
const USUAL_PAGE: usize = 20;
/// The largest number of bytes of a wish for a batch.
const BODY_BYTES: usize = 64 << 10;

/// Computes the requests of a file in the background.
#[utoipa::path(
    post,
    path = "/v1/batches",
    operation_id = "create_batch",
    request_body = Object,
    responses(
        (status = 200, description = "The batch", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn create(
    State(state): State<Shared>,
    request: Request,
) -> Result<Response, Failure> {
    let store = store(&state)?;
    let (mut parts, body) = request.into_parts();
    let Ok(key) = KeyId::from_request_parts(&mut parts, &state).await;
    let owner = owner(store, &state, key, &parts.headers);
    let Ok(upload) = Upload::from_request(Request::from_parts(parts, body), &state).await;
    let (body, _charge) = whole(upload, &state).await?;
    if body.len() > BODY_BYTES {
        let reason = format!("the body has {} bytes, and {BODY_BYTES} at most", body.len());
        return Err(ApiError::invalid("body", reason).into());
    }
    let new: NewBatch = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid("body", format!("the body: {error}")))?;
    let store = Arc::clone(store);
    Ok(reply::ok(&on_disk(move || store.create(&owner, new, now())).await?))
}

/// Lists the batches of a key, the newest first.
#[utoipa::path(
    get,
    path = "/v1/batches",
    operation_id = "list_batches",
    params(
        ("after" = Option<String>, Query, description = "The last batch of the page before"),
        ("limit" = Option<usize>, Query, description = "The length of a page"),
    ),
    responses(
        (status = 200, description = "The batches", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn list(
    State(state): State<Shared>,
    key: KeyId,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Failure> {
    let store = store(&state)?;
    let owner = owner(store, &state, key, &headers);
    let wanted = PageQuery::of(&uri)?;
    let store = Arc::clone(store);
    let all = on_disk(move || Ok(store.batches(&owner, now()))).await?;
    Ok(reply::ok(&wanted.page(all, PAGE, USUAL_PAGE, |batch: &BatchObject| &batch.id)?))
}

/// Shows a batch.
#[utoipa::path(
    get,
    path = "/v1/batches/{id}",
    operation_id = "retrieve_batch",
    params(("id" = String, Path, description = "Name of the batch")),
    responses(
        (status = 200, description = "The batch", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn retrieve(
    State(state): State<Shared>,
    key: KeyId,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let store = store(&state)?;
    let owner = owner(store, &state, key, &headers);
    let store = Arc::clone(store);
    Ok(reply::ok(&on_disk(move || store.batch(&owner, &id, now())).await?))
}

/// Ends a batch before its time. The answers that it has become a file.
#[utoipa::path(
    post,
    path = "/v1/batches/{id}/cancel",
    operation_id = "cancel_batch",
    params(("id" = String, Path, description = "Name of the batch")),
    responses(
        (status = 200, description = "The batch", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn cancel(
    State(state): State<Shared>,
    key: KeyId,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let store = store(&state)?;
    let owner = owner(store, &state, key, &headers);
    let store = Arc::clone(store);
    Ok(reply::ok(&on_disk(move || store.cancel(&owner, &id, now())).await?))
}
