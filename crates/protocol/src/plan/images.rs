//! Images in a plan: layers of the vision tower to compute, and where images are in slots.

use super::{StepPlan, take};
use crate::columns::record;

/// Words of a record of the `image_spans` column.
pub const IMAGE_SPAN_WORDS: usize = ImageSpanRecord::WORDS;

record! {
    /// Layers of the tower to compute for an image.
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
    /// An image in a slot.
    pub(crate) struct ImageSpanRecord {
        slot: u32,
        position: u32,
        grid_h: u32,
        grid_w: u32,
        rope: u32,
        page_count: u32,
    }
}

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
    /// most the image's number of positions.
    #[must_use]
    pub fn reach(self) -> u32 {
        self.rows.max(self.columns)
    }
}

/// Layers of the tower to compute for one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TowerWork {
    /// The number of the image, unique until all its layers are computed.
    pub image: u32,
    /// The first layer.
    pub first: u32,
    /// The layer after the last one.
    pub end: u32,
    /// The image's positions.
    pub grid: Grid,
    /// The byte offset of the image's patches in the arena, with the first layers. They may be gone
    /// after this plan's result.
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

/// True if all numbers are non-negative as the signed integers of a plan.
fn not_negative(numbers: &[u32]) -> bool {
    numbers.iter().all(|number| number.cast_signed() >= 0)
}

impl StepPlan {
    /// Computes layers for an image. The last layers write the output to `pages`. Earlier layers
    /// name no pages.
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

    /// Gives up an image, not all of whose layers are computed.
    pub fn give_up_image(&mut self, image: u32) {
        let grid = Grid { rows: 0, columns: 0 };
        let nothing = TowerWork { image, first: 0, end: 0, grid, patches: None };
        self.push_image(nothing, [].into_iter());
    }

    /// The tower's work in this step, with the pages for each image's output. A given-up image is
    /// listed too, without layers.
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

    /// Writes where an image is in a slot, with the pages of the tower's output: all of them, or
    /// none.
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

    /// The spans, by slot, with their pages.
    pub fn image_spans(&self) -> impl Iterator<Item = (u32, ImageSpan, &[i32])> {
        let mut pages = self.span_pages.as_slice();
        self.image_spans.iter().map(move |record| {
            let grid = Grid { rows: record.grid_h, columns: record.grid_w };
            let span = ImageSpan { position: record.position, grid, rope: record.rope };
            (record.slot, span, take(&mut pages, record.page_count as usize))
        })
    }

    /// True if the image columns have valid numbers, and as many pages as they count.
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
