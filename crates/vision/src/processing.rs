//! The size to which an image is resized, and the number of its positions.

/// A model's image processing: the settings of `preprocessor_config.json` that affect the bytes of
/// patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Processing {
    patch: u32,
    merge: u32,
    size: Size,
}

/// The size to which images are resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Size {
    /// An image approximately keeps its aspect ratio, and gets a number of pixels within these
    /// bounds.
    Between { min_pixels: u64, max_pixels: u64 },
    /// Every image is resized to this grid.
    Fixed(Grid),
}

/// The interpolation of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filter {
    /// The triangle filter.
    Bilinear,
    /// The filter that Pillow and `PyTorch` call bicubic: a cubic with the parameter -0.5.
    Bicubic,
}

/// Settings with which no image can be processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProcessing {
    /// A position would have no pixels, or more pixels than an image may have.
    #[error("patches of {patch} pixels, merged {merge} by {merge}")]
    Sides {
        /// The side of a patch in pixels.
        patch: u32,
        /// The side of a position in patches.
        merge: u32,
    },
    /// The minimum is 0 or above the maximum, or the maximum is larger than any image.
    #[error("images of {min_pixels} to {max_pixels} pixels")]
    Pixels {
        /// The smallest number of pixels.
        min_pixels: u64,
        /// The largest number of pixels.
        max_pixels: u64,
    },
}

/// The positions of an image in the decoder, in rows. A position is `merge` x `merge` patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// The number of rows of positions.
    pub height: u32,
    /// The number of positions per row.
    pub width: u32,
}

impl Grid {
    /// The number of positions of the image.
    pub fn positions(&self) -> u64 {
        u64::from(self.height) * u64::from(self.width)
    }
}

impl Processing {
    /// The largest accepted side of a position in pixels. `MAX_PIXELS` is the largest number of
    /// pixels of a resized image. With these limits, derived sizes fit in memory.
    const MAX_SIDE: u32 = 1 << 10;
    const MAX_PIXELS: u64 = 1 << 30;

    /// Creates the processing of transformers' `Qwen2VLImageProcessor`. `patch` is the side of a
    /// patch in pixels, and `merge` is the side of a position in patches. A resized image has
    /// `min_pixels` to `max_pixels` pixels.
    ///
    /// # Errors
    /// No image can be processed with these settings.
    pub fn new(
        patch: u32,
        merge: u32,
        min_pixels: u64,
        max_pixels: u64,
    ) -> Result<Self, InvalidProcessing> {
        if min_pixels == 0 || min_pixels > max_pixels || max_pixels > Self::MAX_PIXELS {
            return Err(InvalidProcessing::Pixels { min_pixels, max_pixels });
        }
        Self::with_sides(patch, merge, Size::Between { min_pixels, max_pixels })
    }

    /// Creates the processing of transformers' `Gemma3ImageProcessor`: every image is resized to
    /// `grid`, whatever its aspect ratio.
    ///
    /// # Errors
    /// No image can be processed with these settings.
    pub fn fixed(patch: u32, merge: u32, grid: Grid) -> Result<Self, InvalidProcessing> {
        let processing = Self::with_sides(patch, merge, Size::Fixed(grid))?;
        let side = u64::from(processing.side());
        let pixels = grid.positions().saturating_mul(side * side);
        if !(1..=Self::MAX_PIXELS).contains(&pixels) {
            return Err(InvalidProcessing::Pixels { min_pixels: pixels, max_pixels: pixels });
        }
        Ok(processing)
    }

    fn with_sides(patch: u32, merge: u32, size: Size) -> Result<Self, InvalidProcessing> {
        if !patch.checked_mul(merge).is_some_and(|side| (1..=Self::MAX_SIDE).contains(&side)) {
            return Err(InvalidProcessing::Sides { patch, merge });
        }
        Ok(Self { patch, merge, size })
    }

    /// The side of a patch in pixels.
    pub fn patch(&self) -> u32 {
        self.patch
    }

    /// The side of a position in patches.
    pub fn merge(&self) -> u32 {
        self.merge
    }

    /// The interpolation of the resize.
    pub(crate) fn filter(&self) -> Filter {
        match self.size {
            Size::Between { .. } => Filter::Bicubic,
            Size::Fixed(_) => Filter::Bilinear,
        }
    }

    /// The side of a position in pixels.
    pub(crate) fn side(&self) -> u32 {
        self.patch * self.merge
    }

    /// Returns the grid of an image of `width` x `height` pixels, neither of which may be 0.
    ///
    /// Unless the grid is fixed, this is `smart_resize` of Qwen2-VL. Both sides become multiples of
    /// a position's side, and the number of pixels is within the bounds. The aspect ratio changes
    /// as little as possible. Halves are rounded to even, as in Python.
    pub fn grid(&self, width: u32, height: u32) -> Grid {
        let (min_pixels, max_pixels) = match self.size {
            Size::Between { min_pixels, max_pixels } => (min_pixels, max_pixels),
            Size::Fixed(grid) => return grid,
        };
        let side = f64::from(self.side());
        let (wide, high) = (f64::from(width), f64::from(height));
        let mut columns = (wide / side).round_ties_even();
        let mut rows = (high / side).round_ties_even();
        let pixels = rows * side * (columns * side);
        if pixels > max_pixels as f64 {
            let shrink = (high * wide / max_pixels as f64).sqrt();
            rows = (high / shrink / side).floor().max(1.0);
            columns = (wide / shrink / side).floor().max(1.0);
        } else if pixels < min_pixels as f64 {
            let grow = (min_pixels as f64 / (high * wide)).sqrt();
            rows = (high * grow / side).ceil();
            columns = (wide * grow / side).ceil();
        }
        Grid { height: rows as u32, width: columns as u32 }
    }

