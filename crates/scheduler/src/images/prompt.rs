//! The images of a prompt.

use std::sync::Arc;

use forebay_kvcache::{BlockHash, ImageId, Namer};
use forebay_protocol::{Grid, IMAGE_SPAN_WORDS, ImageSpan};

/// An image of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptImage {
    /// The identity of the image.
    pub id: ImageId,
    /// The positions of the image.
    pub span: ImageSpan,
}

impl PromptImage {
    /// Creates the images of a prompt from their ids, first positions and grids, in the order of
    /// positions. Images must not overlap.
    #[must_use]
    pub fn place(images: impl IntoIterator<Item = (ImageId, u32, Grid)>) -> Arc<[Self]> {
        let mut saved = 0;
        let placed = images.into_iter().map(|(id, position, grid)| {
            let rope = position - saved;
            saved += grid.positions() - grid.reach();
            Self { id, span: ImageSpan { position, grid, rope } }
        });
        placed.collect()
    }

    /// Returns the `images` that overlap the block of `size` positions from `start` on, in the form
    /// that [`Namer::child_with`] takes.
    pub fn within(
        images: &[Self],
        start: u32,
        size: u32,
    ) -> impl Iterator<Item = (u32, ImageId, u32)> {
        let from = images.partition_point(|image| image.end() <= start);
        let met = images[from..].iter().take_while(move |image| image.span.position < start + size);
        met.map(move |image| {
            let first = image.span.position.max(start);
            (first - start, image.id, first - image.span.position)
        })
    }

    /// The names of the full blocks at the beginning of `tokens`, for requests with this salt.
    /// `images` are the images at these positions.
    #[must_use]
    pub fn chain(
        namer: &Namer,
        salt: u64,
        tokens: &[i32],
        images: &[Self],
        page_size: usize,
    ) -> Vec<BlockHash> {
        let mut parent = namer.root(salt);
        let name = |(number, block): (usize, &[i32])| {
            let within = Self::within(images, (number * page_size) as u32, page_size as u32);
            parent = namer.child_with(parent, block, within);
            parent
        };
        tokens.chunks_exact(page_size).enumerate().map(name).collect()
    }

    /// The position after the image.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.span.position + self.span.grid.positions()
    }
}

/// The largest number of words that images need in a plan: for their patches and their pages.
#[must_use]
pub fn image_words(images: &[PromptImage]) -> u64 {
    // A page has at least one position.
    let of = |image: &PromptImage| u64::from(image.span.grid.positions()) + IMAGE_SPAN_WORDS as u64;
    images.iter().map(of).sum()
}
