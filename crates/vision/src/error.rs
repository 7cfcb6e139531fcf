//! Why an image is refused.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::format::{Format, READ};

/// Why an image is refused. Each is a clause that reads well behind the name of a part of a
/// request: `messages[0].content[1]: ...`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// A URL that begins with `data:` and is none, or is not in base64.
    #[error("a data URL reads `data:image/png;base64,` and the file in base64")]
    DataUrl,
    /// A data URL of text, video or the like.
    #[error("the media type {0:?} is no image")]
    MediaType(String),
    /// Characters that base64 does not have, or a wrong number of them.
    #[error("the data is not base64")]
    Base64,
    /// The file is larger than it may be.
    #[error("the file has {bytes} bytes, and {limit} are the limit")]
    TooManyBytes {
        /// Bytes of the file.
        bytes: usize,
        /// Bytes that it may have.
        limit: usize,
    },
    /// The file begins like no image that anybody knows.
    #[error("the data is no image: {READ} are read")]
    UnknownFormat,
    /// The file is an image of a kind that is not read.
    #[error("{0} is not read: {READ} are")]
    UnreadFormat(&'static str),
    /// A kind of JPEG that only scanners and archives write.
    #[error("this kind of JPEG is not read: {0}")]
    UnreadJpeg(&'static str),
    /// No pixels.
    #[error("the image has {width} x {height} pixels")]
    Empty {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// More pixels than a server takes.
    #[error(
        "the image has {width} x {height} pixels, and {limit} are the limit (--max-image-pixels)"
    )]
    TooManyPixels {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Pixels that an image may have.
        limit: u64,
    },
    /// One side is much longer than the other, so that no grid of patches fits.
    #[error(
        "the image has {width} x {height} pixels: one side is more than {limit} times the other"
    )]
    TooLong {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
        /// The largest ratio.
        limit: u32,
    },
    /// The file needs more memory for decoding than its pixels explain.
    #[error("the {0} file takes too much memory to decode")]
    TooMuchMemory(Format),
    /// The file is cut off, or its content contradicts itself.
    #[error("the {format} file is damaged or incomplete: {reason}")]
    Damaged {
        /// The format that the file begins like.
        format: Format,
        /// The decoder's message.
        reason: String,
    },
}

impl ImageError {
    pub(crate) fn damaged(format: Format, reason: impl ToString) -> Self {
        let mut reason = reason.to_string();
        // A decoder may quote the file, which is the client's and has any length.
        if let Some((end, _)) = reason.char_indices().nth(200) {
            reason.truncate(end);
        }
        Self::Damaged { format, reason }
    }
}

/// Calls `decoder`, and takes a panic of it for damage of the file: decoders are others' code.
/// Nothing but bytes may outlive `decoder`.
pub(crate) fn contained<T>(
    format: Format,
    decoder: impl FnOnce() -> Result<T, ImageError>,
) -> Result<T, ImageError> {
    catch_unwind(AssertUnwindSafe(decoder))
        .unwrap_or_else(|_| Err(ImageError::damaged(format, "its decoder gave up")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_damage() {
        let error = contained::<()>(Format::WebP, || panic!("of somebody else")).unwrap_err();
        let told = "the WebP file is damaged or incomplete: its decoder gave up";
        assert_eq!(error.to_string(), told);
    }

    #[test]
    fn what_a_decoder_quotes_is_cut() {
        let error = ImageError::damaged(Format::Png, "ä".repeat(1000));
        assert_eq!(error.to_string().chars().filter(|letter| *letter == 'ä').count(), 200);
    }
}
