//! The blocks of a request.

use forebay_kvcache::{BlockHash, Namer};

use crate::images::prompt::PromptImage;

/// The names of a request's leading full blocks, and some facts about its earlier runs.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// The parent of the first block.
    root: BlockHash,
    /// The known names; empty before the first admission.
    pub(crate) names: Vec<BlockHash>,
    /// True if the request's blocks were already restored once ahead of its turn.
    pub(super) prefetched: bool,
    /// True if the request was sparse when it ran last.
    pub(super) was_sparse: bool,
}

impl Blocks {
    pub(crate) fn new(root: BlockHash) -> Self {
        Self { root, names: Vec::new(), prefetched: false, was_sparse: false }
    }

    /// Names the first `blocks` blocks of a request with these tokens and images.
    pub(crate) fn extend(
        &mut self,
        blocks: usize,
        page_size: usize,
        namer: &Namer,
        tokens: &[i32],
        images: &[PromptImage],
    ) {
        while self.names.len() < blocks {
            let at = self.names.len() * page_size;
            let parent = self.names.last().copied().unwrap_or(self.root);
            let images = PromptImage::within(images, at as u32, page_size as u32);
            self.names.push(namer.child_with(parent, &tokens[at..at + page_size], images));
        }
    }
}
