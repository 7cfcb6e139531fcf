//! The step plan: the writes and computations of a hand in one step.

mod checks;
mod group;
mod images;
mod prompts;
mod tables;

pub use group::tell_group;
pub use images::{Grid, IMAGE_SPAN_WORDS, IMAGE_WORDS, ImageSpan, TowerWork};

use std::borrow::Cow;

use crate::frame::{ENTRY_WORDS, Frame, FrameError, Kind, as_words, encode, floats};
use crate::slot::{NewSlot, PAIR_WORDS, SLOT_FLOATS, SlotRecord, SlotWrite};

pub use prompts::{PROMPT_LOGPROBS_WORDS, PromptLogprobsWant};

/// Columns of a plan: the ids 1 to this, in the order of [`StepPlan::columns`].
const COLUMNS: usize = 25;
/// An id among them that no column has.
const UNUSED: u32 = 23;
/// Words that an emptied column keeps, also after a larger use.
const KEPT_WORDS: usize = 1 << 18;
/// Words of a page-table write.
pub const PAGE_WRITE_WORDS: usize = 3;
/// The largest number of words of a row: its record, its number of tokens, and its
/// log-probabilities of the prompt.
pub const ROW_WORDS: usize = ROW_RECORD_WORDS + 1 + PROMPT_LOGPROBS_WORDS;
/// Words of a record of the `rows` column.
const ROW_RECORD_WORDS: usize = 4;
/// Row flag: sample the last position.
const FLAG_SAMPLE: i32 = 1;
/// Row flag: pool the slot's states.
const FLAG_POOL: i32 = 2;
/// Row flag, beside [`FLAG_SAMPLE`]: the step's masks restrict the token.
const FLAG_MASKED: i32 = 4;

/// The purpose of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The row has keys and values only: more of the prompt follows.
    Nothing,
    /// The row gives at least one token for the positions after it, and at most this many. The hand
    /// has then computed the positions of all of them but the last.
    Tokens(u32),
    /// The row gives the next token, one that its mask allows. The step's [`crate::StepMasks`]
    /// follow the plan.
    Masked,
    /// The row gives one vector of the slot's positions, and has the last of them.
    Vector,
}

impl Want {
    /// The row gives the next token.
    pub const TOKEN: Self = Self::Tokens(1);

    /// True if tokens are sampled.
    #[must_use]
    pub fn samples(self) -> bool {
        matches!(self, Self::Tokens(_) | Self::Masked)
    }

    fn flags(self) -> i32 {
        match self {
            Self::Nothing => 0,
            Self::Tokens(_) => FLAG_SAMPLE,
            Self::Masked => FLAG_SAMPLE | FLAG_MASKED,
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

/// One step of work for a rank group, as flat columns that are reused from step to step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepPlan {
    step: u64,
    slots: Vec<i32>,
    slot_floats: Vec<f32>,
    tokens: Vec<i32>,
    stop_ids: Vec<i32>,
    bias_ids: Vec<i32>,
    bias_values: Vec<f32>,
    page_writes: Vec<i32>,
    rows: Vec<i32>,
    /// Empty, or of each row that samples.
    row_tokens: Vec<i32>,
    segments: Vec<i32>,
    embeds: Vec<i32>,
    allowed_counts: Vec<i32>,
    allowed_ids: Vec<i32>,
    copies: Vec<i32>,
    /// One word, or none.
    wait_us: Vec<i32>,
    host_writes: Vec<i32>,
    hot_rows: Vec<i32>,
    /// Empty, or of each copy.
    copy_spans: Vec<i32>,
    images: Vec<i32>,
    image_pages: Vec<i32>,
    image_spans: Vec<i32>,
    span_pages: Vec<i32>,
    prompt_logprobs: Vec<i32>,
    /// The tokens of each rank of a step group; elsewhere empty.
    group: Vec<i32>,
}

/// Empties a column, and gives back memory far beyond its last use.
fn empty<T>(column: &mut Vec<T>) {
    let used = column.len();
    column.clear();
    if column.capacity() > KEPT_WORDS && used < column.capacity() / 4 {
        column.shrink_to(KEPT_WORDS);
    }
}

fn take<'a, T>(rest: &mut &'a [T], count: usize) -> &'a [T] {
    let (head, tail) = rest.split_at(count);
    *rest = tail;
    head
}

