//! The step plan: the changes to a hand's tables and the rows to compute in one step.

mod checks;
mod drafts;
mod group;
mod images;
mod places;
mod prompts;
mod slots;
mod states;
mod tables;

pub use group::{MAX_GROUP, tell_group};
pub use images::{Grid, IMAGE_SPAN_WORDS, ImageSpan, TowerWork};
pub use places::PlaceWrite;
pub use prompts::PromptLogprobsWant;
pub use slots::{NewSlot, Pooling, SamplingParams, SlotSpec, SlotWrite};
pub use states::{STATE_COPY_WORDS, StateCopy};
pub use tables::{NO_PAGE, PAGE_WRITE_WORDS};

use crate::columns::{columns, record};
use crate::copy::{CopyRecord, Span};
use crate::frame::ENTRY_WORDS;
use images::{ImageRecord, ImageSpanRecord};
use slots::{SlotFloats, SlotRecord, SlotValue};
use tables::PageWrite;

/// The largest number of words of a row: its record, its number of tokens, and its request for
/// log-probabilities of the prompt.
pub const ROW_WORDS: usize = RowRecord::WORDS + 1 + PromptLogprobsWant::WORDS;
/// Row flag: sample at the last position.
pub const FLAG_SAMPLE: i32 = 1;
/// Row flag: pool the hidden states of the slot.
pub const FLAG_POOL: i32 = 2;
/// Row flag, combined with [`FLAG_SAMPLE`]: the step's masks restrict the token.
pub const FLAG_MASKED: i32 = 4;

/// The output that a row returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Nothing: the row only computes keys and values, because more of the prompt follows.
    Nothing,
    /// At least one token, and at most this many, for the positions that follow the row. The hand
    /// has then computed the positions of all these tokens except the last.
    Tokens(u32),
    /// The same as [`Want::Tokens`], but each token has to be allowed by the mask of its position.
    /// The step's [`crate::StepMasks`] follow the plan.
    Masked(u32),
    /// A vector that is pooled over the slot's positions, the last of which the row computes.
    Vector,
}

impl Want {
    /// The row returns the next token.
    pub const TOKEN: Self = Self::Tokens(1);
    /// The row returns the next token, which its mask has to allow.
    pub const MASKED: Self = Self::Masked(1);

    /// Returns the largest number of tokens that the row may return.
    #[must_use]
    pub fn most(self) -> u32 {
        match self {
            Self::Tokens(most) | Self::Masked(most) => most,
            Self::Nothing | Self::Vector => 0,
        }
    }

    /// True if the row samples tokens.
    #[must_use]
    pub fn samples(self) -> bool {
        matches!(self, Self::Tokens(_) | Self::Masked(_))
    }

    fn flags(self) -> i32 {
        match self {
            Self::Nothing => 0,
            Self::Tokens(_) => FLAG_SAMPLE,
            Self::Masked(_) => FLAG_SAMPLE | FLAG_MASKED,
            Self::Vector => FLAG_POOL,
        }
    }
}

/// The positions to compute for one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The index in the device tables.
    pub slot: u32,
    /// First position to compute.
    pub start: u32,
    /// The number of positions to compute.
    pub length: u32,
    /// The output that the row returns.
    pub want: Want,
}

record! {
    /// A row of a plan.
    struct RowRecord {
        slot: u32,
        start: u32,
        length: u32,
        flags: i32,
    }
}

