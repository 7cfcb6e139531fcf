//! From the size of an image to the grid that a model sees.

use crate::error::ImageError;

/// Longest side, in multiples of the other.
const RATIO: f64 = 200.0;

/// How a model cuts images. A position of its decoder is a square of `merge` times `merge` patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Pixels of a patch, each way.
    pub patch: u32,
    /// Patches of a position, each way.
    pub merge: u32,
    /// Fewest pixels after the resize.
    pub min_pixels: u64,
    /// Most pixels after the resize.
    pub max_pixels: u64,
}

/// An image as a model sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Pixels after the resize: a multiple of `patch * merge`.
    pub width: u32,
    /// Pixels after the resize: a multiple of `patch * merge`.
    pub height: u32,
    /// Rows of positions.
    pub rows: u32,
    /// Positions of a row.
    pub columns: u32,
}

impl Shape {
    /// Bytes of all patches: three for each pixel.
    #[must_use]
    pub fn bytes(&self) -> usize {
        3 * self.width as usize * self.height as usize
    }
}

impl Geometry {
    /// Pixels of a position, each way.
    fn factor(&self) -> u32 {
        self.patch * self.merge
    }

    /// What an image of this size becomes: `smart_resize` of transformers' `image_processing_qwen2_vl.py`, in the same arithmetic.
    ///
    /// # Errors
    /// It has no pixels, or one side is more than 200 times the other.
    pub fn shape(&self, width: u32, height: u32) -> Result<Shape, ImageError> {
        if width == 0 || height == 0 {
            return Err(ImageError::Empty { width, height });
        }
        let (long, short) = (f64::from(width.max(height)), f64::from(width.min(height)));
        if long / short > RATIO {
            return Err(ImageError::TooLong { width, height });
        }
        let factor = f64::from(self.factor());
        let (wide, high) = (f64::from(width), f64::from(height));
        // Both sides are below 2^32, so all products here are exact or rounded as Python's floats are.
        let nearest = |side: f64| (side / factor).round_ties_even() * factor;
        let (mut to_width, mut to_height) = (nearest(wide), nearest(high));
        let (least, most) = (self.min_pixels as f64, self.max_pixels as f64);
        if to_width * to_height > most {
            let beta = ((high * wide) / most).sqrt();
            let floor = |side: f64| ((side / beta / factor).floor() * factor).max(factor);
            (to_width, to_height) = (floor(wide), floor(high));
        } else if to_width * to_height < least {
            let beta = (least / (high * wide)).sqrt();
            let ceil = |side: f64| (side * beta / factor).ceil() * factor;
            (to_width, to_height) = (ceil(wide), ceil(high));
        }
        let (width, height) = (to_width as u32, to_height as u32);
        Ok(Shape { width, height, rows: height / self.factor(), columns: width / self.factor() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3: Geometry =
        Geometry { patch: 16, merge: 2, min_pixels: 65_536, max_pixels: 16_777_216 };

    fn size(width: u32, height: u32) -> (u32, u32) {
        let shape = QWEN3.shape(width, height).expect("a shape");
        assert_eq!((shape.columns * 32, shape.rows * 32), (shape.width, shape.height));
        (shape.width, shape.height)
    }

    #[test]
    fn sizes_are_those_of_transformers() {
        assert_eq!(size(1200, 1200), (1216, 1216));
        assert_eq!(QWEN3.shape(1200, 1200).expect("a shape").bytes(), 5776 * 768);
        // Halves go to the even neighbour, as Python rounds.
        assert_eq!(size(1040, 1008), (1024, 1024));
        assert_eq!(size(1, 1), (256, 256));
        assert_eq!(size(8, 1600), (32, 3648));
        assert_eq!(size(10_000, 10_000), (4096, 4096));
    }

    #[test]
    fn no_pixels_and_long_strips_are_refused() {
        let empty = ImageError::Empty { width: 0, height: 7 };
        assert_eq!(QWEN3.shape(0, 7), Err(empty));
        assert!(QWEN3.shape(200, 1).is_ok());
        let long = ImageError::TooLong { width: 201, height: 1 };
        assert_eq!(QWEN3.shape(201, 1), Err(long));
    }
}
