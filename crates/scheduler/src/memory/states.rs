//! Recurrent states that are kept for later requests, in a pool beside that of keys and values.
//!
//! A recurrent layer has one state for all positions before the next one, and none for each. So a
//! request can go on from cached blocks only where a state was kept. A kept state has the name of
//! the last block before it (ADR 89). States are kept
//!
//! - where a prompt's last whole page ends that is not all of it, for the next turn;
//! - where a request leaves a prefix that others have cached, for the next one that does;
//! - every [`StateCache::interval`] positions;
//! - at the last whole page of each running request, so that an answer and a preempted request can
//!   be gone on with. Each new one replaces the one before.
//!
//! Rows end at these positions. A state is found only in plans after the one that saves it.

use forebay_kvcache::{BlockHash, Lease, PagePool, Recurrent};
use forebay_protocol::StepPlan;

use super::Memory;
use super::pages::Pages;
use super::resident::ResidentState;
use crate::config::StateCache;
use crate::entry::{Entry, Residence};
use crate::event::StateStats;
use crate::retirement::{Retirement, check_leases};

/// The state pages, and the states in them.
#[derive(Debug)]
pub(super) struct StatePages {
    pool: PagePool<Recurrent>,
    /// Positions from one kept state to the next, in whole pages.
    interval: u32,
    pub(super) retired: Retirement<Lease<Recurrent>>,
    counters: StateStats,
}

impl StatePages {
    pub(super) fn new(config: StateCache, page_size: u32) -> Self {
        let pages = config.interval.div_ceil(page_size);
        let interval = pages.checked_mul(page_size).filter(|&interval| interval > 0);
        Self {
            pool: PagePool::new(config.pages),
            interval: interval.unwrap_or(u32::MAX),
            retired: Retirement::default(),
            counters: StateStats::default(),
        }
    }

    /// Goes on with another number of pages. No page has a lease.
    pub(super) fn resize(&mut self, pages: u32) {
        self.pool = PagePool::new(pages);
    }

    /// True if there is a page at all.
    pub(super) fn keeps_any(&self) -> bool {
        self.pool.size() > 0
    }

    /// The largest number of these leading blocks behind which a state is kept.
    fn longest(&self, names: &[BlockHash]) -> usize {
        names.iter().rposition(|&name| self.pool.contains(name)).map_or(0, |last| last + 1)
    }

    pub(super) fn forget(&mut self, name: BlockHash) {
        self.pool.forget(name);
    }

    /// Forgets every state without a lease. True: nothing is left.
    pub(super) fn flush(&mut self) -> bool {
        self.pool.flush();
        self.pool.blocks() == 0
    }

    fn retire(&mut self, last_step: u64, lease: Lease<Recurrent>) {
        if let Some(lease) = self.retired.retire(last_step, lease) {
            self.pool.release(lease);
        }
    }

    pub(super) fn free_retired(&mut self) {
        for lease in self.retired.take_returned() {
            self.pool.release(lease);
        }
    }

    pub(super) fn stats(&self) -> StateStats {
        let pages = self.pool.counts();
        StateStats {
            pages: self.pool.size() as usize,
            pages_held: pages.held as usize,
            pages_cached: pages.cached as usize,
            ..self.counters
        }
    }

    /// Checks that the leases of these residents and of retired pages are all there are.
    pub(super) fn check<'a>(
        &self,
        residents: impl Iterator<Item = &'a Residence>,
    ) -> Result<(), String> {
        self.pool.check_integrity()?;
        let states = residents.filter_map(|residence| residence.pages.state.as_ref());
        let leases = states.flat_map(ResidentState::leases).chain(self.retired.iter());
        let leases = leases.map(Lease::page);
        check_leases("state page", leases, self.pool.size(), |page| self.pool.leases(page))
    }
}

impl Entry {
    fn state_mut(&mut self) -> Option<&mut ResidentState> {
        self.residence.as_mut()?.pages.state.as_mut()
    }
}

impl Memory {
    /// The largest number of these leading blocks, which are cached, that a request can go on
    /// behind.
    pub(super) fn resumable(&self, names: &[BlockHash]) -> usize {
        if let Some(windows) = &self.windows {
            return windows.longest(names);
        }
        self.states.as_ref().map_or(names.len(), |states| states.longest(names))
    }

    /// Leases the state behind the first `found` blocks of a request, of which `cached` are cached.
    /// `None`: the request shares nothing.
    pub(super) fn lease_state(
        &mut self,
        entry: &Entry,
        found: usize,
        cached: usize,
    ) -> Option<ResidentState> {
        if !self.caches(entry) {
            return None;
        }
        let (states, page_size) = (self.states.as_mut()?, self.page_size);
        let last_page = |tokens: u32| tokens.saturating_sub(1) / page_size * page_size;
        let last = found.checked_sub(1).map(|last| entry.blocks.names[last]);
        // All of a prompt that is computed again may be cached, but for its state.
        let branch = if cached > found { cached as u32 * page_size } else { 0 };
        Some(ResidentState {
            load: last.and_then(|name| states.pool.share(name)),
            kept: [branch, last_page(entry.prompt_len)],
            tail: last_page(entry.known()),
            ..ResidentState::default()
        })
    }