columns! {
    /// The work of one step for the ranks of a group, as flat columns that are reused from step to
    /// step.
    pub struct StepPlan: Plan, "plan" {
        step,
        /// One record per new slot.
        1 slots: Vec<SlotRecord>,
        /// One record per new slot.
        2 slot_floats: Vec<SlotFloats>,
        /// The `token_count` tokens of each new slot whose `arena_offset` is -1.
        3 tokens: Vec<i32>,
        /// The `stop_count` stop ids of each new slot.
        4 stop_ids: Vec<i32>,
        /// The `bias_count` token ids with a bias of each new slot.
        5 bias_ids: Vec<i32>,
        /// One bias per id in `bias_ids`.
        6 bias_values: Vec<f32>,
        /// Sets `page_table[slot, index] = page`; -1: these positions have no page on the device.
        7 page_writes: Vec<PageWrite>,
        /// One record per row.
        8 rows: Vec<RowRecord>,
        /// The largest number of tokens of each row that samples, in row order; absent: 1 each.
        9 row_tokens: Vec<i32>,
        /// The start of the second text of each new slot whose prompt is a pair, in the order of
        /// `slots`.
        10 segments: Vec<SlotValue>,
        /// The byte offset in the arena of each new slot whose prompt is given as embeddings, in
        /// the order of `slots`.
        11 embeds: Vec<SlotValue>,
        /// The number of allowed token ids of each new slot that may sample only some ids, in the
        /// order of `slots`.
        12 allowed_counts: Vec<SlotValue>,
        /// The allowed ids of each slot in `allowed_counts`, ascending.
        13 allowed_ids: Vec<i32>,
        /// Copies of pages between device and host. `direction` 0: save; 1: restore; 2: restore
        /// only index keys, and `hot` is -1; 3: save a state page; 4: restore a state page.
        14 copies: Vec<CopyRecord>,
        /// In a plan without rows: send the result when a copy has ended, when another plan has
        /// arrived, or after this many microseconds (at most 1000).
        15 wait_us: Option<u32>,
        /// Sets `host_table[slot, index] = page`, a page of the host tier.
        16 host_writes: Vec<PageWrite>,
        /// Sets `hot_rows[slot, index] = page`, a page in which the slot caches single positions.
        17 hot_rows: Vec<PageWrite>,
        /// The positions of the page that each copy copies. A count of 0: the whole page; absent:
        /// whole pages only.
        18 copy_spans: Vec<Span>,
        /// Computes layers `first_layer .. end_layer` of the vision tower for an image.
        19 images: Vec<ImageRecord>,
        /// The `page_count` image pages of each image, in order.
        20 image_pages: Vec<i32>,
        /// An image whose positions in the slot start at `position`.
        21 image_spans: Vec<ImageSpanRecord>,
        /// The `page_count` image pages of each span, in order.
        22 span_pages: Vec<i32>,
        /// Requests log-probabilities of the slot's tokens at positions `first .. first + count`,
        /// in the order of `rows`, at most one per row.
        24 prompt_logprobs: Vec<PromptLogprobsWant>,
        /// The number of tokens of each rank of a step group in this step, for 2 to 256 ranks;
        /// absent: there is no group.
        25 group: Vec<i32>,
        /// The draft tokens of the rows that sample, `row_tokens - 1` per row, in row order.
        /// Absent: the hand drafts by itself, or there are no drafts.
        26 draft_tokens: Vec<i32>,
        /// Before the rows: copies the state page into the slot's recurrent states.
        27 state_loads: Vec<StateCopy>,
        /// After the rows: copies the slot's recurrent states to the state page.
        28 state_saves: Vec<StateCopy>,
        /// Loads the adapter with this id, which was announced to the hand, into the place.
        29 pub(crate) place_writes: Vec<PlaceWrite>,
        /// The place of the adapter of each new slot that uses one, in the order of `slots`.
        30 slot_places: Vec<SlotValue>,
        /// The host tier of each copy. 0: the hand's own; n: the replica n - 1 in `host_lenders` of
        /// the configuration; absent: the hand's own. Only restores use other tiers.
        32 copy_sources: Vec<i32>,
        /// Sets `window_table[slot, index] = page`, a page of the window part; -1: layers with a
        /// sliding window no longer read these positions.
        33 window_writes: Vec<PageWrite>,
    }
}

fn take<'a, T>(rest: &mut &'a [T], count: usize) -> &'a [T] {
    let (head, tail) = rest.split_at(count);
    *rest = tail;
    head
}

impl StepPlan {
    /// Returns the number of the step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Adds a row.
    pub fn push_row(&mut self, row: Row) {
        let most = row.want.most();
        if most > 1 || (most == 1 && !self.row_tokens.is_empty()) {
            if self.row_tokens.is_empty() {
                // The rows before this one return one token each.
                self.row_tokens.resize(self.sampling_rows(), 1);
            }
            self.row_tokens.push(most.cast_signed());
        }
        let Row { slot, start, length, want } = row;
        self.rows.push(RowRecord { slot, start, length, flags: want.flags() });
    }

    fn sampling_rows(&self) -> usize {
        self.rows.iter().filter(|row| row.flags & FLAG_SAMPLE != 0).count()
    }

    /// Iterates over the rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row> + '_ {
        const MASKED: i32 = FLAG_SAMPLE | FLAG_MASKED;
        let mut most = self.row_tokens.iter();
        let mut most = move || most.next().map_or(1, |most| most.cast_unsigned());
        self.rows.iter().map(move |&RowRecord { slot, start, length, flags }| Row {
            slot,
            start,
            length,
            want: match flags {
                FLAG_SAMPLE => Want::Tokens(most()),
                MASKED => Want::Masked(most()),
                FLAG_POOL => Want::Vector,
                _ => Want::Nothing,
            },
        })
    }

    /// Returns the largest number of words of the plan's frame after its header, which is the size
    /// if nothing is moved to the arena.
    #[must_use]
    pub fn words(&self) -> usize {
        self.columns().iter().map(|column| ENTRY_WORDS + column.len()).sum()
    }
}

#[cfg(test)]
mod tests;
