//! Images, from a file to the patches that a vision tower reads. No I/O, no threads, and nothing of the network.
//!
//! [`inspect`] reads a file's header: its size, turned as EXIF says, and so the grid of positions that the decoder sees, without decoding a
//! pixel. [`identity`] names the image. [`prepare`] decodes, turns, puts transparent images on white, resizes, and writes the patches: bytes
//! in the order of `Qwen2VLImageProcessor` of transformers, which the hand scales and normalises.
//!
//! What is bit-equal to transformers and what is not is in ADR 38. Files are hostile: all work is bounded by [`Limits`], and nothing here
//! panics on what a file says.

mod decode;
mod error;
mod file;
mod geometry;
mod patches;
mod resize;
mod url;

pub use error::ImageError;
pub use file::{Format, Picture, inspect};
pub use geometry::{Geometry, Shape};
pub use patches::{Prepared, identity, prepare};
pub use url::{DataUrl, data_url};

/// What an image may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most pixels of a file's image, before it is resized.
    pub pixels: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { pixels: 50_000_000 }
    }
}