/// The value of `slot` in a column of pairs, which come in the order of the new slots.
fn take_pair(rest: &mut &[i32], slot: i32) -> Option<u32> {
    let (&[of, value], tail) = rest.split_first_chunk::<PAIR_WORDS>()?;
    (of == slot).then(|| {
        *rest = tail;
        value.cast_unsigned()
    })
}

impl StepPlan {
    /// Empties the plan for step `step`. It keeps its memory, except for the part that only one
    /// large step needed.
    pub fn begin(&mut self, step: u64) {
        self.step = step;
        empty(&mut self.slots);
        empty(&mut self.slot_floats);
        empty(&mut self.tokens);
        empty(&mut self.stop_ids);
        empty(&mut self.bias_ids);
        empty(&mut self.bias_values);
        empty(&mut self.page_writes);
        empty(&mut self.rows);
        empty(&mut self.row_tokens);
        empty(&mut self.segments);
        empty(&mut self.embeds);
        empty(&mut self.allowed_counts);
        empty(&mut self.allowed_ids);
        empty(&mut self.copies);
        empty(&mut self.host_writes);
        empty(&mut self.hot_rows);
        empty(&mut self.copy_spans);
        empty(&mut self.images);
        empty(&mut self.image_pages);
        empty(&mut self.image_spans);
        empty(&mut self.span_pages);
        empty(&mut self.prompt_logprobs);
        empty(&mut self.group);
        empty(&mut self.wait_us);
    }

    /// The step's number.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Overwrites a slot.
    pub fn write_slot(&mut self, new: &NewSlot<'_>) {
        let (spec, params) = (new.spec, &new.spec.sampling);
        let record = SlotRecord::new(new);
        self.slots.extend_from_slice(&record.words());
        self.slot_floats.extend_from_slice(&[
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ]);
        self.tokens.extend_from_slice(new.tokens);
        self.stop_ids.extend_from_slice(spec.suppressed());
        for &(id, value) in params.logit_bias.iter() {
            self.bias_ids.push(id);
            self.bias_values.push(value);
        }
        if let Some(pooling) = spec.pooling.filter(|pooling| pooling.segment > 0) {
            self.segments.extend_from_slice(&[record.slot, pooling.segment.cast_signed()]);
        }
        if let Some(offset) = spec.embeds {
            self.embeds.extend_from_slice(&[record.slot, offset.cast_signed()]);
        }
        if let Some(ids) = &params.allowed {
            self.allowed_counts.extend_from_slice(&[record.slot, ids.len() as i32]);
            self.allowed_ids.extend_from_slice(ids);
        }
    }

