//! Images as a vision tower reads them: files to patches of bytes.
//!
//! What a request goes through, in this order: [`DataUrl`] cuts a file out of a body, [`Header`]
//! says its size without decoding, [`Processing::grid`] how many positions it takes, [`Identity`]
//! names it, and [`Preparer::prepare`] decodes it, resizes it and writes its patches. Nothing here
//! reads a clock, a file or a socket, and no input makes it panic.
//!
//! The values are those of transformers' `Qwen2VLImageProcessor` with its default backend, before
//! it subtracts the mean; `docs/images.md` says for which files that is exact.

mod alpha;
mod data_url;
mod decode;
mod error;
mod format;
mod header;
mod identity;
mod jpeg;
mod limits;
mod orientation;
mod patches;
mod prepare;
mod processing;
mod resize;
mod webp;

pub use data_url::{DataUrl, decode_base64};
pub use error::ImageError;
pub use format::Format;
pub use header::Header;
pub use identity::Identity;
pub use limits::Limits;
pub use orientation::Orientation;
pub use prepare::Preparer;
pub use processing::{Grid, InvalidProcessing, Processing};
