//! The orientation of a stored image, numbered as in Exif 2.32 (tag 0x0112).

use image::metadata::Orientation as Named;

/// The rotation or reflection that makes the stored pixels upright, from 1 to 8. 1 means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Orientation(u8);

/// The side of the square tiles in which an image is rotated. A tile's rows in both images stay in
/// the first-level cache.
const TILE: usize = 32;

impl Orientation {
    /// The orientation of an image that is stored upright.
    pub const UPRIGHT: Self = Self(1);

    /// Reads an Exif block, without its prefix `Exif\0\0`. Returns upright if there is no
    /// orientation, or the block is damaged.
    pub(crate) fn of_exif(exif: &[u8]) -> Self {
        Named::from_exif_chunk(exif).map_or(Self::UPRIGHT, |named| Self(named.to_exif()))
    }

    /// The number in Exif, from 1 to 8.
    pub fn number(self) -> u8 {
        self.0
    }

    /// Returns the width and height of the upright image, given those of the stored image.
    pub fn turned(self, width: u32, height: u32) -> (u32, u32) {
        if self.0 > 4 { (height, width) } else { (width, height) }
    }

    /// Rotates a stored image of `width` x `height` pixels, with three bytes per pixel, into
    /// `upright`.
    pub(crate) fn turn(self, stored: &[u8], width: usize, height: usize, upright: &mut [u8]) {
        let (wide, high) = (width as isize, height as isize);
        // The stored index of the first upright pixel, and the distances to the next pixels in its
        // row and in its column.
        let (first, along, down) = match self.0 {
            2 => (wide - 1, -1, wide),
            3 => (high * wide - 1, -1, -wide),
            4 => ((high - 1) * wide, 1, -wide),
            5 => (0, wide, 1),
            6 => ((high - 1) * wide, -wide, 1),
            7 => (high * wide - 1, -wide, -1),
            8 => (wide - 1, wide, -1),
            _ => (0, 1, wide),
        };
        let (columns, rows) = if self.0 > 4 { (height, width) } else { (width, height) };
        for top in (0..rows).step_by(TILE) {
            for left in (0..columns).step_by(TILE) {
                for y in top..rows.min(top + TILE) {
                    for x in left..columns.min(left + TILE) {
                        let from = (first + along * x as isize + down * y as isize) as usize * 3;
                        let to = (y * columns + x) * 3;
                        upright[to..to + 3].copy_from_slice(&stored[from..from + 3]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the image 0 1 2 / 3 4 5 after rotation, row by row.
    fn turned(number: u8) -> Vec<u8> {
        let stored: Vec<u8> = (0..6).flat_map(|pixel| [pixel; 3]).collect();
        let mut upright = vec![0; 18];
        Orientation(number).turn(&stored, 3, 2, &mut upright);
        upright.chunks(3).map(|pixel| pixel[0]).collect()
    }

    #[test]
    fn all_eight() {
        assert_eq!(turned(1), [0, 1, 2, 3, 4, 5]);
        assert_eq!(turned(2), [2, 1, 0, 5, 4, 3]);
        assert_eq!(turned(3), [5, 4, 3, 2, 1, 0]);
        assert_eq!(turned(4), [3, 4, 5, 0, 1, 2]);
        assert_eq!(turned(5), [0, 3, 1, 4, 2, 5]);
        assert_eq!(turned(6), [3, 0, 4, 1, 5, 2]);
        assert_eq!(turned(7), [5, 2, 4, 1, 3, 0]);
        assert_eq!(turned(8), [2, 5, 1, 4, 0, 3]);
    }

    #[test]
    fn a_damaged_block_is_upright() {
        assert_eq!(Orientation::of_exif(b"MM\0*\0\0\0\x08\xff\xff"), Orientation::UPRIGHT);
        assert_eq!(Orientation::of_exif(b""), Orientation::UPRIGHT);
        let tag = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";
        assert_eq!(Orientation::of_exif(tag).number(), 6);
    }
}