    /// True if the plan overwrites a slot.
    #[must_use]
    pub fn writes_slots(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Adds a row.
    pub fn push_row(&mut self, row: Row) {
        let most = match row.want {
            Want::Tokens(most) => most,
            Want::Masked => 1,
            Want::Nothing | Want::Vector => 0,
        };
        if most > 1 || (most == 1 && !self.row_tokens.is_empty()) {
            if self.row_tokens.is_empty() {
                // Those before it give one each.
                self.row_tokens.resize(self.sampling_rows(), 1);
            }
            self.row_tokens.push(most.cast_signed());
        }
        self.rows.extend_from_slice(&[
            row.slot.cast_signed(),
            row.start.cast_signed(),
            row.length.cast_signed(),
            row.want.flags(),
        ]);
    }

    fn sampling_rows(&self) -> usize {
        let rows = self.rows.chunks_exact(ROW_RECORD_WORDS);
        rows.filter(|row| row[3] & FLAG_SAMPLE != 0).count()
    }

    /// The rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row> + '_ {
        const MASKED: i32 = FLAG_SAMPLE | FLAG_MASKED;
        let mut most = self.row_tokens.iter();
        let (records, _) = self.rows.as_chunks::<ROW_RECORD_WORDS>();
        records.iter().map(move |&[slot, start, length, flags]| Row {
            slot: slot.cast_unsigned(),
            start: start.cast_unsigned(),
            length: length.cast_unsigned(),
            want: match flags {
                FLAG_SAMPLE => Want::Tokens(most.next().map_or(1, |most| most.cast_unsigned())),
                MASKED => {
                    most.next();
                    Want::Masked
                }
                FLAG_POOL => Want::Vector,
                _ => Want::Nothing,
            },
        })
    }

    /// The slots that the plan overwrites.
    pub fn new_slots(&self) -> impl Iterator<Item = SlotWrite<'_>> + '_ {
        let (mut tokens, mut stop_ids) = (self.tokens.as_slice(), self.stop_ids.as_slice());
        let (mut segments, mut embeds) = (self.segments.as_slice(), self.embeds.as_slice());
        let (mut counts, mut allowed) =
            (self.allowed_counts.as_slice(), self.allowed_ids.as_slice());
        let (mut bias_ids, mut bias_values) =
            (self.bias_ids.as_slice(), self.bias_values.as_slice());
        let (floats, _) = self.slot_floats.as_chunks::<SLOT_FLOATS>();
        records(&self.slots).zip(floats).map(move |(record, floats)| SlotWrite {
            slot: record.slot.cast_unsigned(),
            tokens: take(&mut tokens, record.inline()),
            token_count: record.token_count.cast_unsigned(),
            arena_offset: u32::try_from(record.arena_offset).ok(),
            sampling: record.sampling(
                floats,
                take(&mut bias_ids, record.bias_count as usize),
                take(&mut bias_values, record.bias_count as usize),
            ),
            prompt_len: record.prompt_len.cast_unsigned(),
            min_total: record.min_total.cast_unsigned(),
            stop_ids: take(&mut stop_ids, record.stop_count as usize),
            logprobs: u8::try_from(record.logprobs).ok(),
            allowed: take_pair(&mut counts, record.slot)
                .map(|count| take(&mut allowed, count as usize)),
            segment: take_pair(&mut segments, record.slot).unwrap_or(0),
            embeds: take_pair(&mut embeds, record.slot),
        })
    }

    /// The largest number of words of the plan's frame after its header, if nothing is spilled.
    #[must_use]
    pub fn words(&self) -> usize {
        let columns = self.columns(&self.slots, &self.tokens);
        ENTRY_WORDS * COLUMNS + columns.iter().map(|column| column.len()).sum::<usize>()
    }

