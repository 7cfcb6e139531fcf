//! JPEG (ITU-T T.81): reads the frame header, and decodes with one of two decoders.
//!
//! libjpeg-turbo-rs gives the same bytes as libjpeg-turbo, and therefore as Pillow. It panics on
//! images with four components of unequal sampling, so zune-jpeg (in the crate `image`) decodes
//! these.

use image::ImageDecoder;
use image::codecs::jpeg::JpegDecoder;
use libjpeg_turbo_rs::decode::pipeline::Decoder;
use libjpeg_turbo_rs::{DecodeLimits, JpegError, PixelFormat};

use crate::error::ImageError;
use crate::format::Format;
use crate::limits::Limits;
use crate::orientation::Orientation;

/// The properties of a JPEG that are stored before the first scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) orientation: Orientation,
    /// True if there are four components, as in CMYK, and not all have the same sampling factors.
    uneven_inks: bool,
}

impl Frame {
    /// Reads all segments before the first scan.
    pub(crate) fn read(file: &[u8]) -> Result<Self, ImageError> {
        let mut frame = None;
        let mut orientation = None;
        for segment in Segments(file.get(2..).unwrap_or_default()) {
            let (marker, content) = segment?;
            match marker {
                0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                    frame = Some(Self::of(marker, content)?);
                }
                0xe1 if orientation.is_none() => {
                    orientation = content.strip_prefix(b"Exif\0\0").map(Orientation::of_exif);
                }
                0xda => {
                    let frame = frame.ok_or_else(|| damaged("it has no frame"))?;
                    let orientation = orientation.unwrap_or(Orientation::UPRIGHT);
                    return Ok(Self { orientation, ..frame });
                }
                _ => {}
            }
        }
        Err(damaged("it ends before its pixels"))
    }

    fn of(marker: u8, content: &[u8]) -> Result<Self, ImageError> {
        match marker {
            0xc0..=0xc2 => {}
            0xc3 => return Err(ImageError::UnreadJpeg("lossless")),
            0xc9..=0xcb => return Err(ImageError::UnreadJpeg("arithmetic coding")),
            _ => return Err(ImageError::UnreadJpeg("hierarchical")),
        }
        let Some(([precision, h1, h0, w1, w0, count], components)) = content.split_first_chunk()
        else {
            return Err(damaged("its frame is cut off"));
        };
        if *precision != 8 {
            return Err(ImageError::UnreadJpeg("more than 8 bits a value"));
        }
        let sizes: Vec<u8> = components.chunks_exact(3).map(|component| component[1]).collect();
        if sizes.len() != usize::from(*count) {
            return Err(damaged("its frame is cut off"));
        }
        if !matches!(count, 1 | 3 | 4) {
            return Err(ImageError::UnreadJpeg("neither 1, 3 nor 4 components"));
        }
        Ok(Self {
            width: u32::from(u16::from_be_bytes([*w1, *w0])),
            height: u32::from(u16::from_be_bytes([*h1, *h0])),
            orientation: Orientation::UPRIGHT,
            uneven_inks: *count == 4 && sizes.iter().any(|size| *size != sizes[0]),
        })
    }

    /// Decodes into `rgb`, which has three bytes per pixel of the frame.
    pub(crate) fn decode(&self, file: &[u8], rgb: &mut [u8]) -> Result<(), ImageError> {
        let memory = Limits::decoder_bytes(u64::from(self.width) * u64::from(self.height));
        if self.uneven_inks {
            return self.decode_uneven(file, memory, rgb);
        }
        let limits = DecodeLimits {
            max_scans: Limits::JPEG_SCANS,
            max_memory: Some(memory),
            ..DecodeLimits::default()
        };
        let mut decoder = Decoder::new_with_limits(file, limits).map_err(refused)?;
        let header = decoder.header();
        // The file may have a second frame: libjpeg accepts it, and decoders differ in which frame
        // they use.
        if (header.width(), header.height()) != (self.width as usize, self.height as usize)
            || (header.components.len() == 4 && uneven(header.components.iter()))
        {
            return Err(damaged("its frames differ"));
        }
        decoder.set_output_format(PixelFormat::Rgb);
        decoder.decode_image_into(rgb).map_err(refused)?;
        Ok(())
    }

    fn decode_uneven(&self, file: &[u8], memory: u64, rgb: &mut [u8]) -> Result<(), ImageError> {
        let mut decoder = JpegDecoder::new(std::io::Cursor::new(file)).map_err(damaged)?;
        let mut limits = image::Limits::default();
        limits.max_alloc = Some(memory);
        decoder.set_limits(limits).map_err(damaged)?;
        if decoder.dimensions() != (self.width, self.height)
            || decoder.total_bytes() != rgb.len() as u64
        {
            return Err(damaged("its frames differ"));
        }
        decoder.read_image(rgb).map_err(damaged)
    }
}

