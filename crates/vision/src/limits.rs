//! The limits on an image.

use crate::error::ImageError;
use crate::processing::Processing;

/// The limits on an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of pixels that an image's header may state.
    pub max_pixels: u64,
    /// The largest ratio of the longer side to the shorter one.
    pub max_ratio: u32,
}

impl Default for Limits {
    /// 50 million pixels, and the ratio above which transformers refuses an image.
    fn default() -> Self {
        Self { max_pixels: 50_000_000, max_ratio: 200 }
    }
}

impl Limits {
    /// The largest number of scans of a progressive JPEG. Each scan visits all blocks, however
    /// few bytes the scan has in the file. Encoders write about ten scans.
    pub(crate) const JPEG_SCANS: usize = 64;

    /// The number of bytes that a decoder may allocate for an image of `pixels` pixels,
    /// including its output. Pixels have at most eight bytes in any format, and a progressive JPEG
    /// keeps six bytes of coefficients per pixel.
    pub(crate) fn decoder_bytes(pixels: u64) -> u64 {
        pixels.saturating_mul(16).saturating_add(16 << 20)
    }

    /// The largest number of bytes that preparing an image takes, for any image within the limits.
    pub fn decoding_bytes(&self, processing: &Processing) -> usize {
        let side = u32::try_from(self.max_pixels.isqrt() + 1).unwrap_or(u32::MAX);
        let square = Self::preparing_bytes((side, side), true, processing);
        // For images that are not square, rounding may add a few more positions.
        square.saturating_add(square / 16)
    }

    /// The number of bytes that preparing an image takes. `(width, height)` is the size of the
    /// upright image in pixels. `turned` is true if the stored image has to be rotated.
    pub(crate) fn preparing_bytes(
        (width, height): (u32, u32),
        turned: bool,
        processing: &Processing,
    ) -> usize {
        let grid = processing.grid(width, height);
        let (wide, high) = processing.resized(grid);
        let rgb = |width, height| 3 * u64::from(width) * u64::from(height);
        let stored = rgb(width, height) * if turned { 2 } else { 1 };
        let resized = rgb(wide, height).saturating_add(rgb(wide, high));
        let decoder = Self::decoder_bytes(u64::from(width) * u64::from(height));
        let all = decoder.saturating_add(stored).saturating_add(resized);
        usize::try_from(all).unwrap_or(usize::MAX).saturating_add(processing.bytes(grid))
    }

    pub(crate) fn check(&self, width: u32, height: u32) -> Result<(), ImageError> {
        let (short, long) = (width.min(height), width.max(height));
        if short == 0 {
            return Err(ImageError::Empty { width, height });
        }
        if u64::from(width) * u64::from(height) > self.max_pixels {
            return Err(ImageError::TooManyPixels { width, height, limit: self.max_pixels });
        }
        if u64::from(long) > u64::from(short) * u64::from(self.max_ratio) {
            return Err(ImageError::TooLong { width, height, limit: self.max_ratio });
        }
        Ok(())
    }
}
