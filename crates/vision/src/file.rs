//! What a file says of itself, before a pixel is decoded.

use std::io::Cursor;

use image::codecs::bmp::BmpDecoder;
use image::codecs::gif::GifDecoder;
use image::codecs::jpeg::JpegDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{ImageDecoder, ImageError as CodecError};

use crate::Limits;
use crate::error::ImageError;
use crate::geometry::{Geometry, Shape};

/// A format that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Portable Network Graphics.
    Png,
    /// JPEG, baseline and progressive.
    Jpeg,
    /// WebP, lossless and lossy; of an animation the first frame.
    WebP,
    /// GIF; of an animation the first frame.
    Gif,
    /// Windows bitmap.
    Bmp,
}

impl Format {
    /// By a file's first bytes; what it is called does not count.
    #[must_use]
    pub fn of(file: &[u8]) -> Option<Self> {
        match file {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'B', b'M', ..] => Some(Self::Bmp),
            _ => None,
        }
    }

    /// What people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        }
    }

    pub(crate) fn broken(self, error: &CodecError) -> ImageError {
        ImageError::Broken { format: self.name(), reason: error.to_string() }
    }
}

/// A file whose header was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Picture {
    /// What it is.
    pub format: Format,
    /// Pixels as it is shown: turned as EXIF says.
    pub width: u32,
    /// Pixels as it is shown: turned as EXIF says.
    pub height: u32,
    /// What a model sees of it.
    pub shape: Shape,
    pub(crate) orientation: Orientation,
}

/// Reads the header of a file.
///
/// # Errors
/// It is no image, its header is broken, or its image is too large, too long or empty.
pub fn inspect(file: &[u8], geometry: &Geometry, limits: Limits) -> Result<Picture, ImageError> {
    let format = Format::of(file).ok_or(ImageError::Format)?;
    let mut decoder = open(file, format)?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(ImageError::Empty { width, height });
    }
    if u64::from(width) * u64::from(height) > limits.pixels {
        return Err(ImageError::TooLarge { width, height, limit: limits.pixels });
    }
    // EXIF that can't be read says nothing.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let (width, height) = if turns(orientation) { (height, width) } else { (width, height) };
    let shape = geometry.shape(width, height)?;
    Ok(Picture { format, width, height, shape, orientation })
}

/// Whether rows become columns.
pub(crate) fn turns(orientation: Orientation) -> bool {
    match orientation {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => true,
        Orientation::NoTransforms
        | Orientation::Rotate180
        | Orientation::FlipHorizontal
        | Orientation::FlipVertical => false,
    }
}

/// A decoder that has read the header. It is told of no limits yet.
pub(crate) fn open(file: &[u8], format: Format) -> Result<Box<dyn ImageDecoder + '_>, ImageError> {
    let bytes = Cursor::new(file);
    let opened: Result<Box<dyn ImageDecoder>, CodecError> = match format {
        Format::Png => PngDecoder::new(bytes).map(|decoder| Box::new(decoder) as _),
        Format::Jpeg => JpegDecoder::new(bytes).map(|decoder| Box::new(decoder) as _),
        Format::WebP => WebPDecoder::new(bytes).map(|decoder| Box::new(decoder) as _),
        Format::Gif => GifDecoder::new(bytes).map(|decoder| Box::new(decoder) as _),
        Format::Bmp => BmpDecoder::new(bytes).map(|decoder| Box::new(decoder) as _),
    };
    opened.map_err(|error| format.broken(&error))
}
