//! WebP's container (RFC 9649): what its decoder allocates before it checks is checked here.

use crate::error::ImageError;
use crate::format::Format;
use crate::orientation::Orientation;

/// Bytes of a frame's own fields before its chunks.
const FRAME_FIELDS: usize = 16;

/// The orientation, if the file has one.
pub(crate) fn orientation(file: &[u8]) -> Orientation {
    let exif = chunks(file.get(12..).unwrap_or_default())
        .find(|(name, _)| *name == *b"EXIF")
        .map(|(_, content)| content.strip_prefix(b"Exif\0\0").unwrap_or(content));
    exif.map_or(Orientation::UPRIGHT, Orientation::of_exif)
}

/// Refuses a lossy image that is larger than the canvas it is on, or empty. The decoder makes room for the first, and decodes it, before it
/// compares them, and panics at the second.
pub(crate) fn check_lossy(file: &[u8], width: u32, height: u32) -> Result<(), ImageError> {
    let top = chunks(file.get(12..).unwrap_or_default());
    let inner = top.flat_map(|(name, content)| match &name {
        b"ANMF" => chunks(content.get(FRAME_FIELDS..).unwrap_or_default()).collect(),
        _ => vec![(name, content)],
    });
    for (_, frame) in inner.filter(|(name, _)| *name == *b"VP8 ") {
        // RFC 6386, 9.1: three bytes of the frame, three of a start code, twice 14 bits of size and two of scale.
        let Some([_, _, _, _, _, _, w0, w1, h0, h1]) = frame.first_chunk() else {
            return Err(ImageError::damaged(Format::WebP, "a frame is cut off"));
        };
        let side = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
        let (wide, high) = (side(*w0, *w1), side(*h0, *h1));
        if wide > width || high > height {
            return Err(ImageError::damaged(Format::WebP, "a frame is larger than its canvas"));
        }
        if wide == 0 || high == 0 {
            return Err(ImageError::damaged(Format::WebP, "a frame has no pixels"));
        }
    }
    Ok(())
}

/// Names and contents of RIFF chunks, as far as they are whole.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let (name, after) = rest.split_first_chunk::<4>()?;
        let (size, after) = after.split_first_chunk::<4>()?;
        let size = u32::from_le_bytes(*size) as usize;
        let content = after.get(..size.min(after.len()))?;
        // Chunks begin at even places.
        rest = after.get(size.saturating_add(size % 2)..).unwrap_or_default();
        Some((*name, content))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
        let mut file = b"RIFF\0\0\0\0WEBP".to_vec();
        for (name, content) in chunks {
            file.extend(*name);
            file.extend((content.len() as u32).to_le_bytes());
            file.extend(*content);
            file.extend(vec![0; content.len() % 2]);
        }
        file
    }

    #[test]
    fn a_frame_beyond_its_canvas() {
        let frame = [0, 0, 0, 0x9d, 1, 0x2a, 100, 0xc0, 50, 0];
        let still = file(&[(b"ICCP", b"odd"), (b"VP8 ", &frame)]);
        assert_eq!(check_lossy(&still, 100, 50), Ok(()));
        assert!(check_lossy(&still, 99, 50).is_err());
        let animated =
            file(&[(b"ANMF", &[vec![0; 16], file(&[(b"VP8 ", &frame)])[12..].to_vec()].concat())]);
        assert_eq!(check_lossy(&animated, 100, 50), Ok(()));
        assert!(check_lossy(&animated, 100, 49).is_err());
        assert!(check_lossy(&still[..still.len() - 1], 100, 50).is_err());
        let empty = [0, 0, 0, 0x9d, 1, 0x2a, 0, 0xc0, 50, 0];
        assert!(check_lossy(&file(&[(b"VP8 ", &empty)]), 100, 50).is_err());
    }

    #[test]
    fn orientation_with_and_without_the_name_of_the_block() {
        let tag = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x08\0\0\0\0\0\0";
        let named = [b"Exif\0\0", tag.as_slice()].concat();
        assert_eq!(orientation(&file(&[(b"EXIF", tag)])).number(), 8);
        assert_eq!(orientation(&file(&[(b"VP8L", b"x"), (b"EXIF", &named)])).number(), 8);
        assert_eq!(orientation(b"RIFF"), Orientation::UPRIGHT);
    }
}
