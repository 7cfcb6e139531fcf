//! Images for a vision tower: from files to patches of bytes.
//!
//! An image goes through five steps. [`DataUrl`] extracts a file from a request body, and
//! [`Header`] reads its size without decoding. [`Processing::grid`] computes its positions, and
//! [`Identity`] identifies it. [`Preparer::prepare`] decodes it, resizes it and writes its patches.
//! The crate uses no clock, file or socket, and no input makes it panic.
//!
//! The patches have the values of transformers' `Qwen2VLImageProcessor` and `Gemma3ImageProcessor`
//! with their default backend, before the mean is subtracted. `docs/images.md` lists the files for
//! which the values are exact.
//!
//! ```
//! use forebay_vision::{DataUrl, Header, Identity, Limits, Preparer, Processing};
//!
//! // A PNG of 64 x 32 pixels.
//! let url = "data:image/png;base64,\
//!     iVBORw0KGgoAAAANSUhEUgAAAEAAAAAgCAIAAAAt/+nTAAAAN0lEQVR42u3PQQkAAAgEsItjHGMbyww+\
//!     hcEKLNP1WgQEBAQEBAQEBAQEBAQEBAQEBAQEBAQErhYqNACXmk2CgAAAAABJRU5ErkJggg==";
//! let file = DataUrl::parse(url)?.expect("no other URL").decode(1 << 20)?;
//! let header = Header::read(&file, &Limits::default())?;
//! assert_eq!(header.size(), (64, 32));
//!
//! // Patches of 16 x 16 pixels, and 2 x 2 of them are a position of the prompt.
//! let processing = Processing::new(16, 2, 32 * 32, 1 << 20)?;
//! let grid = processing.grid(64, 32);
//! assert_eq!(grid.positions(), 2);
//! let mut patches = vec![0; processing.bytes(grid)];
//! Preparer::new().prepare(&file, &header, &processing, &mut patches)?;
//! assert_eq!(patches[0], 200, "the red of its first pixel");
//! assert_eq!(Identity::of(&file, &processing), Identity::of(&file, &processing));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

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