    fn columns<'a>(&'a self, slots: &'a [i32], tokens: &'a [i32]) -> [&'a [i32]; COLUMNS] {
        [
            slots,
            as_words(&self.slot_floats),
            tokens,
            &self.stop_ids,
            &self.bias_ids,
            as_words(&self.bias_values),
            &self.page_writes,
            &self.rows,
            &self.row_tokens,
            &self.segments,
            &self.embeds,
            &self.allowed_counts,
            &self.allowed_ids,
            &self.copies,
            &self.wait_us,
            &self.host_writes,
            &self.hot_rows,
            &self.copy_spans,
            &self.images,
            &self.image_pages,
            &self.image_spans,
            &self.span_pages,
            &[],
            &self.prompt_logprobs,
            &self.group,
        ]
    }

    /// Writes the plan's frame to `out`, whose old content is lost.
    ///
    /// # Errors
    /// The frame would be too large for a reader.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        self.encode_spilling(out, usize::MAX, |_| None)
    }

    /// Encodes the plan without the tokens of new slots that have at least `min_tokens` of them.
    /// `place` gets these tokens and gives their byte offset in the arena. With `None`, because the
    /// arena is full, they stay in the plan.
    ///
    /// # Errors
    /// The frame would be too large for a reader.
    pub fn encode_spilling(
        &self,
        out: &mut Vec<u8>,
        min_tokens: usize,
        mut place: impl FnMut(&[i32]) -> Option<u32>,
    ) -> Result<(), FrameError> {
        let (mut slots, mut tokens) =
            (Cow::Borrowed(&self.slots[..]), Cow::Borrowed(&self.tokens[..]));
        if self.tokens.len() >= min_tokens {
            let (mut written, mut left) = (Vec::with_capacity(self.slots.len()), Vec::new());
            let mut rest = self.tokens.as_slice();
            for mut record in records(&self.slots) {
                let own = take(&mut rest, record.inline());
                let placed = if own.len() >= min_tokens { place(own) } else { None };
                match placed {
                    Some(offset) => record.arena_offset = offset.cast_signed(),
                    None => left.extend_from_slice(own),
                }
                written.extend_from_slice(&record.words());
            }
            (slots, tokens) = (Cow::Owned(written), Cow::Owned(left));
        }
        encode(Kind::Plan, self.step, &self.columns(&slots, &tokens), out)
    }

    /// Reads a plan's frame.
    ///
    /// # Errors
    /// The frame is of another kind, a column or a flag is not known, or lengths of columns
    /// contradict each other.
    pub fn decode(frame: &Frame) -> Result<Self, FrameError> {
        if frame.header().kind != Kind::Plan {
            return Err(FrameError::Malformed("not a plan"));
        }
        let columns = frame.known::<COLUMNS>()?;
        if !columns[UNUSED as usize - 1].is_empty() {
            return Err(FrameError::Column(UNUSED));
        }
        let [slots, slot_floats, tokens, stop_ids, bias_ids, bias_values, page_writes, ..] =
            columns;
        let [_, _, _, _, _, _, _, rows, row_tokens, segments, embeds, others @ ..] = columns;
        let [allowed_counts, allowed_ids, copies, wait_us, host_writes, hot_rows, ..] = others;
        let [_, _, _, _, _, _, copy_spans, images, image_pages, ..] = others;
        let [.., image_spans, span_pages, _, prompt_logprobs, group] = others;
        let plan = Self {
            step: frame.header().step,
            slots: slots.to_vec(),
            slot_floats: floats(slot_floats).to_vec(),
            tokens: tokens.to_vec(),
            stop_ids: stop_ids.to_vec(),
            bias_ids: bias_ids.to_vec(),
            bias_values: floats(bias_values).to_vec(),
            page_writes: page_writes.to_vec(),
            rows: rows.to_vec(),
            row_tokens: row_tokens.to_vec(),
            segments: segments.to_vec(),
            embeds: embeds.to_vec(),
            allowed_counts: allowed_counts.to_vec(),
            allowed_ids: allowed_ids.to_vec(),
            copies: copies.to_vec(),
            wait_us: wait_us.to_vec(),
            host_writes: host_writes.to_vec(),
            hot_rows: hot_rows.to_vec(),
            copy_spans: copy_spans.to_vec(),
            images: images.to_vec(),
            image_pages: image_pages.to_vec(),
            image_spans: image_spans.to_vec(),
            span_pages: span_pages.to_vec(),
            prompt_logprobs: prompt_logprobs.to_vec(),
            group: group.to_vec(),
        };
        plan.check()?;
        Ok(plan)
    }
}

fn records(slots: &[i32]) -> impl Iterator<Item = SlotRecord> + '_ {
    let (records, _) = slots.as_chunks::<{ SlotRecord::WORDS }>();
    records.iter().map(SlotRecord::of)
}

#[cfg(test)]
mod tests;
