//! `/v1/files`: files with requests and responses of batches.

use std::fs::File;
use std::io::Read;

use axum::body::Body;
use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{FromRequest, Multipart, Path, Request, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderValue, Uri};
use axum::response::Response;
use bytes::Bytes;
use forebay_api::{ApiError, ErrorBody};
use forebay_batches::{FileObject, Upload};
use http_body_util::channel::{Channel, Sender};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use utoipa::ToSchema;

use crate::batches::{StoreClient, on_disk};
use crate::form::{TakenBytes, bounded};
use crate::limits::query;
use crate::reply::{self, Failure};
use crate::state::{Shared, now};

/// The maximum size of a form field that is not a file, in bytes.
const FIELD_BYTES: usize = 1024;
/// The number of bytes that are read from a file at a time.
const CHUNK: usize = 64 << 10;
/// The maximum number of files per page of a list.
const PAGE: usize = 1000;

/// A page of a list, by default with the newest item first.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Page<T> {
    object: &'static str,
    #[schema(value_type = Vec<Object>)]
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// The requested page of a list.
#[derive(Debug, Deserialize)]
pub(super) struct PageQuery {
    after: Option<String>,
    limit: Option<usize>,
    order: Option<String>,
    purpose: Option<String>,
}

impl PageQuery {
    pub(super) fn of(uri: &Uri) -> Result<Self, ApiError> {
        query(uri)
    }

    /// Returns the requested page of `all`, which is sorted with the newest first.
    pub(super) fn page<T>(
        &self,
        mut all: Vec<T>,
        most: usize,
        usual: usize,
        id: impl Fn(&T) -> &str,
    ) -> Result<Page<T>, ApiError> {
        let limit = self.limit.unwrap_or(usual);
        if !(1..=most).contains(&limit) {
            return Err(ApiError::invalid("limit", format!("`limit`: from 1 to {most}")));
        }
        match self.order.as_deref() {
            None | Some("desc") => {}
            Some("asc") => all.reverse(),
            Some(_) => return Err(ApiError::invalid("order", "`order`: `asc` or `desc`")),
        }
        let begin = match &self.after {
            None => 0,
            Some(after) => {
                let at = all.iter().position(|item| id(item) == after);
                at.map(|at| at + 1).ok_or_else(|| {
                    ApiError::invalid("after", "`after`: no such object is in this list")
                })?
            }
        };
        let has_more = all.len() > begin + limit;
        let data: Vec<T> = all.into_iter().skip(begin).take(limit).collect();
        let name = |item: Option<&T>| item.map(|item| id(item).to_owned());
        let (first_id, last_id) = (name(data.first()), name(data.last()));
        Ok(Page { object: "list", data, first_id, last_id, has_more })
    }
}

