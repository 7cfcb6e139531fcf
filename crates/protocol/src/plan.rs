//! The step plan: what the hand has to write and compute in one step.

use std::sync::Arc;

use crate::frame::{Frame, FrameError, Kind, as_words, encode, floats};

/// Columns of a plan.
const COLUMNS: usize = 8;
/// Words that an emptied column keeps, whatever it has held.
const KEPT_WORDS: usize = 1 << 18;
/// Words of a page-table write.
pub const PAGE_WRITE_WORDS: usize = 3;
/// Words of a row.
pub const ROW_WORDS: usize = 4;
/// Words of a new slot's record in the `slots` column.
const SLOT_WORDS: usize = 13;
/// Words of a new slot's record in the `slot_floats` column.
const SLOT_FLOATS: usize = 6;
/// Word of `arena_offset` in a slot record.
const ARENA_WORD: usize = 10;
/// Word of `segment` in a slot record.
const SEGMENT_WORD: usize = 11;
/// Word of `embeds_offset` in a slot record.
const EMBEDS_WORD: usize = 12;
/// Row flag: sample the last position.
const FLAG_SAMPLE: i32 = 1;
/// Row flag: pool the slot's states.
const FLAG_POOL: i32 = 2;

/// Index of a column in a plan frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanColumn {
    /// Slot records.
    Slots = 0,
    /// Sampling parameters that are floats.
    SlotFloats = 1,
    /// Tokens of the new slots.
    Tokens = 2,
    /// Ids that `min_total` suppresses.
    StopIds = 3,
    /// Ids of logit biases.
    BiasIds = 4,
    /// Values of logit biases.
    BiasValues = 5,
    /// Page-table writes.
    PageWrites = 6,
    /// Rows to compute.
    Rows = 7,
}

/// How a slot's tokens are sampled. Part of the device's slot table: replaced as a whole when a slot is written.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass, 1 is off.
    pub top_p: f32,
    /// Number of candidates, 0 is off.
    pub top_k: i32,
    /// Share of the largest probability below which tokens are dropped, 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of seen tokens, 1 is off (Keskar et al. 2019).
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each generated token.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logit of each generated token.
    pub frequency_penalty: f32,
    /// With the position, the only source of randomness.
    pub seed: u64,
    /// Generated tokens before a stop id may be sampled.
    pub min_tokens: u32,
    /// `None`: no log-probabilities; `Some(n)`: of the sampled token and the `n` most likely.
    pub logprobs: Option<u8>,
    /// Added to the logits, by token id. The choices of a client's request share it.
    pub logit_bias: Arc<[(i32, f32)]>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            min_tokens: 0,
            logprobs: None,
            logit_bias: Arc::default(),
        }
    }
}

/// How a prompt that is to become a vector is read, in place of sampling parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pooling {
    /// Where the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
}

/// A slot to overwrite: its tokens and how it samples.
#[derive(Debug, Clone, Copy)]
pub struct NewSlot<'a> {
    /// Row of the device tables.
    pub slot: u32,
    /// Prompt and, for a replayed or preempted request, what was generated so far.
    pub tokens: &'a [i32],
    /// How many of `tokens` are the prompt.
    pub prompt_len: u32,
    /// Sampling parameters.
    pub params: &'a SamplingParams,
    /// End-of-sequence and stop ids, suppressed while fewer than `min_tokens` are generated.
    pub stop_ids: &'a [i32],
    /// Where the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
    /// Byte offset in the arena of the prompt's embeddings, which stand for its tokens' own.
    pub embeds: Option<u32>,
}

impl NewSlot<'_> {
    /// Stop ids that the hand must know: those that it suppresses.
    fn suppressed(&self) -> &[i32] {
        if self.params.min_tokens == 0 { &[] } else { self.stop_ids }
    }

    /// Words that [`StepPlan::write_slot`] adds to a plan.
    #[must_use]
    pub fn words(&self) -> usize {
        let lists = self.suppressed().len() + 2 * self.params.logit_bias.len();
        SLOT_WORDS + SLOT_FLOATS + self.tokens.len() + lists
    }
}

