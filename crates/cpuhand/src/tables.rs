//! The tables of slots: each slot's tokens, pages and sampling parameters.

use std::collections::HashMap;

use forebay_kernels::Shared;
use forebay_protocol::{SamplingParams, SlotSpec, SlotWrite, StepPlan};
use thiserror::Error;

/// The error for a plan that refers to something that does not exist: the tables of brain and hand
/// differ.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub(crate) struct PlanError(pub(crate) String);

pub(crate) fn wrong<T>(what: impl Into<String>) -> Result<T, PlanError> {
    Err(PlanError(what.into()))
}

/// How often a token has occurred in a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) seen: u32,
    pub(crate) generated: u32,
}

/// The request in a slot.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slot {
    pub(crate) prompt_len: usize,
    pub(crate) spec: SlotSpec,
    /// The counts of the tokens before the next position. They are maintained only if there is a
    /// penalty.
    pub(crate) counts: HashMap<i32, Count>,
}

impl Default for Slot {
    /// A slot that no plan has written. Its rows are sampled greedily.
    fn default() -> Self {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let spec = SlotSpec { sampling, ..SlotSpec::default() };
        Self { prompt_len: 0, spec, counts: HashMap::new() }
    }
}

impl Slot {
    /// True if the request needs only the most likely token.
    pub(crate) fn is_plain(&self) -> bool {
        let params = &self.spec.sampling;
        params.temperature == 0.0
            && !params.changes_logits()
            && params.logprobs.is_none()
            && self.spec.stop_ids.is_empty()
    }

    /// True if stop ids can't be sampled at a position. If only stop ids are allowed, they can.
    pub(crate) fn suppresses(&self, position: usize) -> bool {
        let params = &self.spec.sampling;
        let only_stops = || {
            let is_stop = |id: &i32| self.spec.stop_ids.contains(id);
            params.allowed.as_ref().is_some_and(|ids| ids.iter().all(is_stop))
        };
        !self.spec.stop_ids.is_empty()
            && position < self.prompt_len + params.min_tokens as usize
            && !only_stops()
    }

    /// For each sampled token, the number of most likely tokens to list; `None` if no
    /// log-probabilities are requested.
    pub(crate) fn logprobs(&self) -> Option<usize> {
        self.spec.sampling.logprobs.map(usize::from)
    }

    /// Counts a sampled token.
    pub(crate) fn count(&mut self, token: i32) {
        let count = self.counts.entry(token).or_default();
        count.seen += 1;
        count.generated += 1;
    }

    fn recount(&mut self, tokens: &[i32]) {
        // Token ids of a prompt of embeddings are placeholders, and do not count as seen.
        let first = if self.spec.embeds.is_some() { self.prompt_len.min(tokens.len()) } else { 0 };
        for (position, &token) in tokens.iter().enumerate().skip(first) {
            let count = self.counts.entry(token).or_default();
            count.seen += 1;
            count.generated += u32::from(position >= self.prompt_len);
        }
    }
}

/// The tables, indexed by slot.
pub(crate) struct Tables {
    pub(crate) slots: Vec<Slot>,
    /// `[slots, token_stride]`: the tokens of each slot.
    pub(crate) tokens: Vec<i32>,
    /// One more than the context length, because the token sampled at its very end is stored too.
    pub(crate) token_stride: usize,
    /// `[slots, page_stride]`: the page table of each slot. -1 marks entries that the brain has not
    /// written, so that using one is an error instead of an access to another request's page.
    pub(crate) pages: Vec<i32>,
    /// The page tables of the window part, with `null_page` in place of -1: a query that reads the
    /// null page is an error. Empty without a window part.
    pub(crate) window: Vec<i32>,
    null_page: i32,
    pub(crate) page_stride: usize,
    pub(crate) context_length: usize,
    vocabulary: usize,
}

impl Tables {
    pub(crate) fn new(
        slots: usize,
        context_length: usize,
        page_size: usize,
        vocabulary: usize,
    ) -> Self {
        let (token_stride, page_stride) = (context_length + 1, context_length.div_ceil(page_size));
        Self {
            slots: vec![Slot::default(); slots],
            tokens: vec![0; slots * token_stride],
            token_stride,
            pages: vec![-1; slots * page_stride],
            window: Vec::new(),
            null_page: -1,
            page_stride,
            context_length,
            vocabulary,
        }
    }