    /// The width and height in pixels of an image that has been resized to `grid`.
    pub fn resized(&self, grid: Grid) -> (u32, u32) {
        (grid.width.saturating_mul(self.side()), grid.height.saturating_mul(self.side()))
    }

    /// The number of patches of a grid.
    pub fn patches(&self, grid: Grid) -> u64 {
        grid.positions() * u64::from(self.merge) * u64::from(self.merge)
    }

    /// The number of bytes of a grid's patches.
    pub fn bytes(&self, grid: Grid) -> usize {
        let (width, height) = self.resized(grid);
        width as usize * height as usize * 3
    }

    /// Serialises all parameters of the processing. With a fixed grid, the smallest number of
    /// pixels is written as 0.
    pub(crate) fn to_bytes(self) -> [u8; 24] {
        let (least, most) = match self.size {
            Size::Between { min_pixels, max_pixels } => (min_pixels, max_pixels),
            Size::Fixed(grid) => (0, u64::from(grid.height) << 32 | u64::from(grid.width)),
        };
        let mut bytes = [0; 24];
        bytes[..4].copy_from_slice(&self.patch.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.merge.to_le_bytes());
        bytes[8..16].copy_from_slice(&least.to_le_bytes());
        bytes[16..].copy_from_slice(&most.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QWEN3: (u32, u64, u64) = (16, 65_536, 16_777_216);
    const QWEN2_5: (u32, u64, u64) = (14, 3_136, 12_845_056);

    fn grid(of: (u32, u64, u64), width: u32, height: u32) -> (u32, u32) {
        let found = Processing::new(of.0, 2, of.1, of.2).unwrap().grid(width, height);
        (found.width, found.height)
    }

    #[test]
    fn sizes_that_transformers_gives() {
        assert_eq!(grid(QWEN3, 1200, 1200), (38, 38));
        // 42 / 28 is 1.5 and 70 / 28 is 2.5: both round to 2.
        assert_eq!(grid(QWEN2_5, 42, 70), (2, 2));
        assert_eq!(grid(QWEN3, 1, 1), (8, 8));
        assert_eq!(grid(QWEN3, 1, 200), (1, 114));
        assert_eq!(grid(QWEN3, 7000, 7000), (128, 128));
        assert_eq!(grid(QWEN2_5, 200, 1), (29, 1));
    }

    #[test]
    fn numbers_that_make_no_sense() {
        assert!(Processing::new(0, 2, 1, 1).is_err());
        assert!(Processing::new(u32::MAX, 2, 1, 1).is_err());
        assert!(Processing::new(16, 2, 0, 1).is_err());
        assert!(Processing::new(16, 2, 2, 1).is_err());
        assert!(Processing::new(16, 2, 1, u64::MAX).is_err());
        let square = |side| Grid { height: side, width: side };
        assert!(Processing::fixed(0, 4, square(16)).is_err());
        assert!(Processing::fixed(14, 4, square(0)).is_err());
        assert!(Processing::fixed(14, 4, square(u32::MAX)).is_err());
    }

    #[test]
    fn a_fixed_grid_is_that_of_every_image() {
        let all = Grid { height: 16, width: 16 };
        let processing = Processing::fixed(14, 4, all).unwrap();
        for (width, height) in [(1, 1), (896, 896), (3000, 40)] {
            assert_eq!(processing.grid(width, height), all);
        }
        assert_eq!(processing.resized(all), (896, 896));
        assert_eq!(processing.bytes(all), 3 * 896 * 896);
        let other = Processing::fixed(14, 4, Grid { height: 16, width: 15 }).unwrap();
        assert_ne!(processing.to_bytes(), other.to_bytes());
    }

    proptest! {
        #[test]
        fn a_grid_is_never_empty_and_near_its_bounds(
            width in 1u32..10_000,
            height in 1u32..10_000,
            patch in 1u32..40,
            merge in 1u32..4,
            least in 1u64..200_000,
            more in 0u64..2_000_000,
        ) {
            prop_assume!(width.max(height) <= 200 * width.min(height));
            let processing = Processing::new(patch, merge, least, least + more).unwrap();
            let grid = processing.grid(width, height);
            prop_assert!(grid.width >= 1 && grid.height >= 1);
            let (wide, high) = processing.resized(grid);
            let side = u64::from(patch * merge);
            // The bounds may be exceeded by less than one row and one column of positions.
            let least = (least as f64).sqrt() as u64;
            prop_assert!((u64::from(wide) + side) * (u64::from(high) + side) >= least * least);
            prop_assert_eq!(processing.bytes(grid) as u64, processing.patches(grid) * u64::from(patch * patch * 3));
        }
    }
}