/// A new slot as it stands in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotWrite<'a> {
    /// Row of the device tables.
    pub slot: u32,
    /// Its tokens; empty where they are in the arena.
    pub tokens: &'a [i32],
    /// How many of the tokens are the prompt.
    pub prompt_len: u32,
    /// Below this position `stop_ids` can't be sampled.
    pub min_total: u32,
    /// Empty when `min_tokens` is 0.
    pub stop_ids: &'a [i32],
    /// Log-probabilities asked for.
    pub logprobs: Option<u8>,
    /// Where the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
    /// Byte offset in the arena of the prompt's embeddings, which stand for its tokens' own.
    pub embeds: Option<u32>,
}

/// Empties a column, and gives back what it has far more of than its last use.
fn empty<T>(column: &mut Vec<T>) {
    let used = column.len();
    column.clear();
    if column.capacity() > KEPT_WORDS && used < column.capacity() / 4 {
        column.shrink_to(KEPT_WORDS);
    }
}

fn take<'a>(rest: &mut &'a [i32], count: usize) -> &'a [i32] {
    let (head, tail) = rest.split_at(count);
    *rest = tail;
    head
}

/// Positions of one slot to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Row of the device tables.
    pub slot: u32,
    /// First position to compute.
    pub start: u32,
    /// Number of positions.
    pub length: u32,
    /// Sample a token for position `start + length`.
    pub sample: bool,
    /// Make one vector of the slot's positions, of which these are the last. Not with `sample`.
    pub pool: bool,
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
}