    /// Adds the window part with this many pages; 0 if there is none.
    pub(crate) fn with_window(mut self, pages: usize) -> Self {
        if pages > 0 {
            self.null_page = i32::try_from(pages).unwrap_or(i32::MAX);
            self.window = vec![self.null_page; self.pages.len()];
        }
        self
    }

    /// Writes a plan's new slots and page-table entries.
    pub(crate) fn write(&mut self, plan: &StepPlan, arena: &Shared) -> Result<(), PlanError> {
        for write in plan.new_slots() {
            self.write_slot(write, arena)?;
        }
        for (slot, index, page) in plan.page_writes() {
            let (slot, index) = (slot as usize, index as usize);
            if slot >= self.slots.len() || index >= self.page_stride {
                return wrong(format!("page write: slot {slot} and index {index} are not there"));
            }
            self.pages[slot * self.page_stride + index] =
                page.map_or(-1, |page| i32::try_from(page).unwrap_or(-1));
        }
        for (slot, index, page) in plan.window_writes() {
            let (slot, index) = (slot as usize, index as usize);
            if slot >= self.slots.len() || index >= self.page_stride || self.window.is_empty() {
                return wrong(format!("window write: slot {slot} and index {index} are not there"));
            }
            let page = page.map(|page| i32::try_from(page).unwrap_or(-1));
            self.window[slot * self.page_stride + index] = page.unwrap_or(self.null_page);
        }
        match plan.host_writes().len() + plan.hot_rows().len() {
            0 => Ok(()),
            _ => wrong("host pages of slots in a plan for a hand without sparse decoding"),
        }
    }

    fn write_slot(&mut self, write: SlotWrite<'_>, arena: &Shared) -> Result<(), PlanError> {
        let (slot, count) = (write.slot as usize, write.token_count as usize);
        if slot >= self.slots.len() {
            return wrong(format!("new slot: slot {slot} is not within 0..{}", self.slots.len()));
        }
        if count > self.token_stride {
            return wrong(format!("new slot: {count} tokens, of at most {}", self.token_stride));
        }
        let row = &mut self.tokens[slot * self.token_stride..][..count];
        match write.arena_offset {
            None => row.copy_from_slice(write.tokens),
            Some(offset) => {
                let Some(bytes) = arena.read(offset as usize, 4 * count) else {
                    return wrong(format!(
                        "tokens at byte {offset} of an arena of {}",
                        arena.bytes()
                    ));
                };
                bytemuck::cast_slice_mut(row).copy_from_slice(bytes);
            }
        }
        if !self.window.is_empty() {
            self.window[slot * self.page_stride..][..self.page_stride].fill(self.null_page);
        }
        let prompt_len = write.prompt_len as usize;
        let mut new = Slot { prompt_len, spec: write.spec, counts: HashMap::new() };
        let SlotSpec { sampling, stop_ids, .. } = &new.spec;
        let biased = sampling.logit_bias.iter().map(|(id, _)| id);
        let allowed = sampling.allowed.iter().flat_map(|ids| ids.iter());
        let mut ids = biased.chain(&**stop_ids).chain(allowed);
        if let Some(id) = ids.find(|&&id| id < 0 || id as usize >= self.vocabulary) {
            return wrong(format!("new slot: the id {id}, of a vocabulary of {}", self.vocabulary));
        }
        if new.spec.sampling.has_penalty() {
            new.recount(row);
        }
        self.slots[slot] = new;
        Ok(())
    }

    /// Writes the drafts of rows after the last tokens of their slots.
    pub(crate) fn write_drafts(&mut self, plan: &StepPlan) -> Result<(), PlanError> {
        for (row, drafts) in plan.rows().zip(plan.drafts()).filter(|(_, it)| !it.is_empty()) {
            let (slot, end) = (row.slot as usize, row.start as usize + row.length as usize);
            if slot >= self.slots.len() || end + drafts.len() > self.context_length {
                return wrong(format!("{} drafts at position {end} of slot {slot}", drafts.len()));
            }
            let vocabulary = 0..self.vocabulary as i32;
            if let Some(token) = drafts.iter().find(|token| !vocabulary.contains(token)) {
                return wrong(format!("the draft {token}, of a vocabulary of {}", self.vocabulary));
            }
            let first = slot * self.token_stride + end;
            self.tokens[first..first + drafts.len()].copy_from_slice(drafts);
        }
        Ok(())
    }

