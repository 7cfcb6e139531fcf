//! Images of requests: from URLs to positions of the prompt, and to patches in the arena if the
//! engine needs them.
//!
//! The intake threads do the long work: base64, hashes, pixels. A request is submitted when the
//! headers of its images are read. Pixels are decoded only if the scheduler has the image nowhere.
//! So an image that was seen before costs neither patches nor tower.

mod file;
pub(crate) mod model;
mod prompt;

use std::sync::Arc;

use bytes::Bytes;
use forebay_api::{ApiError, ImagePart, Limits};
use forebay_fetch::FetchError;
use forebay_vision::{DataUrl, ImageError};
use tokio::task::JoinSet;

pub(crate) use file::{ImageFile, Shown};
pub use model::ImageModel;
pub(crate) use prompt::{SeenPrompt, spread};

use crate::budget::Charge;
use crate::state::Shared;

/// Reads the files of a conversation's images, and their headers.
///
/// # Errors
/// An image is invalid, too large, or not available. The error names the part of the first.
pub(crate) async fn read(
    state: &Shared,
    parts: Vec<ImagePart>,
    limits: Limits,
) -> Result<Vec<Arc<ImageFile>>, ApiError> {
    let Some(model) = state.model.images.filter(|_| !parts.is_empty()) else {
        return Ok(Vec::new());
    };
    let mut reading = JoinSet::new();
    for (index, part) in parts.into_iter().enumerate() {
        let state = Arc::clone(state);
        reading.spawn(async move { (index, read_one(&state, model, part).await) });
    }
    let mut read = reading.join_all().await;
    // Of several that are wrong the first is named.
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
    }
    Ok(files)
}

async fn read_one(
    state: &Shared,
    model: ImageModel,
    part: ImagePart,
) -> Result<Arc<ImageFile>, ApiError> {
    let ImagePart { param, url } = part;
    // A file is charged until its request has ended: the device may have to be given it again.
    let charge = state.budget.open();
    let told = |error: ImageError| image_error(&param, &error);
    let fetched = match DataUrl::parse(&url).map_err(told)? {
        Some(_) => None,
        None => Some(fetch(state, &param, &url, &charge).await?),
    };
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
    let file = state.intake.read(work).await?;
    Ok(Arc::new(file))
}

/// The file of the network, or of this machine, that the image in `param` is. How large it is shows
/// only in the end, so the most is charged.
async fn fetch(state: &Shared, param: &str, url: &str, charge: &Charge) -> Result<Bytes, ApiError> {
    let refused = |error: FetchError| ApiError::invalid(param, format!("`{param}`: {error}"));
    let fetcher = state.model.fetcher.as_ref().ok_or(FetchError::Off).map_err(refused)?;
    charge.set(fetcher.max_bytes())?;
    fetcher.fetch(url).await.map_err(refused)
}

/// The error for a client about the image in `param`.
pub(crate) fn image_error(param: &str, error: &ImageError) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {error}"))
}
