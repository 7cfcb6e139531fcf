//! `/v1/batches`: files of requests that are computed in the background.

use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use forebay_batches::{BatchObject, NewBatch};

use super::files::PageQuery;
use crate::batches::StoreClient;
use crate::limits::{Upload, whole};
use crate::reply::{self, Failure};
use crate::state::{Shared, now};

/// The maximum and default number of batches per page of a list.
const PAGE: usize = 100;
const USUAL_PAGE: usize = 20;
/// The maximum size of the body that creates a batch, in bytes.
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
    client: StoreClient,
    upload: Upload,
) -> Result<Response, Failure> {
    let (body, _charge) = whole(upload, &state).await?;
    if body.len() > BODY_BYTES {
        let reason = format!("the body has {} bytes, and {BODY_BYTES} at most", body.len());
        return Err(ApiError::invalid("body", reason).into());
    }
    let new: NewBatch = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid("body", format!("the body: {error}")))?;
    Ok(reply::ok(&client.run(move |store, owner| store.create(owner, new, now())).await?))
}

/// Lists the batches of an API key, the newest first.
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
pub(crate) async fn list(client: StoreClient, uri: Uri) -> Result<Response, Failure> {
    let wanted = PageQuery::of(&uri)?;
    let all = client.run(move |store, owner| Ok(store.batches(owner, now()))).await?;
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
    client: StoreClient,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    Ok(reply::ok(&client.run(move |store, owner| store.batch(owner, &id, now())).await?))
}

/// Cancels a batch. The responses so far become a file.
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
    client: StoreClient,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    Ok(reply::ok(&client.run(move |store, owner| store.cancel(owner, &id, now())).await?))
}