    /// Stores a token that was sampled for a position of a slot.
    pub(crate) fn keep(&mut self, slot: usize, position: usize, token: i32) {
        self.tokens[slot * self.token_stride + position] = token;
        let slot = &mut self.slots[slot];
        if slot.spec.sampling.has_penalty() {
            slot.count(token);
        }
    }

    pub(crate) fn token(&self, slot: usize, position: usize) -> i32 {
        self.tokens[slot * self.token_stride + position]
    }

    /// Clears the page tables of all slots.
    pub(crate) fn forget_pages(&mut self) {
        self.pages.fill(-1);
        self.window.fill(self.null_page);
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{NewSlot, SamplingParams, SlotSpec};

    use super::*;

    fn plan(write: impl FnOnce(&mut StepPlan)) -> StepPlan {
        let mut plan = StepPlan::default();
        plan.begin(1);
        write(&mut plan);
        plan
    }

    #[test]
    fn penalties_count_the_prompt_and_what_was_generated() {
        let sampling = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
        let spec = SlotSpec { sampling, ..SlotSpec::default() };
        let mut tables = Tables::new(2, 8, 4, 10);
        let new = NewSlot { slot: 1, tokens: &[3, 3, 5], prompt_len: 2, spec: &spec, place: None };
        tables.write(&plan(|plan| plan.write_slot(&new)), &Shared::none()).expect("a good plan");
        tables.keep(1, 3, 3);
        let counts = &tables.slots[1].counts;
        assert_eq!(counts[&3], Count { seen: 3, generated: 1 });
        assert_eq!(counts[&5], Count { seen: 1, generated: 1 });
        assert_eq!(&tables.tokens[9..13], [3, 3, 5, 3]);
        assert!(tables.slots[0].is_plain() && !tables.slots[1].is_plain());
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let spec = SlotSpec::default();
        let mut tables = Tables::new(2, 8, 4, 10);
        let long = [1; 10];
        for (slot, tokens) in [(2, &long[..3]), (0, &long[..])] {
            let new = NewSlot { slot, tokens, prompt_len: 1, spec: &spec, place: None };
            let plan = plan(|plan| plan.write_slot(&new));
            assert!(tables.write(&plan, &Shared::none()).is_err());
        }
        for (slot, index) in [(2, 0), (0, 2)] {
            let plan = plan(|plan| plan.write_page(slot, index, 1));
            assert!(tables.write(&plan, &Shared::none()).is_err());
        }
        let window = plan(|plan| plan.write_window(0, 1, 1));
        assert!(tables.write(&window, &Shared::none()).is_err(), "the slot has no window part");
        let mut tables = tables.with_window(5);
        tables.write(&window, &Shared::none()).expect("there is one");
        for (slot, index) in [(2, 0), (0, 2)] {
            let plan = plan(|plan| plan.write_window(slot, index, 1));
            assert!(tables.write(&plan, &Shared::none()).is_err());
        }
    }

    #[test]
    fn what_the_window_has_passed_is_the_null_page() {
        let (mut tables, spec) = (Tables::new(2, 8, 4, 10).with_window(5), SlotSpec::default());
        assert_eq!(tables.window, [5; 4]);
        let both = plan(|plan| (0..2).for_each(|index| plan.write_window(1, index, index + 3)));
        tables.write(&both, &Shared::none()).expect("a good plan");
        assert_eq!(tables.window, [5, 5, 3, 4]);
        tables.write(&plan(|plan| plan.drop_window(1, 0)), &Shared::none()).expect("a good plan");
        assert_eq!(tables.window, [5, 5, 5, 4]);
        let new = NewSlot { slot: 1, tokens: &[3], prompt_len: 1, spec: &spec, place: None };
        tables.write(&plan(|plan| plan.write_slot(&new)), &Shared::none()).expect("a good plan");
        assert_eq!(tables.window, [5; 4]);
    }
}
