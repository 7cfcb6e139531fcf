//! Checks sizes in WebP's container (RFC 9649), because for some sizes the decoder allocates memory
//! before it checks the size.

use crate::error::ImageError;
use crate::format::Format;
use crate::orientation::Orientation;

/// Bytes of the fields of an animation frame, which precede its chunks.
const FRAME_FIELDS: usize = 16;

/// Returns the orientation that the file states, or upright if it states none.
pub(crate) fn orientation(file: &[u8]) -> Orientation {
    let exif = chunks(file.get(12..).unwrap_or_default())
        .find(|(name, _)| *name == *b"EXIF")
        .map(|(_, content)| content.strip_prefix(b"Exif\0\0").unwrap_or(content));
    exif.map_or(Orientation::UPRIGHT, Orientation::of_exif)
}

/// Refuses a lossy image whose size differs from its canvas (`width` x `height`) or its animation
/// frame. The decoder allocates before it compares the two sizes, and for animations does not
/// always compare them.
pub(crate) fn check_lossy(file: &[u8], width: u32, height: u32) -> Result<(), ImageError> {
    for (name, content) in chunks(file.get(12..).unwrap_or_default()) {
        if name != *b"ANMF" {
            check_frame(&name, content, (width, height))?;
            continue;
        }
        let Some((fields, inner)) = content.split_first_chunk::<FRAME_FIELDS>() else { continue };
        let side =
            |at: usize| 1 + u32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], 0]);
        let mut behind_alpha = false;
        for (name, content) in chunks(inner) {
            // The decoder treats the chunk after an alpha chunk as the frame, whatever its name.
            let name = if behind_alpha { b"VP8 " } else { &name };
            check_frame(name, content, (side(6), side(9)))?;
            behind_alpha = name == b"ALPH";
        }
    }
    Ok(())
}

fn check_frame(name: &[u8; 4], content: &[u8], place: (u32, u32)) -> Result<(), ImageError> {
    if name != b"VP8 " {
        return Ok(());
    }
    // RFC 6386, 9.1: three bytes of the frame tag, three of the start code, then two sides, each
    // with 14 bits of size and 2 bits of scale.
    let Some([_, _, _, _, _, _, w0, w1, h0, h1]) = content.first_chunk() else {
        return Err(ImageError::damaged(Format::WebP, "a frame is cut off"));
    };
    let side = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
    if (side(*w0, *w1), side(*h0, *h1)) != place {
        return Err(ImageError::damaged(Format::WebP, "a frame has another size than its place"));
    }
    Ok(())
}

/// Returns the names and contents of complete RIFF chunks.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let (name, after) = rest.split_first_chunk::<4>()?;
        let (size, after) = after.split_first_chunk::<4>()?;
        let size = u32::from_le_bytes(*size) as usize;
        let content = after.get(..size.min(after.len()))?;
        // Chunks begin at even offsets.
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
    fn a_frame_of_another_size_than_its_place() {
        let frame = [0, 0, 0, 0x9d, 1, 0x2a, 100, 0xc0, 50, 0];
        let still = file(&[(b"ICCP", b"odd"), (b"VP8 ", &frame)]);
        assert_eq!(check_lossy(&still, 100, 50), Ok(()));
        assert!(check_lossy(&still, 99, 50).is_err());
        assert!(check_lossy(&still, 100, 51).is_err());
        assert!(check_lossy(&still[..still.len() - 1], 100, 50).is_err());
    }

    #[test]
    fn a_frame_of_an_animation_has_a_place_of_its_own() {
        let frame = [0, 0, 0, 0x9d, 1, 0x2a, 100, 0xc0, 50, 0];
        let animated = |wide: u8, name| {
            let fields = [0, 0, 0, 0, 0, 0, wide - 1, 0, 0, 49, 0, 0, 0, 0, 0, 0];
            let inner = file(&[(b"ALPH", b"x"), (name, &frame)]);
            file(&[(b"ANMF", &[&fields, &inner[12..]].concat())])
        };
        assert_eq!(check_lossy(&animated(100, b"VP8 "), 1000, 1000), Ok(()));
        assert!(check_lossy(&animated(101, b"VP8 "), 1000, 1000).is_err());
        assert!(check_lossy(&animated(101, b"none"), 1000, 1000).is_err());
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
