//! Decodes PNG, WebP, GIF and BMP with the crate `image`, in bounded memory.

use std::io::Cursor;

use image::codecs::bmp::BmpDecoder;
use image::codecs::gif::GifDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::error::ImageError as Refusal;
use image::{ColorType, ImageDecoder, ImageResult};

use crate::alpha;
use crate::error::ImageError;
use crate::format::Format;
use crate::header::Header;
use crate::limits::Limits;
use crate::orientation::Orientation;
use crate::webp;

/// Returns the stored width and height, and the orientation.
pub(crate) fn measure(format: Format, file: &[u8]) -> Result<(u32, u32, Orientation), ImageError> {
    let mut decoder = open(format, file, 0)?;
    let (width, height) = decoder.dimensions();
    let orientation = match format {
        Format::Png => {
            let exif = decoder.exif_metadata().ok().flatten();
            exif.map_or(Orientation::UPRIGHT, |exif| Orientation::of_exif(&exif))
        }
        Format::WebP => webp::orientation(file),
        Format::Jpeg | Format::Gif | Format::Bmp => Orientation::UPRIGHT,
    };
    Ok((width, height, orientation))
}

/// Decodes into `rgb`, with three bytes per pixel. `raw` is a buffer for pixels in the file's
/// format.
pub(crate) fn decode(
    header: &Header,
    format: Format,
    file: &[u8],
    raw: &mut Vec<u8>,
    rgb: &mut [u8],
) -> Result<(), ImageError> {
    if format == Format::WebP {
        webp::check_lossy(file, header.width, header.height)?;
    }
    let decoder = open(format, file, u64::from(header.width) * u64::from(header.height))?;
    if decoder.dimensions() != (header.width, header.height) {
        return Err(ImageError::damaged(format, "its headers differ"));
    }
    let color = decoder.color_type();
    if color == ColorType::Rgb8 {
        return decoder.read_image_boxed(rgb).map_err(|error| refused(format, error));
    }
    let bytes = rgb.len() / 3 * usize::from(color.bytes_per_pixel());
    raw.resize(bytes, 0);
    decoder.read_image_boxed(raw).map_err(|error| refused(format, error))?;
    if !alpha::to_rgb(color, raw, rgb) {
        return Err(ImageError::damaged(format, format!("pixels of {color:?}")));
    }
    Ok(())
}

fn open<'a>(
    format: Format,
    file: &'a [u8],
    pixels: u64,
) -> Result<Box<dyn ImageDecoder + 'a>, ImageError> {
    open_unchecked(format, file, pixels).map_err(|error| refused(format, error))
}

fn open_unchecked<'a>(
    format: Format,
    file: &'a [u8],
    pixels: u64,
) -> ImageResult<Box<dyn ImageDecoder + 'a>> {
    let mut limits = image::Limits::default();
    limits.max_alloc = Some(Limits::decoder_bytes(pixels));
    let file = Cursor::new(file);
    let mut decoder: Box<dyn ImageDecoder + 'a> = match format {
        Format::Png => Box::new(PngDecoder::with_limits(file, limits.clone())?),
        Format::WebP => Box::new(WebPDecoder::new(file)?),
        Format::Gif => Box::new(GifDecoder::new(file)?),
        Format::Bmp | Format::Jpeg => Box::new(BmpDecoder::new(file)?),
    };
    decoder.set_limits(limits)?;
    Ok(decoder)
}

fn refused(format: Format, error: Refusal) -> ImageError {
    match error {
        Refusal::Limits(_) => ImageError::TooMuchMemory(format),
        other => ImageError::damaged(format, other),
    }
}