    /// Counts the tokens of a prompt that came from a kept state, and those for which there was
    /// none, or no pages of the window part.
    pub(crate) fn count_state_use(&mut self, queried: u32, hit: u32, missed: u32) {
        self.windows.iter_mut().for_each(|windows| windows.count_use(missed));
        if let Some(states) = &mut self.states {
            states.counters.query_tokens += u64::from(queried);
            states.counters.hit_tokens += u64::from(hit);
            states.counters.missed_tokens += u64::from(missed);
        }
    }

    /// Has the plan of step `step`, which writes a resident's slot, load its state.
    pub(crate) fn load_state(&mut self, entry: &mut Entry, step: u64, plan: &mut StepPlan) {
        let Some(Residence { slot, pages, .. }) = &mut entry.residence else { return };
        let load = pages.state.as_mut().and_then(|state| state.load.take());
        if let (Some(lease), Some(states)) = (load, &mut self.states) {
            plan.load_state(*slot, lease.page());
            states.counters.loads += 1;
            states.retire(step, lease);
        }
    }

    /// The length of a resident's next row, at most `length`, so that it ends where its state is
    /// kept. Other rows of a prompt end with a page, if they reach the end of one.
    pub(crate) fn length_to_state(&self, entry: &Entry, length: u32) -> u32 {
        let state = entry.residence.as_ref().and_then(|residence| residence.pages.state.as_ref());
        let (Some(states), Some(state)) = (&self.states, state) else { return length };
        let (start, end) = (entry.computed, entry.computed + length);
        if let Some(stop) = state.next_stop(start, states.interval).filter(|&stop| stop <= end) {
            return stop - start;
        }
        let whole = end / self.page_size * self.page_size;
        if end < entry.goal() && whole > start { whole - start } else { length }
    }

    /// Has a plan save the state behind a resident's newest row, if the row ends with a page and a
    /// state page can be had.
    pub(crate) fn save_state(&mut self, entry: &mut Entry, plan: &mut StepPlan) {
        let (end, page_size) = (entry.computed, self.page_size);
        let Some(states) = &mut self.states else { return };
        if entry.state_mut().is_none() || !end.is_multiple_of(page_size) {
            return;
        }
        if end <= entry.known() {
            let blocks = (end / page_size) as usize;
            let names = entry.name_blocks(blocks, page_size as usize, &self.namer);
            if let Some(&name) = names.last().filter(|&&name| states.pool.contains(name)) {
                return states.pool.touch(name);
            }
        }
        let Some((lease, evicted)) = states.pool.allocate() else {
            states.counters.saves_refused += 1;
            return;
        };
        states.counters.evictions += u64::from(evicted.is_some());
        states.counters.saves += 1;
        if let Some(Residence { slot, pages: Pages { state: Some(state), .. }, .. }) =
            &mut entry.residence
        {
            plan.save_state(*slot, lease.page());
            state.saved.push_back((end, lease));
        }
    }

    /// Offers the saved states of a resident whose tokens are known. Its blocks have names up to
    /// there.
    pub(super) fn offer_states(&mut self, entry: &mut Entry) {
        let (certain, page_size) = (entry.certain(), self.page_size);
        let Some(states) = &mut self.states else { return };
        let Entry { residence: Some(residence), blocks, .. } = entry else { return };
        let last_step = residence.last_step;
        let Some(state) = &mut residence.pages.state else { return };
        while state.saved.front().is_some_and(|(end, _)| *end <= certain)
            && let Some((end, lease)) = state.saved.pop_front()
        {
            let name = blocks.names[(end / page_size) as usize - 1];
            let named = states.pool.name(&lease, name);
            states.retire(last_step, lease);
            if let Some(replaced) = state.replaced.take() {
                states.pool.forget(replaced);
            }
            let stays = state.kept.contains(&end) || end.is_multiple_of(states.interval);
            state.replaced = (named && !stays).then_some(name);
        }
    }

    /// Retires the states of a request that loses its slot.
    pub(super) fn retire_states(&mut self, last_step: u64, state: Option<ResidentState>) {
        if let (Some(ResidentState { load, saved, .. }), Some(states)) = (state, &mut self.states) {
            let saved = saved.into_iter().map(|(_, lease)| lease);
            load.into_iter().chain(saved).for_each(|lease| states.retire(last_step, lease));
        }
    }
}
