//! Reads an image's size and orientation from the beginning of its file.

use crate::decode;
use crate::error::{ImageError, contained};
use crate::format::Format;
use crate::jpeg::Frame;
use crate::limits::Limits;
use crate::orientation::Orientation;
use crate::processing::Processing;

/// The properties of an image that are read from the beginning of its file: enough to compute its
/// grid without decoding pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub(crate) source: Source,
    /// The width of the image as stored, before it is rotated upright.
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) orientation: Orientation,
}

/// Which decoder is used for the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Jpeg(Frame),
    Other(Format),
}

impl Header {
    /// Reads the header of `file`, and refuses an image that exceeds `limits`.
    ///
    /// # Errors
    /// The format is not supported, the header is damaged, or the image is empty, has too many
    /// pixels, or one side is too long.
    pub fn read(file: &[u8], limits: &Limits) -> Result<Self, ImageError> {
        let header = match Format::of(file)? {
            Format::Jpeg => {
                let frame = Frame::read(file)?;
                Self {
                    source: Source::Jpeg(frame),
                    width: frame.width,
                    height: frame.height,
                    orientation: frame.orientation,
                }
            }
            format => {
                let (width, height, orientation) =
                    contained(format, || decode::measure(format, file))?;
                Self { source: Source::Other(format), width, height, orientation }
            }
        };
        limits.check(header.width, header.height)?;
        Ok(header)
    }

    /// The file's format.
    pub fn format(&self) -> Format {
        match self.source {
            Source::Jpeg(_) => Format::Jpeg,
            Source::Other(format) => format,
        }
    }

    /// The width and height of the upright image in pixels.
    pub fn size(&self) -> (u32, u32) {
        self.orientation.turned(self.width, self.height)
    }

    /// The orientation in which the image is stored.
    pub fn orientation(&self) -> Orientation {
        self.orientation
    }

    /// The largest number of bytes of memory that preparing the image takes: for its decoder, the
    /// pixels at each step, and the patches.
    pub fn decoding_bytes(&self, processing: &Processing) -> usize {
        let turned = self.orientation != Orientation::UPRIGHT;
        Limits::preparing_bytes(self.size(), turned, processing)
    }

    /// The size of the image in bytes, with three bytes per pixel.
    pub(crate) fn rgb_bytes(&self) -> usize {
        self.width as usize * self.height as usize * 3
    }
}
