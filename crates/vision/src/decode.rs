//! Pixels: red, green and blue, a byte each.

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, Limits as CodecLimits, RgbImage};

use memchr::memmem;

use crate::error::ImageError;
use crate::file::{Format, Picture, open};

/// Bytes that a decoder may take for each pixel: 16 bits of four channels, and once more for what it does with them.
const PIXEL_BYTES: u64 = 16;
/// What it may take besides.
const DECODER_BYTES: u64 = 16 << 20;

/// Decodes the image of `file`, turns it as EXIF says, and puts it on white where it is transparent.
///
/// # Errors
/// The file is cut off or broken, or wants more memory than its size justifies.
pub(crate) fn decode(file: &[u8], picture: &Picture) -> Result<RgbImage, ImageError> {
    let mut rgb = by_codec(file, picture)?;
    if picture.orientation != Orientation::NoTransforms {
        let mut turned = DynamicImage::ImageRgb8(rgb);
        turned.apply_orientation(picture.orientation);
        rgb = turned.into_rgb8();
    }
    if rgb.dimensions() != (picture.width, picture.height) {
        let reason = "its image is not of the size that its header says".into();
        return Err(ImageError::Broken { format: picture.format.name(), reason });
    }
    Ok(rgb)
}

fn by_codec(file: &[u8], picture: &Picture) -> Result<RgbImage, ImageError> {
    let format = picture.format;
    if format == Format::Jpeg && !is_whole(file) {
        let reason = "it is cut off".into();
        return Err(ImageError::Broken { format: format.name(), reason });
    }
    let mut decoder = open(file, format)?;
    let pixels = u64::from(picture.width) * u64::from(picture.height);
    let mut limits = CodecLimits::no_limits();
    limits.max_alloc = Some(pixels * PIXEL_BYTES + DECODER_BYTES);
    decoder.set_limits(limits).map_err(|error| format.broken(&error))?;
    let transparent = decoder.color_type().has_alpha();
    let decoded = DynamicImage::from_decoder(decoder).map_err(|error| format.broken(&error))?;
    Ok(if transparent { on_white(&decoded) } else { decoded.into_rgb8() })
}

/// Whether a JPEG file has an end behind its last scan. Its decoder paints grey where data is missing, and says nothing.
fn is_whole(file: &[u8]) -> bool {
    const SCAN: &[u8] = &[0xff, 0xda];
    const END: &[u8] = &[0xff, 0xd9];
    memmem::rfind(file, END) > memmem::rfind(file, SCAN)
}

/// Composites as `Image.alpha_composite` of Pillow does over white.
fn on_white(image: &DynamicImage) -> RgbImage {
    let rgba = image.to_rgba8();
    let mut rgb = RgbImage::new(rgba.width(), rgba.height());
    for (to, from) in rgb.pixels_mut().zip(rgba.pixels()) {
        let [colors @ .., alpha] = from.0;
        let alpha = u32::from(alpha);
        to.0 = colors.map(|color| {
            // Rounded to the nearest; 255 * 255 * 2 fits well into 32 bits.
            let mixed = u32::from(color) * alpha + 255 * (255 - alpha);
            ((mixed + 127) / 255) as u8
        });
    }
    rgb
}
