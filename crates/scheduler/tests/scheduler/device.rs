//! A fake worker without a model. The "keys and values" of a position are a hash of all tokens up
//! to it. So the tests detect a row that reads a wrong, stale or not yet computed page. The sampled
//! token depends on everything that the row should read.

use forebay_protocol::{
    PageCopy, PromptLogprobs, ROW_NOT_FINITE, ROW_OK, Row, StateCopy, StepPlan, StepResult, Want,
};
use forebay_scheduler::{ImageId, PromptImage, SchedulerConfig};

use crate::adapters::Adapters;
use crate::copier::Copier;
use crate::harness::states::StateCopies;
use crate::seeing::{Arena, Eyes, SlotImages, read_images};

/// Upper bound of token ids. It is small, so that prompts overlap and stop ids occur.
pub(crate) const VOCAB: i32 = 11;
/// A prompt token after which the logits are not finite.
pub(crate) const NAN_TOKEN: i32 = 1000;
/// A prompt token that kills the worker.
pub(crate) const KILL_TOKEN: i32 = 1001;

pub(crate) const GARBAGE: u64 = 0xdead_beef;
/// The state before the first position.
const ZERO: u64 = 1;
const NO_PAGE: u32 = u32::MAX;
const INDEX: u32 = 1 << 20;
const WINDOW: u32 = 1 << 21;

fn mix(state: u64, token: i32) -> u64 {
    let mut z =
        state.rotate_left(5) ^ u64::from(token.cast_unsigned()).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The contents of the positions of `tokens` under an adapter.
fn contents(adapter: Option<u32>, tokens: &[i32]) -> impl Iterator<Item = u64> + '_ {
    let first = adapter.map_or(ZERO, |id| ZERO + 1 + u64::from(id));
    tokens.iter().scan(first, |state, &token| {
        *state = mix(*state, token);
        Some(*state)
    })
}

/// The tokens that the worker reads in place of a prompt with images or embeddings. Each embedding
/// is replaced by a token that depends on its offset.
pub(crate) fn read_prompt(tokens: &[i32], embeds: Option<u32>, images: &[PromptImage]) -> Vec<i32> {
    let Some(offset) = embeds else {
        let mut tokens = tokens.to_vec();
        read_images(&mut tokens, images);
        return tokens;
    };
    let embedded = |(at, &token): (usize, &i32)| match token {
        NAN_TOKEN | KILL_TOKEN => token,
        _ => VOCAB + (offset.cast_signed() + at as i32) % 64,
    };
    tokens.iter().enumerate().map(embedded).collect()
}

/// The token after `tokens`; `None` if the logits are not finite.
pub(crate) fn next_token(adapter: Option<u32>, tokens: &[i32]) -> Option<i32> {
    let content = contents(adapter, tokens).last().expect("at least one token");
    (!tokens.contains(&NAN_TOKEN)).then_some((content % VOCAB as u64) as i32)
}

/// The pooled vector of `tokens`; `None` if it is not finite.
pub(crate) fn vector(adapter: Option<u32>, tokens: &[i32], segment: u32) -> Option<[f32; 2]> {
    let content = contents(adapter, tokens).last().expect("at least one token");
    (!tokens.contains(&NAN_TOKEN)).then_some([(content % 4096) as f32, segment as f32])
}

/// The prompt log-probabilities of the last of `tokens`, with the `most` likeliest tokens at its
/// position; `None` if the logits are not finite.
pub(crate) fn of_prompt(adapter: Option<u32>, tokens: &[i32], most: u32) -> Option<PromptLogprobs> {
    let (&token, before) = tokens.split_last().expect("at least one token");
    let content = contents(adapter, tokens).last().expect("at least one token");
    let likeliest = next_token(adapter, before)?;
    let ids = [token].into_iter().chain((0..most as i32).map(|at| likeliest + at)).collect();
    let values = (0..=most).map(|at| -((content % 512) as f32) - at as f32).collect();
    Some(PromptLogprobs { ranks: vec![1 + (content % 7) as i32], ids, values })
}

/// Appends the log-probabilities of more tokens.
pub(crate) fn append(all: &mut PromptLogprobs, more: PromptLogprobs) {
    all.ranks.extend(more.ranks);
    all.ids.extend(more.ids);
    all.values.extend(more.values);
}

