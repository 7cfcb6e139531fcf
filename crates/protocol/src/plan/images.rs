//! Images in a plan: the layers of the vision tower to compute, and the positions of images in
//! slots.

use super::{StepPlan, take};
use crate::columns::record;

/// The number of words of a record in the `image_spans` column.
pub const IMAGE_SPAN_WORDS: usize = ImageSpanRecord::WORDS;

record! {
    /// The layers of the vision tower to compute for an image.
    pub(crate) struct ImageRecord {
        image: u32,
        first_layer: u32,
        end_layer: u32,
        grid_h: u32,
        grid_w: u32,
        arena_offset: i32,
        page_count: u32,
    }
}

record! {
    /// The positions of an image in a slot.
    pub(crate) struct ImageSpanRecord {
        slot: u32,
        position: u32,
        grid_h: u32,
        grid_w: u32,
        rope: u32,
        page_count: u32,
    }
}

/// The grid of an image's positions in the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grid {
    /// The number of rows of the grid.
    pub rows: u32,
    /// The number of positions in a row of the grid.
    pub columns: u32,
}

impl Grid {
    /// Returns the number of positions of the image.
    #[must_use]
    pub fn positions(self) -> u32 {
        self.rows.saturating_mul(self.columns)
    }

    /// Returns the number of rotary positions of the image, which is the larger side of the grid.
    /// It is at most the number of positions.
    #[must_use]
    pub fn reach(self) -> u32 {
        self.rows.max(self.columns)
    }
}

/// The layers of the vision tower to compute for one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TowerWork {
    /// The number of the image, unique until all layers are computed.
    pub image: u32,
    /// The first layer to compute.
    pub first: u32,
    /// The end of the layers to compute, exclusive.
    pub end: u32,
    /// The grid of the image's positions.
    pub grid: Grid,
    /// The byte offset of the image's patches in the arena; set with the first layers. The patches
    /// may be freed after the result of this plan.
    pub patches: Option<u32>,
}

/// The positions of an image in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpan {
    /// The first position of the image.
    pub position: u32,
    /// The grid of the image's positions.
    pub grid: Grid,
    /// The rotary position of the image's first position.
    pub rope: u32,
}

/// True if all numbers are non-negative when read as the signed integers of a plan.
fn not_negative(numbers: &[u32]) -> bool {
    numbers.iter().all(|number| number.cast_signed() >= 0)
}

impl StepPlan {
    /// Adds layers to compute for an image. The last layers write the output to `pages`. For
    /// earlier layers `pages` is empty.
    pub fn push_image(&mut self, work: TowerWork, pages: impl ExactSizeIterator<Item = u32>) {
        let TowerWork { image, first, end, grid, patches } = work;
        self.images.push(ImageRecord {
            image,
            first_layer: first,
            end_layer: end,
            grid_h: grid.rows,
            grid_w: grid.columns,
            arena_offset: patches.map_or(-1, u32::cast_signed),
            page_count: pages.len() as u32,
        });
        self.image_pages.extend(pages.map(u32::cast_signed));
    }

    /// Discards an image whose layers are not all computed.
    pub fn give_up_image(&mut self, image: u32) {
        let grid = Grid { rows: 0, columns: 0 };
        let nothing = TowerWork { image, first: 0, end: 0, grid, patches: None };
        self.push_image(nothing, [].into_iter());
    }

    /// Iterates over the work of the vision tower in this step, with the pages for each image's
    /// output. A discarded image is listed without layers.
    pub fn images(&self) -> impl Iterator<Item = (TowerWork, &[i32])> {
        let mut pages = self.image_pages.as_slice();
        self.images.iter().map(move |record| {
            let work = TowerWork {
                image: record.image,
                first: record.first_layer,
                end: record.end_layer,
                grid: Grid { rows: record.grid_h, columns: record.grid_w },
                patches: u32::try_from(record.arena_offset).ok(),
            };
            (work, take(&mut pages, record.page_count as usize))
        })
    }

    /// True if the plan has images or image spans.
    #[must_use]
    pub fn has_images(&self) -> bool {
        !self.images.is_empty() || !self.image_spans.is_empty()
    }

    /// Writes the positions of an image in a slot, and the pages with the tower's output. `pages`
    /// contains either all of these pages or none.
    pub fn write_image_span(
        &mut self,
        slot: u32,
        span: ImageSpan,
        pages: impl ExactSizeIterator<Item = u32>,
    ) {
        let ImageSpan { position, grid, rope } = span;
        self.image_spans.push(ImageSpanRecord {
            slot,
            position,
            grid_h: grid.rows,
            grid_w: grid.columns,
            rope,
            page_count: pages.len() as u32,
        });
        self.span_pages.extend(pages.map(u32::cast_signed));
    }

    /// Iterates over the image spans, each with its slot and its pages.
    pub fn image_spans(&self) -> impl Iterator<Item = (u32, ImageSpan, &[i32])> {
        let mut pages = self.span_pages.as_slice();
        self.image_spans.iter().map(move |record| {
            let grid = Grid { rows: record.grid_h, columns: record.grid_w };
            let span = ImageSpan { position: record.position, grid, rope: record.rope };
            (record.slot, span, take(&mut pages, record.page_count as usize))
        })
    }

    /// True if the image columns have valid numbers, and as many pages as their counts state.
    pub(super) fn images_agree(&self) -> bool {
        let named: u64 = self.images.iter().map(|image| u64::from(image.page_count)).sum();
        let spanned: u64 = self.image_spans.iter().map(|span| u64::from(span.page_count)).sum();
        let pages = [&self.image_pages, &self.span_pages];
        self.images.iter().all(|image| {
            let others = ImageRecord { arena_offset: 0, ..*image };
            image.arena_offset >= -1 && not_negative(bytemuck::cast_slice(&[others]))
        }) && not_negative(bytemuck::cast_slice(&self.image_spans))
            && pages.iter().all(|pages| not_negative(bytemuck::cast_slice(pages)))
            && named == self.image_pages.len() as u64
            && spanned == self.span_pages.len() as u64
    }
}
