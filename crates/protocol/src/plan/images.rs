//! Images in a plan: layers of the vision tower to compute, and the places of images in slots.

use super::{StepPlan, take};

/// Words of a record of the `images` column.
pub const IMAGE_WORDS: usize = 7;
/// Words of a record of the `image_spans` column.
pub const IMAGE_SPAN_WORDS: usize = 6;

/// Rows and columns of an image's positions in the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grid {
    /// Rows of positions.
    pub rows: u32,
    /// Positions of a row.
    pub columns: u32,
}

impl Grid {
    /// Positions of the image.
    #[must_use]
    pub fn positions(self) -> u32 {
        self.rows.saturating_mul(self.columns)
    }

    /// The number of rotary positions that the image takes: the larger side of the grid. It is at
    /// most the number of the image's positions.
    #[must_use]
    pub fn reach(self) -> u32 {
        self.rows.max(self.columns)
    }
}

/// Layers of the tower to compute for one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TowerWork {
    /// The number of the image. No other image has it until all layers are computed.
    pub image: u32,
    /// The first layer.
    pub first: u32,
    /// The layer behind the last one.
    pub end: u32,
    /// The image's positions.
    pub grid: Grid,
    /// The byte offset of the image's patches in the arena, with the first layers. The patches may
    /// be gone after this plan's result.
    pub patches: Option<u32>,
}

/// The positions of an image in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpan {
    /// The first position of the image.
    pub position: u32,
    /// The grid of the image's positions.
    pub grid: Grid,
    /// The rotary position of the first of them.
    pub rope: u32,
}

/// `records` of `WORDS` words, the last of which counts the pages that belong to each.
fn with_pages<'a, const WORDS: usize>(
    records: &'a [i32],
    mut pages: &'a [i32],
) -> impl Iterator<Item = ([u32; WORDS], &'a [i32])> {
    let (records, _) = records.as_chunks::<WORDS>();
    records.iter().map(move |record| {
        let own = take(&mut pages, record[WORDS - 1] as usize);
        (record.map(i32::cast_unsigned), own)
    })
}

impl StepPlan {
    /// Computes layers for an image. The last layers write the output to `pages`. Others name no
    /// pages.
    pub fn push_image(&mut self, work: TowerWork, pages: impl ExactSizeIterator<Item = u32>) {
        let TowerWork { image, first, end, grid, patches } = work;
        let patches = patches.map_or(-1, u32::cast_signed);
        let [image, first, end, rows, columns] =
            [image, first, end, grid.rows, grid.columns].map(u32::cast_signed);
        self.images.extend_from_slice(&[image, first, end, rows, columns, patches]);
        self.images.push(pages.len() as i32);
        self.image_pages.extend(pages.map(u32::cast_signed));
    }

    /// Gives up an image whose layers are not all computed.
    pub fn give_up_image(&mut self, image: u32) {
        self.images.extend_from_slice(&[image.cast_signed(), 0, 0, 0, 0, -1, 0]);
    }

    /// The tower's work in this step, with the pages for each image's output. A given-up image is
    /// listed too, without layers.
    pub fn images(&self) -> impl Iterator<Item = (TowerWork, &[i32])> {
        let records = with_pages::<IMAGE_WORDS>(&self.images, &self.image_pages);
        records.map(|([image, first, end, rows, columns, patches, _], pages)| {
            let patches = i32::try_from(patches).ok().map(i32::cast_unsigned);
            (TowerWork { image, first, end, grid: Grid { rows, columns }, patches }, pages)
        })
    }

    /// True if the plan has images or image spans.
    #[must_use]
    pub fn has_images(&self) -> bool {
        !self.images.is_empty() || !self.image_spans.is_empty()
    }

    /// Writes the place of an image in a slot, with the pages of the tower's output: all of them,
    /// or none.
    pub fn write_image_span(
        &mut self,
        slot: u32,
        span: ImageSpan,
        pages: impl ExactSizeIterator<Item = u32>,
    ) {
        let ImageSpan { position, grid, rope } = span;
        let record = [slot, position, grid.rows, grid.columns, rope, pages.len() as u32];
        self.image_spans.extend_from_slice(&record.map(u32::cast_signed));
        self.span_pages.extend(pages.map(u32::cast_signed));
    }

    /// The spans, by slot, with their pages.
    pub fn image_spans(&self) -> impl Iterator<Item = (u32, ImageSpan, &[i32])> {
        let records = with_pages::<IMAGE_SPAN_WORDS>(&self.image_spans, &self.span_pages);
        records.map(|([slot, position, rows, columns, rope, _], pages)| {
            (slot, ImageSpan { position, grid: Grid { rows, columns }, rope }, pages)
        })
    }

    /// True if the columns of images have whole records of numbers that can be, and as many pages
    /// as they count.
    pub(super) fn images_agree(&self) -> bool {
        let (images, rest) = self.images.as_chunks::<IMAGE_WORDS>();
        let (spans, left) = self.image_spans.as_chunks::<IMAGE_SPAN_WORDS>();
        let count = |pages: i32| u64::try_from(pages).unwrap_or(u64::MAX >> 32);
        let named: u64 = images.iter().map(|image| count(image[6])).sum();
        let spanned: u64 = spans.iter().map(|span| count(span[5])).sum();
        rest.is_empty()
            && left.is_empty()
            && images.iter().all(|image| image[..5].iter().all(|&n| n >= 0) && image[5] >= -1)
            && spans.iter().flatten().all(|&number| number >= 0)
            && self.image_pages.iter().chain(&self.span_pages).all(|&page| page >= 0)
            && named == self.image_pages.len() as u64
            && spanned == self.span_pages.len() as u64
    }
}