/// The memory of the worker. Without pages it keeps nothing, and accepts only whole prompts.
pub(crate) struct Device {
    pub(crate) page_size: usize,
    slots: Vec<DeviceSlot>,
    pub(crate) pages: Vec<Vec<u64>>,
    /// Index keys, one page for each host page; empty if requests are never sparse.
    pub(crate) index: Vec<Vec<u64>>,
    eyes: Option<Eyes>,
    /// Pages of sliding-window layers; empty if these layers share the other pages.
    window_pages: Vec<Vec<u64>>,
    /// The number of positions that a query of those layers reads.
    window: usize,
    /// State pages; `None` if the model has no recurrent layers.
    pub(crate) states: Option<Vec<u64>>,
    pub(crate) adapters: Adapters,
}

#[derive(Clone)]
struct DeviceSlot {
    tokens: Vec<i32>,
    segment: u32,
    pages: Vec<u32>,
    host: Vec<u32>,
    /// Pages for single positions; empty if the slot is not sparse.
    rows: Vec<u32>,
    /// Pages of sliding-window layers.
    window: Vec<u32>,
    images: SlotImages,
    /// The recurrent state: a hash of all tokens that the slot's rows have computed. `None`:
    /// nothing was computed or loaded since the slot was written.
    state: Option<u64>,
    /// The state before the last position of the last row. That position is computed again if the
    /// row sat out.
    before: u64,
    place: Option<u32>,
}

/// The error that the worker died while it executed a step.
#[derive(Debug)]
pub(crate) struct Death;

