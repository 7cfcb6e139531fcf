//! The rows of a step, and its outputs.

use std::sync::Arc;

use crate::adapters::AdapterMatrices;
use crate::packing::{Unfit, aligned, unfit};
use crate::sizes::Sizes;

/// The inputs of a row that the caller gives in place of embeddings.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// The inputs of the slot from position 0 on, `[until, hidden]` elements of the model's type.
    pub inputs: &'a [u8],
    /// The first position whose input comes from the embedding.
    pub until: usize,
}

/// The rows of a step, and the tables that they refer to.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// The slot of each row.
    pub slot: &'a [i64],
    /// The first position of each row.
    pub start: &'a [i64],
    /// The number of positions of each row.
    pub length: &'a [i64],
    /// The given inputs of each row; empty if all inputs come from the embedding.
    pub given: &'a [Option<Given<'a>>],
    /// The adapter of each row; empty if no row has an adapter.
    pub adapters: &'a [Option<Arc<AdapterMatrices>>],
    /// The tokens of slots, `[slots, token_stride]`.
    pub tokens: &'a [i32],
    /// The number of token positions per slot.
    pub token_stride: usize,
    /// The page table of slots, `[slots, page_stride]`.
    pub pages: &'a [i32],
    /// The number of pages per slot.
    pub page_stride: usize,
    /// The page table of slots in the window part, `[slots, page_stride]`. An entry is the null
    /// page ([`crate::Sizes::window_page_count`]) if no query sees its positions any more. Empty
    /// without a window part.
    pub window_pages: &'a [i32],
    /// The tokens whose output is requested: ascending indices over the tokens of all rows.
    pub sample: &'a [i64],
    /// For each row, the rows of the state tables with the state before its first token and after
    /// its last token. Empty without recurrent layers.
    pub states: &'a [[i64; 2]],
}

/// The requested output of a step for the tokens in [`Rows::sample`].
pub enum Wanted<'a> {
    /// Logits, `[sampled, vocabulary]`.
    Logits(&'a mut [f32]),
    /// The index of the largest logit (the first of equal ones), and 1 if all logits are finite,
    /// otherwise 0: `[sampled]` each.
    Best(&'a mut [i32], &'a mut [u8]),
    /// States for [`crate::Decoder::head`], `[sampled, hidden]`.
    States(&'a mut [f32]),
    /// The final states after the norm, `[sampled, hidden]`.
    Vectors(&'a mut [f32]),
}

impl Rows<'_> {
    /// Checks all columns except adapters and states. Returns the number of tokens.
    pub(crate) fn check(&self, sizes: &Sizes) -> Result<usize, Unfit> {
        let rows = self.slot.len();
        let columns = self.start.len() == rows
            && self.length.len() == rows
            && (self.given.is_empty() || self.given.len() == rows)
            && (self.adapters.is_empty() || self.adapters.len() == rows);
        if !columns || self.token_stride == 0 || self.page_stride == 0 {
            return unfit("columns of rows that are not equally long");
        }
        if sizes.window_page_count > 0 && self.window_pages.len() != self.pages.len() {
            return unfit(
                "a table of the window part that is not as long as that of the main part",
            );
        }
        let slots =
            (self.tokens.len() / self.token_stride).min(self.pages.len() / self.page_stride) as i64;
        let most = sizes
            .positions
            .min(self.token_stride)
            .min(self.page_stride.saturating_mul(sizes.page_size)) as i64;
        let mut count = 0;
        for row in 0..rows {
            let (slot, start, length) = (self.slot[row], self.start[row], self.length[row]);
            let inside = (0..slots).contains(&slot)
                && (0..most).contains(&start)
                && (1..=most - start).contains(&length);
            if !inside {
                return unfit(format!(
                    "a row outside of {slots} slots of {most} positions: slot {slot}, start {start}, length {length}"
                ));
            }
            if let Some(Some(given)) = self.given.get(row) {
                let wanted = given.until * sizes.hidden * sizes.dtype.bytes();
                if given.inputs.len() != wanted || !aligned(given.inputs, sizes.dtype) {
                    return unfit("embeddings of another size, or at an odd address");
                }
            }
            count += length as usize;
        }
        Ok(count)
    }
}
