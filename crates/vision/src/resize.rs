//! Resizing, as torchvision does on processors with AVX2: bicubic with antialiasing, in integers.

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use image::RgbImage;

use crate::error::ImageError;

/// The pixels of `image` at another size, rows from the top, three bytes a pixel.
///
/// torchvision resizes rows first and columns then, and rounds to bytes in between. The crate does the columns first where both change, so it
/// is called once for each: that is what makes the results equal.
///
/// # Errors
/// The crate refuses the sizes.
pub(crate) fn resize(image: RgbImage, width: u32, height: u32) -> Result<Vec<u8>, ImageError> {
    let (from_width, from_height) = image.dimensions();
    let mut pixels = image.into_raw();
    if from_width != width {
        pixels = pass(&pixels, (from_width, from_height), (width, from_height))?;
    }
    if from_height != height {
        pixels = pass(&pixels, (width, from_height), (width, height))?;
    }
    Ok(pixels)
}

/// One of the two passes.
fn pass(pixels: &[u8], from: (u32, u32), to: (u32, u32)) -> Result<Vec<u8>, ImageError> {
    let failed = |reason: String| ImageError::NoRoom(reason);
    let source = ImageRef::new(from.0, from.1, pixels, PixelType::U8x3)
        .map_err(|error| failed(error.to_string()))?;
    let mut target = Image::new(to.0, to.1, PixelType::U8x3);
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::CatmullRom))
        .use_alpha(false);
    Resizer::new()
        .resize(&source, &mut target, &options)
        .map_err(|error| failed(error.to_string()))?;
    Ok(target.into_vec())
}
