//! Why an image is not taken.

use thiserror::Error;

/// Why an image is not taken. Each reads on after the path of the part that has it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ImageError {
    /// The file is of another kind, or of none.
    #[error("the file is no image in a format that is read: PNG, JPEG, WebP, GIF or BMP")]
    Format,
    /// The file is broken.
    #[error("the {format} file can't be read: {reason}")]
    Broken {
        /// What it is.
        format: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The image has no pixels.
    #[error("the image has no pixels: {width}x{height}")]
    Empty {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
    },
    /// The image is too large.
    #[error("the image has {width}x{height} pixels, and {limit} are the most (--max-image-pixels)")]
    TooLarge {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// Most pixels.
        limit: u64,
    },
    /// The image is too long for its width, or the other way round.
    #[error("the image is {width}x{height} pixels: one side is more than 200 times the other")]
    TooLong {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
    },
    /// The URL is not base64, or has no data.
    #[error("the data URL can't be read: {0}")]
    Url(&'static str),
    /// The URL names another type.
    #[error("the data URL is of type {0:?}, which is no image")]
    MediaType(String),
    /// There was no memory, or no room where patches were to be written.
    #[error("the image could not be prepared: {0}")]
    NoRoom(String),
}
