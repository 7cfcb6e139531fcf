//! JPEG files, with every value as libjpeg-turbo has it, which is what Pillow decodes with.

use std::panic::catch_unwind;

use image::RgbImage;
use libjpeg_turbo_rs::{DecodeLimits, Decoder, PixelFormat};

use crate::error::ImageError;
use crate::file::{Format, Picture};

/// Bytes that the decoder may take for each pixel: coefficients of three channels, and the pixels.
const PIXEL_BYTES: u64 = 16;
const DECODER_BYTES: u64 = 16 << 20;
/// Most scans of a progressive file. Encoders make about ten; each costs a pass over the image.
const SCANS: usize = 100;

/// Decodes the image of a file. It is not turned.
///
/// # Errors
/// The file is cut off or broken.
pub(crate) fn decode(file: &[u8], picture: &Picture) -> Result<RgbImage, ImageError> {
    // The decoder has no known panic. Files are hostile, and no file may end the thread that all others wait for.
    let decoded = catch_unwind(|| pixels(file, picture));
    decoded.unwrap_or_else(|_| Err(broken("the decoder gave up".into())))
}

fn broken(reason: String) -> ImageError {
    ImageError::Broken { format: Format::Jpeg.name(), reason }
}

fn pixels(file: &[u8], picture: &Picture) -> Result<RgbImage, ImageError> {
    let failed = |error: libjpeg_turbo_rs::JpegError| broken(error.to_string());
    let all = u64::from(picture.width) * u64::from(picture.height);
    let mut decoder = Decoder::new(file).map_err(failed)?;
    decoder.set_limits(DecodeLimits {
        max_pixels: all,
        max_scans: SCANS,
        max_memory: Some(all * PIXEL_BYTES + DECODER_BYTES),
        ..DecodeLimits::default()
    });
    let inks = decoder.header().components.len() == 4;
    decoder.set_output_format(if inks { PixelFormat::Cmyk } else { PixelFormat::Rgb });
    let image = decoder.decode_image().map_err(failed)?;
    let data =
        if inks { image.data.as_chunks().0.iter().flat_map(rgb_of).collect() } else { image.data };
    let (width, height) = (image.width as u32, image.height as u32);
    RgbImage::from_raw(width, height, data).ok_or_else(|| broken("it has another size".into()))
}

/// Colours of four inks, which JPEG files hold inverted, as Adobe's programs do; in Pillow's arithmetic (`cmyk2rgb`).
fn rgb_of(&[cyan, magenta, yellow, black]: &[u8; 4]) -> [u8; 3] {
    let light = u32::from(black);
    [cyan, magenta, yellow].map(|ink| {
        let product = (255 - u32::from(ink)) * light + 128;
        (light - ((product >> 8) + product >> 8)) as u8
    })
}