impl Device {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        let (pages, page_size) = (config.pages as usize, config.page_size as usize);
        let host = config.sparse.and(config.host).map_or(0, |host| host.pages as usize);
        let slot = DeviceSlot {
            tokens: vec![],
            segment: 0,
            pages: vec![NO_PAGE; pages.max(host)],
            host: vec![NO_PAGE; host],
            rows: vec![],
            window: vec![NO_PAGE; config.windows.map_or(0, |_| pages)],
            images: SlotImages::default(),
            state: None,
            before: GARBAGE,
            place: None,
        };
        Self {
            adapters: Adapters::new(config.places),
            eyes: config.tower.map(Eyes::new),
            states: config.states.map(|states| vec![GARBAGE; states.pages as usize]),
            window_pages: config
                .windows
                .map_or(vec![], |part| vec![vec![GARBAGE; page_size]; part.pages as usize]),
            window: config.windows.map_or(0, |part| part.window as usize),
            page_size,
            slots: vec![slot; config.slots as usize],
            pages: vec![vec![GARBAGE; page_size]; pages],
            index: vec![vec![GARBAGE; page_size]; host],
        }
    }

    /// The page to which a restore writes.
    pub(crate) fn target(&mut self, copy: &PageCopy) -> &mut Vec<u64> {
        match copy.hot {
            Some(hot) => &mut self.pages[hot as usize],
            None => &mut self.index[copy.host as usize],
        }
    }

    /// Pages that a row reads or writes. Index pages and window pages have separate number ranges.
    pub(crate) fn pages_named(&self, row: &Row) -> Vec<u32> {
        let slot = &self.slots[row.slot as usize];
        let index = slot.host.iter().filter(|&&page| page != NO_PAGE).map(|page| INDEX + page);
        let own = self.pages_read(row).into_iter().filter(|&page| page != NO_PAGE);
        let window = self.window_of(row, self.first_seen(row));
        own.chain(index).chain(slot.rows.iter().copied()).chain(window).collect()
    }

    /// The first position that a row reads in sliding-window layers.
    fn first_seen(&self, row: &Row) -> usize {
        (row.start as usize + 1).saturating_sub(self.window)
    }

    /// Pages of the window part from position `first` of a row on, in a separate number range.
    fn window_of(&self, row: &Row, first: usize) -> Vec<u32> {
        if self.window_pages.is_empty() {
            return vec![];
        }
        let more = row.want.most().saturating_sub(1);
        let end = ((row.start + row.length + more) as usize).div_ceil(self.page_size);
        let pages = &self.slots[row.slot as usize].window[first / self.page_size..end];
        pages.iter().map(|&page| WINDOW.wrapping_add(page)).collect()
    }

    /// Makes sliding-window layers read this many positions more than the scheduler assumes.
    pub(crate) fn widen_window(&mut self, more: usize) {
        self.window += more;
    }

    /// Pages that no other row of the plan may name.
    pub(crate) fn pages_of_its_own(&self, row: &Row) -> Vec<u32> {
        let slot = &self.slots[row.slot as usize];
        let mut pages = self.pages_written(row);
        if !self.index.is_empty() {
            let first = row.start as usize / self.page_size;
            let hosts = slot.host.iter().skip(first).take(pages.len());
            pages.extend(hosts.map(|page| INDEX + page).collect::<Vec<u32>>());
        }
        pages.extend(&slot.rows);
        pages.extend(self.window_of(row, row.start as usize));
        pages
    }

    /// Pages that a row reads or writes, by position; `NO_PAGE` in place of dropped pages.
    fn pages_read(&self, row: &Row) -> Vec<u32> {
        if self.pages.is_empty() {
            return vec![];
        }
        let more = if let Want::Tokens(most) = row.want { most - 1 } else { 0 };
        let end = (row.start + row.length + more) as usize;
        self.slots[row.slot as usize].pages[..end.div_ceil(self.page_size)].to_vec()
    }

    fn pages_written(&self, row: &Row) -> Vec<u32> {
        let mut pages = self.pages_read(row);
        pages.split_off(pages.len().min(row.start as usize / self.page_size))
    }

    /// The images whose layers a plan computes. Call it before the plan is executed.
    pub(crate) fn images_in(&self, plan: &StepPlan, arena: &Arena) -> Vec<ImageId> {
        self.eyes.iter().flat_map(|eyes| eyes.images(plan, arena)).collect()
    }

    /// Image pages that a row reads.
    pub(crate) fn image_pages(&self, row: &Row) -> Vec<u32> {
        self.slots[row.slot as usize].images.pages(row.start, row.start + row.length)
    }

    /// The first phase of a step: writes slots and page tables. `images` returns a slot's images.
    pub(crate) fn write_tables(
        &mut self,
        plan: &StepPlan,
        mut images: impl FnMut(u32) -> SlotImages,
    ) {
        self.adapters.start(plan);
        for new in plan.new_slots() {
            let slot = &mut self.slots[new.slot as usize];
            let (prompt, generated) = new.tokens.split_at(new.prompt_len as usize);
            slot.images = images(new.slot);
            let prompt = read_prompt(prompt, new.spec.embeds, slot.images.truth());
            slot.tokens = [prompt.as_slice(), generated].concat();
            slot.place = new.place;
            slot.segment = new.spec.pooling.map_or(0, |pooling| pooling.segment);
            // A real device never clears a page table. This one does, so that the tests detect a
            // page that the plan forgot to write.
            slot.pages.fill(NO_PAGE);
            slot.host.fill(NO_PAGE);
            slot.window.fill(NO_PAGE);
            slot.rows.clear();
            slot.state = None;
        }
        for (slot, index, page) in plan.page_writes() {
            self.slots[slot as usize].pages[index as usize] = page.unwrap_or(NO_PAGE);
        }
        for (slot, index, page) in plan.window_writes() {
            self.slots[slot as usize].window[index as usize] = page.unwrap_or(NO_PAGE);
        }
        for (slot, span, pages) in plan.image_spans() {
            self.slots[slot as usize].images.write(span, pages);
        }
        for (slot, index, page) in plan.host_writes() {
            self.slots[slot as usize].host[index as usize] = page;
        }
        for (slot, index, page) in plan.hot_rows() {
            let rows = &mut self.slots[slot as usize].rows;
            assert_eq!(rows.len(), index as usize, "hot rows come all at once, in order");
            rows.push(page);
        }
    }

    /// The second phase of a step: the rows. All rows read the content from before the step and the
    /// tower's output, before any row writes.
    pub(crate) fn compute(
        &mut self,
        plan: &StepPlan,
        states: &StateCopies,
        host: &Copier,
        arena: &Arena,
    ) -> Result<StepResult, Death> {
        if let Some(eyes) = &mut self.eyes {
            eyes.compute(plan, arena)?;
            for row in plan.rows() {
                let slot = &self.slots[row.slot as usize];
                eyes.check_reads(&slot.images, row.start, row.start + row.length);
            }
        }
        for row in plan.rows() {
            self.check_reads(&row, host);
        }
        self.load_states(plan, &states.loads);
        for row in plan.rows() {
            // These pages are the hot rows, to which a sparse request may copy any positions. So
            // clear them.
            for &page in &self.slots[row.slot as usize].rows {
                self.pages[page as usize].fill(GARBAGE);
            }
        }
        let mut result = StepResult { step: plan.step(), ..StepResult::default() };
        // Make some steps faster than restores, and some slower.
        result.timing.device_us = 1 + plan.step() as u32 % 16;
        let mut wants = plan.prompt_logprobs().peekable();
        for (row, drafts) in plan.rows().zip(plan.drafts()) {
            let (start, end) = (row.start as usize, (row.start + row.length) as usize);
            let slot = &mut self.slots[row.slot as usize];
            let adapter = self.adapters.of(slot.place);
            assert!(end <= slot.tokens.len(), "{row:?} computes tokens that do not exist");
            if slot.tokens[..end].contains(&KILL_TOKEN) {
                return Err(Death);
            }
            let mut next = next_token(adapter, &slot.tokens[..end]);
            if self.states.is_some() {
                let before = if start == 0 { ZERO } else { slot.state.expect("a state") };
                let fold = |at, tokens: &[i32]| tokens.iter().fold(at, |at, &one| mix(at, one));
                slot.before = fold(before, &slot.tokens[start..end - 1]);
                let state = fold(slot.before, &slot.tokens[end - 1..end]);
                slot.state = Some(state);
                // With recurrent layers the token depends on the state alone.
                next = next.map(|_| (state % VOCAB as u64) as i32);
            }
            let mut computed = end;
            let most = row.want.most();
            if most > 0 {
                assert_eq!(end, slot.tokens.len(), "{row:?} samples what is known");
                slot.tokens.push(next.unwrap_or(0));
                // Return some of the further tokens that the row may return, but none that needs a
                // position which the row cannot compute.
                let mut more = slot.tokens.iter().map(|&token| token as u32).sum::<u32>() % most;
                if !plan.drafts().all(|drafts| drafts.is_empty()) {
                    more = drafts.len() as u32;
                    // Keys and values of rejected drafts are written too.
                    let guess = [&slot.tokens[..end], drafts].concat();
                    for (position, content) in contents(adapter, &guess).enumerate().skip(end) {
                        let (at, offset) = (position / self.page_size, position % self.page_size);
                        self.pages[slot.pages[at] as usize][offset] = content;
                        if !self.window_pages.is_empty() {
                            self.window_pages[slot.window[at] as usize][offset] = content;
                        }
                    }
                }
                for nth in 0..more as usize {
                    if drafts.get(nth).is_some_and(|draft| slot.tokens.last() != Some(draft)) {
                        break;
                    }
                    let fine = next.is_some() && slot.tokens.last() != Some(&KILL_TOKEN);
                    let Some(next) = next_token(adapter, &slot.tokens).filter(|_| fine) else {
                        break;
                    };
                    slot.tokens.push(next);
                }
                computed = slot.tokens.len() - 1;
                result.tokens.extend_from_slice(&slot.tokens[end..]);
                result.token_counts.push((slot.tokens.len() - end) as i32);
            }
            let kept = if self.pages.is_empty() { 0 } else { computed };
            for (position, content) in
                contents(adapter, &slot.tokens[..kept]).enumerate().skip(start)
            {
                let page = slot.pages[position / self.page_size] as usize;
                self.pages[page][position % self.page_size] = content;
                if !self.index.is_empty() {
                    let page = slot.host[position / self.page_size] as usize;
                    self.index[page][position % self.page_size] = content;
                }
                if !self.window_pages.is_empty() {
                    let page = slot.window[position / self.page_size] as usize;
                    self.window_pages[page][position % self.page_size] = content;
                }
            }
            if row.want == Want::Vector {
                assert_eq!(end, slot.tokens.len(), "{row:?} pools what is known");
                result
                    .pooled
                    .extend(vector(adapter, &slot.tokens, slot.segment).unwrap_or_default());
            }
            let mut fine = next.is_some() || row.want == Want::Nothing;
            if let Some(want) = wants.next_if(|want| want.slot == row.slot) {
                for at in want.first..want.first + want.count {
                    assert!((row.start + 1..=row.start + row.length).contains(&at), "{want:?}");
                    let given = of_prompt(adapter, &slot.tokens[..=at as usize], want.most);
                    fine &= given.is_some();
                    let width = 1 + want.most as usize;
                    let none = || PromptLogprobs {
                        ranks: vec![1],
                        ids: vec![0; width],
                        values: vec![f32::NAN; width],
                    };
                    let given = given.unwrap_or_else(none);
                    result.prompt_ranks.extend(given.ranks);
                    result.prompt_ids.extend(given.ids);
                    result.prompt_values.extend(given.values);
                }
            }
            result.row_errors.push(if fine { ROW_OK } else { ROW_NOT_FINITE });
        }
        assert_eq!(wants.next(), None, "a log-probability was asked of no row");
        if let Some(pages) = &mut self.states {
            for copy in &states.saves {
                let state = self.slots[copy.slot as usize].state;
                pages[copy.page as usize] = state.expect("a state to save");
            }
        }
        if result.token_counts.iter().all(|&count| count == 1) {
            result.token_counts.clear();
        }
        Ok(result)
    }

    /// Withdraws the `count` tokens that a slot's last row returned.
    pub(crate) fn take_back(&mut self, slot: u32, count: usize) {
        let slot = &mut self.slots[slot as usize];
        slot.tokens.truncate(slot.tokens.len() - count);
        slot.state = slot.state.map(|_| slot.before);
    }

    fn load_states(&mut self, plan: &StepPlan, loads: &[StateCopy]) {
        let Some(pages) = &self.states else {
            return assert_eq!(loads.len(), 0, "the model has no states");
        };
        for copy in loads {
            self.slots[copy.slot as usize].state = Some(pages[copy.page as usize]);
        }
        for row in plan.rows().filter(|row| row.start > 0) {
            let slot = &self.slots[row.slot as usize];
            let Some(state) = slot.state else { panic!("{row:?} begins without a state") };
            let expected = contents(None, &slot.tokens[..row.start as usize]).last();
            assert_eq!(Some(state), expected, "{row:?} begins with the state of other positions");
        }
    }

    fn check_reads(&self, row: &Row, host: &Copier) {
        let slot = &self.slots[row.slot as usize];
        if self.pages.is_empty() {
            assert_eq!(
                (row.start, row.length as usize),
                (0, slot.tokens.len()),
                "{row:?} is not a whole prompt"
            );
            return;
        }
        let read = contents(self.adapters.of(slot.place), &slot.tokens)
            .take(row.start as usize)
            .enumerate();
        for (position, expected) in read {
            let (at, offset) = (position / self.page_size, position % self.page_size);
            let page = slot.pages[at];
            let found = if page != NO_PAGE {
                self.pages[page as usize][offset]
            } else {
                assert!(!slot.rows.is_empty(), "{row:?} has no page for position {position}");
                assert_eq!(row.length, 1, "a row with hot rows has one position");
                host.pages[slot.host[at] as usize][offset]
            };
            assert_eq!(found, expected, "{row:?} reads a wrong position {position} in page {page}");
            if !self.window_pages.is_empty() && position >= self.first_seen(row) {
                let page = slot.window[at];
                assert_ne!(page, NO_PAGE, "{row:?} reads position {position} of a dropped page");
                let found = self.window_pages[page as usize][offset];
                assert_eq!(
                    found, expected,
                    "{row:?} reads a wrong position {position} in its window"
                );
            }
            if !self.index.is_empty() {
                let found = self.index[slot.host[at] as usize][offset];
                assert_eq!(found, expected, "{row:?} reads a wrong key of position {position}");
            }
        }
        assert!(!self.pages_written(row).contains(&NO_PAGE), "{row:?} writes to no page");
        let window = self.window_of(row, row.start as usize);
        assert!(
            !window.contains(&(WINDOW.wrapping_add(NO_PAGE))),
            "{row:?} writes to no page of the window"
        );
    }
}
