//! Tensors of the served checkpoint: replacing them by a trainer's tensors, and reading a tensor's
//! values.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use serde::Deserialize;
use tokio::task::spawn_blocking;
use utoipa::{IntoParams, ToSchema};

use crate::limits::{Upload, query, small, whole};
use crate::reply::{self, Failure};
use crate::state::Shared;
use crate::tensors::{write_body, write_decoded};
use crate::weights::{Source, Update};

use super::weights::{WeightsUpdated, updated_answer};

/// The field that contains tensors.
const TENSORS: &str = "serialized_named_tensors";
/// The content type of a body that is a single safetensors file.
const OCTETS: &str = "application/octet-stream";
/// The default number of rows of a parameter, as in SGLang.
const ROWS: usize = 100;

/// The parameters of a weight update, apart from its tensors.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct TensorsQuery {
    /// The version that later responses report.
    weight_version: Option<String>,
    /// True if running requests are aborted before the update. Otherwise they continue with the new
    /// weights.
    #[serde(default)]
    abort_all_requests: bool,
    /// True if generation stays paused after the update.
    #[serde(default)]
    keep_pause: bool,
}

/// Tensors that replace the tensors of the same names.
#[derive(Deserialize, ToSchema)]
pub(crate) struct UpdateTensors<'a> {
    /// Safetensors files in base64, with some or all tensors of the checkpoint. No pickles.
    #[serde(borrow)]
    #[schema(value_type = Vec<String>)]
    serialized_named_tensors: Texts<'a>,
    /// `auto`, `safetensors`, or null.
    #[serde(borrow)]
    load_format: Option<Cow<'a, str>>,
    /// True if running requests are aborted before the update. Otherwise they continue with the new
    /// weights.
    #[serde(default)]
    abort_all_requests: bool,
    /// The version that later responses report.
    weight_version: Option<String>,
    /// True if generation stays paused after the update.
    #[serde(default)]
    keep_pause: bool,
}

/// One or several strings. Strings without escapes are borrowed from the body.
#[derive(Deserialize)]
#[serde(untagged)]
enum Texts<'a> {
    One(#[serde(borrow)] Cow<'a, str>),
    Several(#[serde(borrow)] Vec<Cow<'a, str>>),
}

/// The parameter whose values to return.
#[derive(Deserialize, IntoParams, ToSchema)]
#[into_params(parameter_in = Query)]
pub(crate) struct ParameterQuery {
    /// The tensor's name in safetensors, or in transformers.
    name: String,
    /// The number of rows to return; for a vector, the number of values.
    #[serde(default = "rows")]
    truncate_size: usize,
}

fn rows() -> usize {
    ROWS
}

/// Replaces tensors of the served checkpoint. Running requests continue with the new tensors, or
/// are aborted.
#[utoipa::path(
    post,
    path = "/update_weights_from_tensor",
    operation_id = "update_tensors",
    params(TensorsQuery),
    request_body(content(
        (UpdateTensors<'_> = "application/json"),
        (Vec<u8> = "application/octet-stream"),
    ), description = "Base64 in JSON, or one file of safetensors as it is, with parameters in the URL"),
    responses(
        (status = 200, description = "All replicas compute with them", body = WeightsUpdated),
        (status = 400, description = "They can't be loaded; the last ones compute on", body = ErrorBody),
        (status = 409, description = "Another update is being received", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn update(
    State(state): State<Shared>,
    uri: Uri,
    headers: HeaderMap,
    body: Upload,
) -> Result<Response, Failure> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let is_file = kind.split(';').next().is_some_and(|it| it.trim().eq_ignore_ascii_case(OCTETS));
    let param = if is_file { "body" } else { TENSORS };
    let (folder, _turn) = state.weights.folder(param).await?;
    let (update, files) = if is_file {
        let TensorsQuery { weight_version, abort_all_requests, keep_pause } = query(&uri)?;
        let file = write_body(body, &folder, state.config.receive_timeout).await?;
        ((weight_version, abort_all_requests, keep_pause), vec![file])
    } else {
        let (body, charge) = whole(body, &state).await?;
        let folder = folder.clone();
        let decode = spawn_blocking(move || {
            let _charge = charge;
            let update: UpdateTensors<'_> = serde_json::from_slice(&body)
                .map_err(|error| ApiError::invalid("body", format!("the body: {error}")))?;
            let known = |format: &str| ["auto", "safetensors"].contains(&format);
            if let Some(format) = update.load_format.filter(|format| !known(format)) {
                let reason =
                    format!("`load_format` {format:?} is not served: safetensors, auto, or null");
                return Err(ApiError::invalid("load_format", reason));
            }
            let files = match &update.serialized_named_tensors {
                Texts::One(text) => write_decoded(std::slice::from_ref(text), &folder, TENSORS),
                Texts::Several(texts) => write_decoded(texts, &folder, TENSORS),
            };
            let more = (update.weight_version, update.abort_all_requests, update.keep_pause);
            Ok((more, files?))
        });
        decode.await.unwrap_or_else(|error| {
            let reason = format!("the tensors can't be read: {error}");
            Err(ApiError::Internal { reason, code: None })
        })?
    };
    let (version, aborts, keeps_pause) = update;
    let source = Source::Tensors(folder, files);
    let update = Update { source, param, version, aborts, keeps_pause };
    Ok(updated_answer(Arc::clone(&state.weights).update(update).await?))
}

/// Responds with the route to use in place of process groups and GPU shared memory.
#[utoipa::path(
    post,
    path = "/update_weights_from_ipc",
    operation_id = "update_weights_from_ipc",
    responses((status = 501, description = "What to use instead", body = ErrorBody)),
)]
pub(crate) async fn elsewhere(uri: Uri) -> Failure {
    let reason = format!(
        "{} is not served: no NCCL group is joined, and no CUDA IPC handle is opened. Send safetensors to \
         /update_weights_from_tensor, write a checkpoint below /dev/shm and name it to /update_weights_from_disk, or \
         join a gloo group with /init_weights_update_group",
        uri.path()
    );
    Failure(ApiError::NotImplemented { reason })
}

/// Returns the first rows of a parameter, as stored in the served files.
#[utoipa::path(
    post,
    path = "/get_weights_by_name",
    operation_id = "parameter",
    request_body = ParameterQuery,
    responses(
        (status = 200, description = "Lists in lists of numbers", body = Vec<Vec<f32>>),
        (status = 400, description = "It is no parameter of plain floats", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn parameter(
    State(state): State<Shared>,
    body: Upload,
) -> Result<Response, Failure> {
    let asked = small(&state, body).await?;
    values(&state, asked).await
}

/// Returns the first rows of a parameter, as stored in the served files. The body may name the
/// parameter too.
#[utoipa::path(
    get,
    path = "/get_weights_by_name",
    operation_id = "parameter",
    params(ParameterQuery),
    responses(
        (status = 200, description = "Lists in lists of numbers", body = Vec<Vec<f32>>),
        (status = 400, description = "It is no parameter of plain floats", body = ErrorBody),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn parameter_of_query(
    State(state): State<Shared>,
    uri: Uri,
    body: Upload,
) -> Result<Response, Failure> {
    // SGLang's clients send a body with this GET request.
    let asked = if uri.query().is_some() { query(&uri)? } else { small(&state, body).await? };
    values(&state, asked).await
}

async fn values(state: &Shared, asked: ParameterQuery) -> Result<Response, Failure> {
    let ParameterQuery { name, truncate_size } = asked;
    Ok(reply::ok(&state.weights.rows(name, truncate_size).await?))
}
