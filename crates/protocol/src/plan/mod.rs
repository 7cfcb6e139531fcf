//! The step plan: what a hand writes and computes in one step.

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

/// The largest number of words of a row: its record, its number of tokens, and its
/// log-probabilities of the prompt.
pub const ROW_WORDS: usize = RowRecord::WORDS + 1 + PromptLogprobsWant::WORDS;
/// Row flag: sample the last position.
pub const FLAG_SAMPLE: i32 = 1;
/// Row flag: pool the slot's states.
pub const FLAG_POOL: i32 = 2;
/// Row flag, beside [`FLAG_SAMPLE`]: the step's masks restrict the token.
pub const FLAG_MASKED: i32 = 4;

/// The purpose of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The row only computes keys and values, because more of the prompt follows.
    Nothing,
    /// The row gives at least one token for the positions after it, and at most this many. The hand
    /// has then computed the positions of all these tokens except the last.
    Tokens(u32),
    /// The same, but each token has to be allowed by the mask of its position. The step's
    /// [`crate::StepMasks`] follow the plan.
    Masked(u32),
    /// The row gives one vector of the slot's positions, and computes the last of them.
    Vector,
}

impl Want {
    /// The row gives the next token.
    pub const TOKEN: Self = Self::Tokens(1);
    /// The row gives the next token, which its mask has to allow.
    pub const MASKED: Self = Self::Masked(1);

    /// The largest number of tokens that the row gives.
    #[must_use]
    pub fn most(self) -> u32 {
        match self {
            Self::Tokens(most) | Self::Masked(most) => most,
            Self::Nothing | Self::Vector => 0,
        }
    }

    /// True if tokens are sampled.
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

/// Positions of one slot to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Row of the device tables.
    pub slot: u32,
    /// First position to compute.
    pub start: u32,
    /// The number of positions.
    pub length: u32,
    /// The purpose of the row.
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
    /// One step of work for a rank group, as flat columns that are reused from step to step.
    pub struct StepPlan: Plan, "plan" {
        step,
        /// One record a new slot.
        1 slots: Vec<SlotRecord>,
        /// One record a new slot.
        2 slot_floats: Vec<SlotFloats>,
        /// The `token_count` tokens of each new slot whose `arena_offset` is -1.
        3 tokens: Vec<i32>,
        /// `stop_count` ids a new slot.
        4 stop_ids: Vec<i32>,
        /// `bias_count` ids a new slot.
        5 bias_ids: Vec<i32>,
        /// One a bias id.
        6 bias_values: Vec<f32>,
        /// `page_table[slot, index] = page`; -1: these positions are on no page of the device.
        7 page_writes: Vec<PageWrite>,
        /// One record a row.
        8 rows: Vec<RowRecord>,
        /// The most tokens of each row that samples, in row order; absent: 1 each.
        9 row_tokens: Vec<i32>,
        /// The segment of new slots whose prompt is a pair, in the order of `slots`.
        10 segments: Vec<SlotValue>,
        /// The byte offset in the arena of the embeddings of new slots whose prompt came as such,
        /// in the order of `slots`.
        11 embeds: Vec<SlotValue>,
        /// The number of ids of new slots that may sample some ids only, in the order of `slots`.
        12 allowed_counts: Vec<SlotValue>,
        /// The ids of each of them, ascending.
        13 allowed_ids: Vec<i32>,
        /// Copy a page between the device's memory and the host's. `direction` 0 saves, 1 restores,
        /// 2 restores index keys alone, and `hot` is -1; 3 saves and 4 restores a state page.
        14 copies: Vec<CopyRecord>,
        /// In a plan without rows: answer when a copy has ended, when another plan has come, or
        /// after this many microseconds (at most 1000).
        15 wait_us: Option<u32>,
        /// `host_table[slot, index] = page`, a page of the host's tier.
        16 host_writes: Vec<PageWrite>,
        /// `hot_rows[slot, index] = page`, a page whose rows are the slot's to keep single
        /// positions in.
        17 hot_rows: Vec<PageWrite>,
        /// Positions of the page of each copy; a count of 0: all; absent: all of each.
        18 copy_spans: Vec<Span>,
        /// Compute layers `first_layer .. end_layer` of the tower for an image.
        19 images: Vec<ImageRecord>,
        /// The `page_count` image pages of each image, in order.
        20 image_pages: Vec<i32>,
        /// An image stands in the slot from `position` on.
        21 image_spans: Vec<ImageSpanRecord>,
        /// The `page_count` image pages of each span, in order.
        22 span_pages: Vec<i32>,
        /// Log-probabilities of the slot's tokens at positions `first .. first + count`, in the
        /// order of `rows`, at most one a row.
        24 prompt_logprobs: Vec<PromptLogprobsWant>,
        /// Tokens of each rank of a step group in this step, 2 to 256 of them; absent: there is no
        /// group.
        25 group: Vec<i32>,
        /// Tokens that are expected of rows which may give several, `row_tokens - 1` of each row
        /// that samples, in row order; absent: the hand expects tokens by itself, or none.
        26 draft_tokens: Vec<i32>,
        /// Before the rows: the slot's recurrent states become the content of the state page.
        27 state_loads: Vec<StateCopy>,
        /// After the rows: the slot's recurrent states are copied to the state page.
        28 state_saves: Vec<StateCopy>,
        /// The place gets the adapter with this id, which the hand knows.
        29 pub(crate) place_writes: Vec<PlaceWrite>,
        /// The place of new slots whose rows an adapter changes, in the order of `slots`.
        30 slot_places: Vec<SlotValue>,
        /// The host tier of each copy: 0 the own, n the one with that place in `host_lenders` of
        /// the configuration; absent: the own. Only restores have others.
        32 copy_sources: Vec<i32>,
        /// `window_table[slot, index] = page`, a page of the window part; -1: no row reads these
        /// positions any more in layers with a window.
        33 window_writes: Vec<PageWrite>,
    }
}

fn take<'a, T>(rest: &mut &'a [T], count: usize) -> &'a [T] {
    let (head, tail) = rest.split_at(count);
    *rest = tail;
    head
}

impl StepPlan {
    /// The step's number.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Adds a row.
    pub fn push_row(&mut self, row: Row) {
        let most = row.want.most();
        if most > 1 || (most == 1 && !self.row_tokens.is_empty()) {
            if self.row_tokens.is_empty() {
                // The rows before this one give one token each.
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

    /// The rows, in order.
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

    /// The largest number of words of the plan's frame after its header, if nothing is spilled.
    #[must_use]
    pub fn words(&self) -> usize {
        self.columns().iter().map(|column| ENTRY_WORDS + column.len()).sum()
    }
}

#[cfg(test)]
mod tests;
