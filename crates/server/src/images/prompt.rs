//! Prompts with images. The chat template writes one token per image; it is replaced by one token
//! per position of the image.

use std::sync::Arc;

use forebay_api::ApiError;
use forebay_engine::PromptImage;

use super::file::ImageFile;

/// A prompt with the positions of its images.
#[derive(Debug, Default)]
pub(crate) struct SeenPrompt {
    pub(crate) ids: Vec<i32>,
    pub(crate) images: Arc<[PromptImage]>,
}

/// Expands image placeholders: replaces the image token `token` of each image in `ids` by one
/// `token` per position of the image. `param` is the request's parameter that contains the prompt,
/// for errors.
///
/// # Errors
/// The number of these tokens in `ids` differs from the number of images.
pub(crate) fn spread(
    ids: Vec<i32>,
    token: i32,
    files: &[Arc<ImageFile>],
    param: &str,
) -> Result<SeenPrompt, ApiError> {
    let places = ids.iter().filter(|&&id| id == token).count();
    if places != files.len() {
        let reason = format!(
            "`{param}`: the prompt has {places} places for {} images: write one image token for each image, as the chat template does",
            files.len()
        );
        return Err(ApiError::invalid(param, reason));
    }
    if files.is_empty() {
        return Ok(SeenPrompt { ids, images: Arc::default() });
    }
    let all: usize = files.iter().map(|file| file.grid().positions() as usize).sum();
    let (mut spread, mut placed) = (Vec::with_capacity(ids.len() + all), Vec::new());
    let mut files = files.iter();
    for id in ids {
        let file = if id == token { files.next() } else { None };
        match file {
            Some(file) => {
                let grid = file.grid();
                placed.push((file.id(), spread.len() as u32, grid));
                spread.extend(std::iter::repeat_n(token, grid.positions() as usize));
            }
            None => spread.push(id),
        }
    }
    Ok(SeenPrompt { ids: spread, images: PromptImage::place(placed) })
}
