//! Reasons for which an image is refused.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::format::{Format, READ};

/// Why an image is refused. Each message follows the location of the image in the request:
/// `messages[0].content[1]: ...`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The URL begins with `data:`, but is malformed or not in base64.
    #[error("a data URL reads `data:image/png;base64,` and the file in base64")]
    DataUrl,
    /// The data URL contains text, video or another type that is not an image.
    #[error("the media type {0:?} is no image")]
    MediaType(String),
    /// The text contains characters that are not base64, or has an impossible length.
    #[error("the data is not base64")]
    Base64,
    /// The file is too large.
    #[error("the file has {bytes} bytes, and {limit} are the limit")]
    TooManyBytes {
        /// Bytes of the file.
        bytes: usize,
        /// The largest number of bytes.
        limit: usize,
    },
    /// The file does not start like any known image format.
    #[error("the data is no image: {READ} are read")]
    UnknownFormat,
    /// The file is an image of a format that is not supported.
    #[error("{0} is not read: {READ} are")]
    UnreadFormat(&'static str),
    /// A variant of JPEG that is not supported. Only scanners and archives write these.
    #[error("this kind of JPEG is not read: {0}")]
    UnreadJpeg(&'static str),
    /// The image has no pixels.
    #[error("the image has {width} x {height} pixels")]
    Empty {
        /// Pixels per row.
        width: u32,
        /// The number of rows.
        height: u32,
    },
    /// The image has more pixels than the server accepts.
    #[error(
        "the image has {width} x {height} pixels, and {limit} are the limit (--max-image-pixels)"
    )]
    TooManyPixels {
        /// Pixels per row.
        width: u32,
        /// The number of rows.
        height: u32,
        /// The largest number of pixels of an image.
        limit: u64,
    },
    /// One side is much longer than the other, so no grid of patches fits.
    #[error(
        "the image has {width} x {height} pixels: one side is more than {limit} times the other"
    )]
    TooLong {
        /// Pixels per row.
        width: u32,
        /// The number of rows.
        height: u32,
        /// The largest ratio.
        limit: u32,
    },
    /// Decoding the file needs more memory than its number of pixels explains.
    #[error("the {0} file takes too much memory to decode")]
    TooMuchMemory(Format),
    /// The file is cut off, or its content contradicts itself.
    #[error("the {format} file is damaged or incomplete: {reason}")]
    Damaged {
        /// The format that the beginning of the file indicates.
        format: Format,
        /// The decoder's message.
        reason: String,
    },
}

impl ImageError {
    pub(crate) fn damaged(format: Format, reason: impl ToString) -> Self {
        let mut reason = reason.to_string();
        // A decoder may quote the file, which comes from the client, at any length.
        if let Some((end, _)) = reason.char_indices().nth(200) {
            reason.truncate(end);
        }
        Self::Damaged { format, reason }
    }
}

/// Calls `decoder`. Decoders are external code, so a panic is treated as a damaged file. A panic
/// may leave data that `decoder` was changing inconsistent: after the call, only plain bytes of
/// such data may be used.
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