fn uneven<'a>(
    mut components: impl Iterator<Item = &'a libjpeg_turbo_rs::common::types::ComponentInfo>,
) -> bool {
    let size = |component: &libjpeg_turbo_rs::common::types::ComponentInfo| {
        (component.horizontal_sampling, component.vertical_sampling)
    };
    let first = components.next().map(size);
    components.any(|component| Some(size(component)) != first)
}

fn damaged(reason: impl ToString) -> ImageError {
    ImageError::damaged(Format::Jpeg, reason)
}

fn refused(error: JpegError) -> ImageError {
    match error {
        JpegError::LimitExceeded { .. } | JpegError::AllocationFailed { .. } => {
            ImageError::TooMuchMemory(Format::Jpeg)
        }
        other => damaged(other),
    }
}

/// An iterator over a file's segments after its first marker: each is a marker and its content.
struct Segments<'a>(&'a [u8]);

impl<'a> Iterator for Segments<'a> {
    type Item = Result<(u8, &'a [u8]), ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            // Bytes between segments are skipped, as in libjpeg. Any number of 0xff may pad a
            // marker.
            let start = self.0.iter().position(|byte| *byte == 0xff)?;
            let length = self.0[start..].iter().position(|byte| *byte != 0xff)?;
            let marker = self.0[start + length];
            self.0 = &self.0[start + length + 1..];
            match marker {
                0x00 | 0x01 | 0xd0..=0xd8 => {}
                0xd9 => return None,
                _ => {
                    let length = usize::from(u16::from_be_bytes(*self.0.first_chunk()?));
                    let Some(content) = self.0.get(2..length.max(2)) else {
                        return Some(Err(damaged("a segment is cut off")));
                    };
                    self.0 = &self.0[length.max(2)..];
                    return Some(Ok((marker, content)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(marker: u8, precision: u8, components: &[u8]) -> Vec<u8> {
        let mut file = vec![0xff, 0xd8, 0xff, 0xff, marker];
        file.extend([0, 8 + 3 * components.len() as u8, precision, 0, 5, 1, 0]);
        file.push(components.len() as u8);
        file.extend(components.iter().flat_map(|size| [1, *size, 0]));
        file.extend([0xff, 0xda, 0, 2]);
        file
    }

    #[test]
    fn a_frame_is_read() {
        let read = Frame::read(&frame(0xc0, 8, &[0x22, 0x11, 0x11])).unwrap();
        assert_eq!((read.width, read.height, read.uneven_inks), (256, 5, false));
        assert!(Frame::read(&frame(0xc2, 8, &[0x22, 0x11, 0x11, 0x22])).unwrap().uneven_inks);
        assert!(!Frame::read(&frame(0xc2, 8, &[0x22; 4])).unwrap().uneven_inks);
    }

    #[test]
    fn kinds_that_are_not_read() {
        let refused = |marker, precision, components: &[u8]| {
            Frame::read(&frame(marker, precision, components)).unwrap_err()
        };
        assert_eq!(refused(0xc3, 8, &[0x11]), ImageError::UnreadJpeg("lossless"));
        assert_eq!(refused(0xc9, 8, &[0x11]), ImageError::UnreadJpeg("arithmetic coding"));
        assert_eq!(refused(0xc1, 12, &[0x11]), ImageError::UnreadJpeg("more than 8 bits a value"));
        assert!(matches!(refused(0xc0, 8, &[0x11; 2]), ImageError::UnreadJpeg(_)));
    }

    #[test]
    fn cut_anywhere_before_the_scan_it_is_damaged() {
        let whole = frame(0xc0, 8, &[0x11]);
        for length in 0..whole.len() {
            assert!(matches!(Frame::read(&whole[..length]), Err(ImageError::Damaged { .. })));
        }
    }
}