impl StepPlan {
    /// Empties the plan for step `step`. It keeps its memory, but not what only one large step needed.
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
    }

    /// The step's number.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Overwrites a slot.
    pub fn write_slot(&mut self, new: &NewSlot<'_>) {
        let params = new.params;
        let min_total = new.prompt_len.saturating_add(params.min_tokens).min(i32::MAX as u32);
        let stop_ids = new.suppressed();
        self.slots.extend_from_slice(&[
            new.slot.cast_signed(),
            new.tokens.len() as i32,
            new.prompt_len.cast_signed(),
            params.top_k,
            (params.seed as u32).cast_signed(),
            ((params.seed >> 32) as u32).cast_signed(),
            min_total.cast_signed(),
            params.logprobs.map_or(-1, i32::from),
            stop_ids.len() as i32,
            params.logit_bias.len() as i32,
            -1,
            new.segment.cast_signed(),
            new.embeds.map_or(-1, u32::cast_signed),
        ]);
        self.slot_floats.extend_from_slice(&[
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ]);
        self.tokens.extend_from_slice(new.tokens);
        self.stop_ids.extend_from_slice(stop_ids);
        for &(id, value) in params.logit_bias.iter() {
            self.bias_ids.push(id);
            self.bias_values.push(value);
        }
    }

    /// Sets `page_table[slot, index] = page`.
    pub fn write_page(&mut self, slot: u32, index: u32, page: u32) {
        self.page_writes.extend_from_slice(&[slot, index, page].map(u32::cast_signed));
    }

    /// Adds a row.
    pub fn push_row(&mut self, row: Row) {
        let sample = if row.sample { FLAG_SAMPLE } else { 0 };
        let flags = sample | if row.pool { FLAG_POOL } else { 0 };
        self.rows.extend_from_slice(&[
            row.slot.cast_signed(),
            row.start.cast_signed(),
            row.length.cast_signed(),
            flags,
        ]);
    }

    /// The rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row> + '_ {
        self.rows.chunks_exact(ROW_WORDS).map(|r| Row {
            slot: r[0].cast_unsigned(),
            start: r[1].cast_unsigned(),
            length: r[2].cast_unsigned(),
            sample: r[3] & FLAG_SAMPLE != 0,
            pool: r[3] & FLAG_POOL != 0,
        })
    }

    /// The slots that the plan overwrites.
    pub fn new_slots(&self) -> impl Iterator<Item = SlotWrite<'_>> + '_ {
        let (mut tokens, mut stop_ids) = (self.tokens.as_slice(), self.stop_ids.as_slice());
        self.slots.chunks_exact(SLOT_WORDS).map(move |record| {
            let inline = if record[ARENA_WORD] < 0 { record[1] as usize } else { 0 };
            SlotWrite {
                slot: record[0].cast_unsigned(),
                tokens: take(&mut tokens, inline),
                prompt_len: record[2].cast_unsigned(),
                min_total: record[6].cast_unsigned(),
                stop_ids: take(&mut stop_ids, record[8] as usize),
                logprobs: u8::try_from(record[7]).ok(),
                segment: record[SEGMENT_WORD].cast_unsigned(),
                embeds: u32::try_from(record[EMBEDS_WORD]).ok(),
            }
        })
    }

    /// The page-table writes: slot, index, page.
    pub fn page_writes(&self) -> impl ExactSizeIterator<Item = (u32, u32, u32)> + '_ {
        self.page_writes
            .chunks_exact(PAGE_WRITE_WORDS)
            .map(|w| (w[0].cast_unsigned(), w[1].cast_unsigned(), w[2].cast_unsigned()))
    }

    /// Moves the tokens of new slots that have at least `min_tokens` of them out of the plan: `place` gets the tokens and answers the
    /// byte offset in the arena where it put them, or `None` to leave them inline (the arena is full).
    pub fn spill_tokens(
        &mut self,
        min_tokens: usize,
        mut place: impl FnMut(&[i32]) -> Option<u32>,
    ) {
        if self.tokens.len() < min_tokens {
            return;
        }
        let (mut read, mut write) = (0, 0);
        for record in self.slots.chunks_exact_mut(SLOT_WORDS) {
            if record[ARENA_WORD] >= 0 {
                continue;
            }
            let count = record[1] as usize;
            let placed =
                if count >= min_tokens { place(&self.tokens[read..read + count]) } else { None };
            if let Some(offset) = placed {
                record[ARENA_WORD] = offset.cast_signed();
            } else {
                self.tokens.copy_within(read..read + count, write);
                write += count;
            }
            read += count;
        }
        self.tokens.truncate(write);
    }

    /// Words of the plan's frame after its header, as long as nothing is spilled.
    #[must_use]
    pub fn words(&self) -> usize {
        COLUMNS
            + self.slots.len()
            + self.slot_floats.len()
            + self.tokens.len()
            + self.stop_ids.len()
            + self.bias_ids.len()
            + self.bias_values.len()
            + self.page_writes.len()
            + self.rows.len()
    }

    /// Writes the plan's frame to `out`, replacing what it holds.
    ///
    /// # Errors
    /// The frame would be larger than a reader takes.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        encode(
            Kind::Plan,
            self.step,
            &[
                &self.slots,
                as_words(&self.slot_floats),
                &self.tokens,
                &self.stop_ids,
                &self.bias_ids,
                as_words(&self.bias_values),
                &self.page_writes,
                &self.rows,
            ],
            out,
        )
    }

    /// Reads a plan's frame.
    ///
    /// # Errors
    /// Another kind of frame, or columns whose lengths contradict each other.
    pub fn decode(frame: &Frame) -> Result<Self, FrameError> {
        if frame.header().kind != Kind::Plan {
            return Err(FrameError::Malformed("not a plan"));
        }
        let [slots, slot_floats, tokens, stop_ids, bias_ids, bias_values, page_writes, rows] =
            frame.exactly::<COLUMNS>()?;
        let whole = slots.len() % SLOT_WORDS == 0
            && page_writes.len() % PAGE_WRITE_WORDS == 0
            && rows.len() % ROW_WORDS == 0;
        if !whole {
            return Err(FrameError::Malformed("plan record length"));
        }
        let (mut inline, mut stops, mut biases) = (0_i64, 0_i64, 0_i64);
        for record in slots.chunks_exact(SLOT_WORDS) {
            if record[1] < 0 || record[8] < 0 || record[9] < 0 {
                return Err(FrameError::Malformed("negative count"));
            }
            if record[ARENA_WORD] < 0 {
                inline += i64::from(record[1]);
            }
            stops += i64::from(record[8]);
            biases += i64::from(record[9]);
        }
        let agree = slot_floats.len() == slots.len() / SLOT_WORDS * SLOT_FLOATS
            && tokens.len() as i64 == inline
            && stop_ids.len() as i64 == stops
            && bias_ids.len() as i64 == biases
            && bias_values.len() == bias_ids.len();
        if !agree {
            return Err(FrameError::Malformed("plan columns disagree"));
        }
        Ok(Self {
            step: frame.header().step,
            slots: slots.to_vec(),
            slot_floats: floats(slot_floats).to_vec(),
            tokens: tokens.to_vec(),
            stop_ids: stop_ids.to_vec(),
            bias_ids: bias_ids.to_vec(),
            bias_values: floats(bias_values).to_vec(),
            page_writes: page_writes.to_vec(),
            rows: rows.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_leave_the_plan_and_short_ones_stay() {
        let mut plan = StepPlan::default();
        plan.begin(1);
        let params = SamplingParams::default();
        for (slot, tokens) in [(0, vec![1; 3]), (1, vec![2; 10]), (2, vec![3; 4]), (3, vec![4; 12])]
        {
            plan.write_slot(&NewSlot {
                slot,
                tokens: &tokens,
                prompt_len: tokens.len() as u32,
                params: &params,
                stop_ids: &[],
                segment: 0,
                embeds: None,
            });
        }
        let mut arena = Vec::new();
        plan.spill_tokens(8, |tokens| {
            if arena.len() + tokens.len() > 10 {
                return None;
            }
            let offset = arena.len() as u32 * 4;
            arena.extend_from_slice(tokens);
            Some(offset)
        });
        assert_eq!(arena, vec![2; 10]);
        let left: Vec<_> = plan.new_slots().map(|new| (new.slot, new.tokens.to_vec())).collect();
        assert_eq!(
            left,
            [(0, vec![1; 3]), (1, vec![]), (2, vec![3; 4]), (3, vec![4; 12])],
            "the fourth found the arena full and stays inline"
        );
    }

    #[test]
    fn a_plan_knows_the_words_of_its_frame() {
        let mut plan = StepPlan::default();
        let params = SamplingParams {
            min_tokens: 1,
            logit_bias: [(1, 0.5), (2, 1.5)].into(),
            ..SamplingParams::default()
        };
        for params in [params.clone(), SamplingParams { min_tokens: 0, ..params }] {
            plan.begin(1);
            let tokens = [7; 5];
            let stop_ids = &[1, 2, 3];
            let new = NewSlot {
                slot: 0,
                tokens: &tokens,
                prompt_len: 5,
                params: &params,
                stop_ids,
                segment: 0,
                embeds: None,
            };
            let empty = plan.words();
            plan.write_slot(&new);
            assert_eq!(plan.words(), empty + new.words());
            plan.write_page(0, 0, 9);
            plan.push_row(Row { slot: 0, start: 0, length: 5, sample: true, pool: false });
            assert_eq!(plan.words(), empty + new.words() + PAGE_WRITE_WORDS + ROW_WORDS);
            let mut bytes = Vec::new();
            plan.encode(&mut bytes).expect("within the limit");
            assert_eq!(bytes.len(), crate::HEADER_BYTES + 4 * plan.words());
        }
    }

    #[test]
    fn columns_that_grew_for_one_step_shrink_again() {
        let mut plan = StepPlan::default();
        plan.begin(1);
        plan.tokens.resize(8 * KEPT_WORDS, 0);
        plan.begin(2);
        assert!(plan.tokens.capacity() >= 8 * KEPT_WORDS, "the next step may be as large");
        plan.begin(3);
        assert!(plan.tokens.capacity() <= KEPT_WORDS, "it was not");
    }
}
