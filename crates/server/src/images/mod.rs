//! Images of requests: from URLs to prompt positions, and to patches in the arena if the engine
//! needs them.
//!
//! The intake threads decode base64 and hash files. A request is submitted once the headers of its
//! images are read. Other threads decode the pixels, but only if the scheduler does not find the
//! image in cached pages. So a repeated image needs neither patches nor the vision tower.

mod file;
pub(crate) mod model;
mod prompt;

use std::sync::Arc;

use bytes::Bytes;
use forebay_api::{ApiError, ImagePart, Limits};
use forebay_fetch::FetchError;
use forebay_http::Charge;
use forebay_vision::{DataUrl, ImageError};
use tokio::task::JoinSet;

pub(crate) use file::{ImageFile, Shown};
pub use model::ImageModel;
pub(crate) use prompt::{SeenPrompt, spread};

use crate::state::Shared;

/// Reads the files of a conversation's images, and their headers. The files are charged to the
/// client of `charge`.
///
/// # Errors
/// An image is invalid, too large, or not available. The error names the content part of the first
/// such image.
pub(crate) async fn read(
    state: &Shared,
    parts: Vec<ImagePart>,
    limits: Limits,
    charge: &Charge,
) -> Result<Vec<Arc<ImageFile>>, ApiError> {
    let Some(model) = state.model.images.filter(|_| !parts.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut reading = JoinSet::new();
    for (index, part) in parts.into_iter().enumerate() {
        // A file stays charged until its request has finished, because the device may need the
        // image again.
        let (state, charge) = (Arc::clone(state), charge.beside());
        reading.spawn(async move { (index, read_one(&state, model, part, charge).await) });
    }
    let mut read = reading.join_all().await;
    // If several images are invalid, the error names the first.
    read.sort_unstable_by_key(|&(index, _)| index);
    let files = read.into_iter().map(|(_, file)| file).collect::<Result<Vec<_>, _>>()?;
    let room = state.image_positions()?;
    for file in &files {
        let positions = file.grid().positions();
        if positions > room.min(limits.context_length) {
            let param = file.param();
            let reason = format!(
                "`{param}`: the image takes {positions} positions, and there is room for {}",
                room.min(limits.context_length)
            );
            return Err(ApiError::invalid(param, reason));
        }
        let (bytes, most) = (file.decoding_bytes(), state.intake.pixel_bytes());
        if bytes > most {
            let param = file.param();
            let reason = format!(
                "`{param}`: the image takes up to {bytes} bytes to decode, and {most} are set aside \
                 for that: --max-request-bytes-in-flight makes that more"
            );
            return Err(ApiError::invalid(param, reason));
        }
    }
    Ok(files)
}

async fn read_one(
    state: &Shared,
    model: ImageModel,
    part: ImagePart,
    charge: Charge,
) -> Result<Arc<ImageFile>, ApiError> {
    let ImagePart { param, url } = part;
    let client = charge.client();
    let told = |error: ImageError| image_error(&param, &error);
    let fetched = match DataUrl::parse(&url).map_err(told)? {
        Some(_) => None,
        None => Some(fetch(state, &param, &url, &charge).await?),
    };
    let bytes = fetched.as_ref().map_or(url.len(), Bytes::len);
    let work = move || {
        let told = |error: ImageError| image_error(&param, &error);
        let bytes = match (fetched, DataUrl::parse(&url).map_err(told)?) {
            (None, Some(data)) => {
                charge.set(data.most_bytes())?;
                data.decode(data.most_bytes()).map_err(told)?.into()
            }
            (fetched, _) => fetched.unwrap_or_default(),
        };
        drop(url);
        charge.set(bytes.len())?;
        ImageFile::new(bytes, &model, param.clone(), charge).map_err(told)
    };
    let file = state.intake.read(client, bytes, work).await?;
    Ok(Arc::new(file))
}

/// Fetches the image file in `param` from the network or the local disk. Its bytes are charged as
/// they arrive.
async fn fetch(state: &Shared, param: &str, url: &str, charge: &Charge) -> Result<Bytes, ApiError> {
    let refused = |error: FetchError| ApiError::invalid(param, format!("`{param}`: {error}"));
    let fetcher = state.model.fetcher.as_ref().ok_or(FetchError::Off).map_err(refused)?;
    let _permit = state.intake.fetches().take(charge.client()).await;
    let mut full = None;
    let room = |bytes| match charge.at_least(bytes) {
        Ok(()) => true,
        Err(error) => {
            full = Some(error);
            false
        }
    };
    let file = fetcher.fetch(url, room).await;
    match full {
        Some(error) => Err(error.into()),
        None => file.map_err(refused),
    }
}

/// Converts an error of the image in `param` to the client's error.
pub(crate) fn image_error(param: &str, error: &ImageError) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {error}"))
}
