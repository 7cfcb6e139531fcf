//! Detects a file's format from its first bytes, because file names and media types may be wrong.

use std::fmt;

use crate::error::ImageError;

/// A supported format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Portable Network Graphics. For an animation, the default image is used.
    Png,
    /// JPEG: baseline or progressive, with 8 bits per value.
    Jpeg,
    /// WebP. For an animation, the first frame is used.
    WebP,
    /// GIF. Only the first frame is used.
    Gif,
    /// Windows bitmaps.
    Bmp,
}

/// The supported formats, for error messages.
pub(crate) const READ: &str = "PNG, JPEG, WebP, GIF and BMP";

/// Brands of ISO's media files (ISO/IEC 14496-12) that mark a still image.
const ISO_BRANDS: [(&[u8; 4], &str); 8] = [
    (b"avif", "AVIF"),
    (b"avis", "AVIF"),
    (b"heic", "HEIC"),
    (b"heix", "HEIC"),
    (b"hevc", "HEIC"),
    (b"heim", "HEIC"),
    (b"mif1", "HEIC"),
    (b"msf1", "HEIC"),
];

const UNREAD: [(&[u8], &str); 9] = [
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG"),
    (b"\0\0\x01\0", "ICO"),
    (b"%PDF", "PDF"),
];

impl Format {
    /// Detects the format of a file.
    ///
    /// # Errors
    /// [`ImageError::UnreadFormat`] if the format is known but not supported, else
    /// [`ImageError::UnknownFormat`].
    pub fn of(file: &[u8]) -> Result<Self, ImageError> {
        if file.starts_with(b"\x89PNG\r\n\x1a\n") {
            return Ok(Self::Png);
        }
        if file.starts_with(b"\xff\xd8\xff") {
            return Ok(Self::Jpeg);
        }
        if file.starts_with(b"RIFF") && file.get(8..12) == Some(b"WEBP") {
            return Ok(Self::WebP);
        }
        if file.starts_with(b"GIF87a") || file.starts_with(b"GIF89a") {
            return Ok(Self::Gif);
        }
        if file.starts_with(b"BM") {
            return Ok(Self::Bmp);
        }
        Err(unread(file).map_or(ImageError::UnknownFormat, ImageError::UnreadFormat))
    }

    /// The name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

fn unread(file: &[u8]) -> Option<&'static str> {
    if file.get(4..8) == Some(b"ftyp") {
        let brand = file.get(8..12)?;
        return ISO_BRANDS.iter().find(|(name, _)| *name == brand).map(|(_, name)| *name);
    }
    UNREAD.iter().find(|(magic, _)| file.starts_with(magic)).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_that_are_not_read_are_named() {
        let name = |file: &[u8]| Format::of(file).unwrap_err();
        assert_eq!(name(b"\0\0\0\x20ftypavif\0\0\0\0"), ImageError::UnreadFormat("AVIF"));
        assert_eq!(name(b"\0\0\0\x20ftypheic\0\0\0\0"), ImageError::UnreadFormat("HEIC"));
        assert_eq!(name(b"\xff\x0a\0\0"), ImageError::UnreadFormat("JPEG XL"));
        assert_eq!(name(b"<svg xmlns='x'/>"), ImageError::UnreadFormat("SVG"));
        assert_eq!(name(b"II*\0rest"), ImageError::UnreadFormat("TIFF"));
        assert_eq!(name(b"\0\0\0\x20ftypmp42"), ImageError::UnknownFormat);
        assert_eq!(name(b"RIFF\0\0\0\0WAVE"), ImageError::UnknownFormat);
        assert_eq!(name(b""), ImageError::UnknownFormat);
        assert_eq!(
            name(b"II*\0").to_string(),
            "TIFF is not read: PNG, JPEG, WebP, GIF and BMP are"
        );
    }
}
