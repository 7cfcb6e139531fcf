//! Images as a vision tower reads them: files to patches of bytes.
//!
//! A request goes through five steps. [`DataUrl`] cuts a file out of a body, and [`Header`] tells
//! its size without decoding. [`Processing::grid`] gives the number of its positions, and
//! [`Identity`] names it. [`Preparer::prepare`] decodes it, resizes it and writes its patches.
//! Nothing here reads a clock, a file or a socket, and no input makes it panic.
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