/// Stores a file of requests. The body is a form with `file` and `purpose`, and may have
/// `expires_after[seconds]`.
#[utoipa::path(
    post,
    path = "/v1/files",
    operation_id = "upload_file",
    request_body(content = Object, content_type = "multipart/form-data"),
    responses(
        (status = 200, description = "The file", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn upload(
    State(state): State<Shared>,
    client: StoreClient,
    request: Request,
) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    let (body, taken) = bounded(body);
    let form = Multipart::from_request(Request::from_parts(parts, body), &state).await;
    let mut form = form.map_err(|error| ApiError::invalid("body", error.body_text()))?;
    let mut upload: Option<(Upload, String)> = None;
    let (mut purpose, mut expires_after) = (None, None);
    while let Some(field) = in_time(&state, form.next_field()).await? {
        match field.name().unwrap_or_default() {
            "file" if upload.is_none() => {
                let begun = client.clone().run(|store, owner| store.upload(owner)).await?;
                let filename = field.file_name().unwrap_or_default().to_owned();
                upload = Some((write(&state, begun, field, &taken).await?, filename));
            }
            "purpose" => purpose = Some(text(&state, field, "purpose").await?),
            "expires_after[seconds]" => {
                let seconds = text(&state, field, "expires_after").await?;
                let seconds = seconds.parse::<u64>().map_err(|_| {
                    ApiError::invalid("expires_after", "`expires_after[seconds]`: a whole number")
                })?;
                expires_after = Some(seconds);
            }
            "expires_after[anchor]" => {
                if text(&state, field, "expires_after").await? != "created_at" {
                    let reason = "`expires_after[anchor]`: only `created_at` is served";
                    return Err(ApiError::invalid("expires_after", reason).into());
                }
            }
            other => {
                let reason = format!("`{}`: no such field, or a second one", shown(other));
                return Err(ApiError::invalid("body", reason).into());
            }
        }
    }
    let Some((upload, filename)) = upload else {
        return Err(ApiError::invalid("file", "`file` is missing").into());
    };
    let finish = move || upload.finish(&filename, purpose.as_deref(), expires_after, now());
    Ok(reply::ok(&on_disk(finish).await?))
}

fn shown(name: &str) -> String {
    name.chars().take(100).collect()
}

/// Waits for the next part of a form, at most for the time limit of bodies.
async fn in_time<T>(
    state: &Shared,
    part: impl Future<Output = Result<T, MultipartError>>,
) -> Result<T, ApiError> {
    let time = state.config.receive_timeout;
    match timeout(time, part).await {
        Ok(part) => part.map_err(|error| ApiError::invalid("body", cause(&error))),
        Err(_) => Err(ApiError::BodyTimeout { seconds: time.as_secs() }),
    }
}

/// Returns the innermost reason of an error.
fn cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

async fn write(
    state: &Shared,
    mut upload: Upload,
    mut field: Field<'_>,
    taken: &TakenBytes,
) -> Result<Upload, ApiError> {
    while let Some(part) = in_time(state, field.chunk()).await? {
        taken.add(part.len());
        upload = on_disk(move || upload.write(&part).map(|()| upload)).await?;
    }
    Ok(upload)
}

async fn text(
    state: &Shared,
    mut field: Field<'_>,
    name: &'static str,
) -> Result<String, ApiError> {
    let mut text = Vec::new();
    while let Some(part) = in_time(state, field.chunk()).await? {
        text.extend_from_slice(&part);
        if text.len() > FIELD_BYTES {
            return Err(ApiError::invalid(name, format!("`{name}`: too long")));
        }
    }
    String::from_utf8(text).map_err(|_| ApiError::invalid(name, format!("`{name}`: not UTF-8")))
}

/// Lists the files of an API key, the newest first.
#[utoipa::path(
    get,
    path = "/v1/files",
    operation_id = "list_files",
    params(
        ("after" = Option<String>, Query, description = "The last file of the page before"),
        ("limit" = Option<usize>, Query, description = "The length of a page"),
        ("order" = Option<String>, Query, description = "`asc` or `desc`"),
        ("purpose" = Option<String>, Query, description = "`batch` or `batch_output`"),
    ),
    responses(
        (status = 200, description = "The files", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn list(client: StoreClient, uri: Uri) -> Result<Response, Failure> {
    let wanted = PageQuery::of(&uri)?;
    let mut files = client.run(move |store, owner| Ok(store.files(owner, now()))).await?;
    if let Some(purpose) = &wanted.purpose {
        files.retain(|file| file.purpose == *purpose);
    }
    Ok(reply::ok(&wanted.page(files, PAGE, PAGE, |file: &FileObject| &file.id)?))
}

/// Shows a file.
#[utoipa::path(
    get,
    path = "/v1/files/{id}",
    operation_id = "retrieve_file",
    params(("id" = String, Path, description = "Name of the file")),
    responses(
        (status = 200, description = "The file", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn retrieve(
    client: StoreClient,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    Ok(reply::ok(&client.run(move |store, owner| store.file(owner, &id, now())).await?))
}

/// The confirmation that a file was deleted.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeletedFile {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Deletes a file.
#[utoipa::path(
    delete,
    path = "/v1/files/{id}",
    operation_id = "delete_file",
    params(("id" = String, Path, description = "Name of the file")),
    responses(
        (status = 200, description = "It is gone", body = DeletedFile),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn delete(
    client: StoreClient,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let name = id.clone();
    client.run(move |store, owner| store.delete_file(owner, &name, now())).await?;
    Ok(reply::ok(&DeletedFile { id, object: "file", deleted: true }))
}

/// Sends the content of a file.
#[utoipa::path(
    get,
    path = "/v1/files/{id}/content",
    operation_id = "content_file",
    params(("id" = String, Path, description = "Name of the file")),
    responses(
        (status = 200, description = "The lines of the file"),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn content(
    client: StoreClient,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let (object, file) = client.run(move |store, owner| store.content(owner, &id, now())).await?;
    let (sender, body) = Channel::<Bytes>::new(1);
    tokio::spawn(send(file, object.bytes, sender));
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
    headers.insert(CONTENT_LENGTH, object.bytes.into());
    headers.insert(CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    Ok(response)
}

/// Sends a file's content as fast as the client reads it.
async fn send(file: File, bytes: u64, mut sender: Sender<Bytes>) {
    let mut file = file.take(bytes);
    loop {
        let read = spawn_blocking(move || {
            let mut part = vec![0; CHUNK];
            let read = file.read(&mut part)?;
            part.truncate(read);
            std::io::Result::Ok((part, file))
        });
        let Ok(Ok((part, rest))) = read.await else {
            tracing::warn!("a file of a batch could not be read to its end");
            return;
        };
        file = rest;
        if part.is_empty() || sender.send_data(part.into()).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(uri: &str) -> Result<(Vec<u32>, bool), ApiError> {
        let names: Vec<String> = (0..10).rev().map(|number| number.to_string()).collect();
        let page = PageQuery::of(&uri.parse().unwrap())?.page(names, 5, 3, |name| name)?;
        assert_eq!(page.first_id, page.data.first().cloned());
        assert_eq!(page.last_id, page.data.last().cloned());
        Ok((page.data.iter().map(|name| name.parse().unwrap()).collect(), page.has_more))
    }

    #[test]
    fn a_list_has_pages() {
        for (uri, expected) in [
            ("/v1/files", Ok((vec![9, 8, 7], true))),
            ("/v1/files?limit=5&after=5", Ok((vec![4, 3, 2, 1, 0], false))),
            ("/v1/files?limit=5&after=6", Ok((vec![5, 4, 3, 2, 1], true))),
            ("/v1/files?after=0", Ok((vec![], false))),
            ("/v1/files?order=asc&limit=2&after=3", Ok((vec![4, 5], true))),
            ("/v1/files?after=x", Err(400)),
            ("/v1/files?limit=0", Err(400)),
            ("/v1/files?limit=6", Err(400)),
            ("/v1/files?limit=x", Err(400)),
            ("/v1/files?order=up", Err(400)),
        ] {
            assert_eq!(page(uri).map_err(|error| error.status()), expected, "{uri}");
        }
    }
}
