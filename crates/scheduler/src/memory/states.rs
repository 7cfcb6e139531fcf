//! Recurrent states that are kept for later requests, in tiers like those of keys and values.
//!
//! A recurrent layer has one state for all earlier positions together, not one per position. So a
//! request can continue from cached blocks only where a state was kept. A kept state has the name
//! of the last block before it (ADR 89). States are kept
//!
//! - at the end of a prompt's last full page before its last token, for the conversation's next
//!   turn;
//! - where a request diverges from a cached prefix, for the next request that diverges there;
//! - every [`StateCache::interval`] positions;
//! - at the last full page of each running request, to continue its answer or resume it after
//!   preemption. Each new state replaces the previous one.
//!
//! Rows end at these positions. Only later plans can use a state that a plan saves.
//!
//! With a host tier, states are saved there as blocks are. The state of a running request's last
//! page is saved to the host only when the request loses its slot, since it is replaced until then.
//! A request waits for its state as it waits for its blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_kvcache::{BlockHash, Found, Lease, Loan, LoanId, Tiers};
use forebay_protocol::{PageCopy, StepPlan};

use super::Memory;
use super::pages::Pages;
use super::resident::ResidentState;
use crate::config::{HostTier, SavePolicy, StateCache};
use crate::entry::{Entry, Residence};
use crate::event::StateStats;
use crate::retirement::{Retirement, check_leases};

/// Saves to the host may lease at most one in `SAVING_SHARE` state pages at a time.
const SAVING_SHARE: u32 = 8;
/// The policy *write back* keeps at least one in `READY_SHARE` state pages free or saved.
const READY_SHARE: u32 = 4;

/// The state pages, and the states in them.
#[derive(Debug)]
pub(super) struct StatePages {
    pub(super) tiers: Tiers,
    /// Positions from one kept state to the next, in whole pages.
    interval: u32,
    /// The cost of copying a state, in blocks.
    weight: u32,
    policy: SavePolicy,
    pub(super) retired: Retirement<Lease>,
    /// The loan of states for each loan of blocks.
    loans: BTreeMap<LoanId, LoanId>,
    counters: StateStats,
}

impl StatePages {
    /// Creates the state pages that `config` describes. Without `host` no state is copied.
    pub(super) fn new(config: StateCache, host: Option<HostTier>, page_size: u32) -> Self {
        let pages = config.interval.div_ceil(page_size);
        let interval = pages.checked_mul(page_size).filter(|&interval| interval > 0);
        Self {
            tiers: Tiers::of_states(config.pages, host.map_or(0, |_| config.host_pages)),
            interval: interval.unwrap_or(u32::MAX),
            weight: config.weight.max(1),
            policy: host.map_or_else(SavePolicy::default, |host| host.policy),
            retired: Retirement::default(),
            loans: BTreeMap::new(),
            counters: StateStats::default(),
        }
    }

    /// Starts again without any state, with these page counts. No page may be leased.
    pub(super) fn begin_again(&mut self, pages: u32, host_pages: u32) {
        let mut tiers = Tiers::of_states(pages, host_pages);
        tiers.go_on_from(&self.tiers);
        self.tiers = tiers;
    }

    /// Forgets every state in all tiers. No page may be leased.
    pub(super) fn forget_all(&mut self) {
        let host = self.tiers.host_counts();
        self.begin_again(self.tiers.hot().size(), host.free + host.cached + host.held);
    }

    /// True if there are state pages on the device.
    pub(super) fn keeps_any(&self) -> bool {
        self.tiers.hot().size() > 0
    }

    /// Counts the blocks of `names` up to the last one after which a usable state is kept: in the
    /// tiers, or lent to the request. Without `brings`, only states on the device count.
    fn longest(&self, names: &[BlockHash], brings: bool, loan: Option<&Loan>) -> usize {
        let brings = brings && self.has_room();
        let has = |&name: &BlockHash| match self.tiers.knows(name) {
            true => brings || !self.tiers.only_on_host(name),
            false => brings && loan.is_some_and(|loan| loan.state(name).is_some()),
        };
        names.iter().rposition(has).map_or(0, |last| last + 1)
    }

    /// True if there is room on the device for a restored state.
    pub(super) fn has_room(&self) -> bool {
        self.tiers.hot().available() > 0
    }

    /// The cost in blocks of restoring this state; 0: it is on the device, or on its way.
    pub(super) fn cost(&self, name: BlockHash) -> u32 {
        let is_away = self.tiers.only_on_host(name) || !self.tiers.knows(name);
        if is_away { self.weight } else { 0 }
    }

    /// The number of restored states, each counted as `weight` blocks.
    pub(super) fn restored_weight(&self) -> u64 {
        self.tiers.moves().restored * u64::from(self.weight)
    }

    /// Leases the state after a block. The second value is the ticket of the copy that restores the
    /// state, if one has to. No lease: the state does not exist, or every page is leased.
    fn lease(&mut self, name: BlockHash, loan: Option<&Arc<Loan>>) -> (Option<Lease>, Option<u32>) {
        let found = self.tiers.find(name);
        self.tiers.touch(&[name]);
        match found {
            Some(Found::Hot(lease)) => {
                if self.policy == SavePolicy::WriteThroughSelective {
                    self.tiers.want_saved(name);
                }
                (Some(lease), None)
            }
            Some(Found::Arriving(lease, ticket)) => (Some(lease), Some(ticket)),
            Some(Found::Host(lease)) => self.tiers.restore(name, lease).unzip(),
            None => loan.and_then(|loan| self.tiers.borrow(name, loan)).unzip(),
        }
    }

    /// Restores a state before its request's turn, if a page is available without losing content.
    pub(super) fn prefetch(&mut self, name: BlockHash) {
        if self.tiers.only_on_host(name)
            && self.tiers.hot().spare() > 0
            && let Some(Found::Host(lease)) = self.tiers.find(name)
            && let Some((waiter, _)) = self.tiers.restore(name, lease)
        {
            self.tiers.release(waiter);
        }
    }

    /// Saves a kept state, if the policy saves computed content at once.
    fn save_now(&mut self, name: BlockHash) {
        if self.policy == SavePolicy::WriteThrough {
            self.tiers.want_saved(name);
        }
    }

    /// The next save for a plan.
    pub(super) fn next_save(&mut self) -> Option<PageCopy> {
        let pages = self.tiers.hot().size();
        let most = (pages / SAVING_SHARE).max(1);
        match self.policy {
            SavePolicy::WriteThrough | SavePolicy::WriteThroughSelective => {
                self.tiers.next_save(most)
            }
            SavePolicy::WriteBack => self.tiers.sweep((pages / READY_SHARE).max(1), most),
        }
    }

    /// Lends the last state within these leading blocks, together with their loan `of_blocks`.
    /// `None`: no state can be lent.
    pub(super) fn lend(
        &mut self,
        of_blocks: LoanId,
        names: &[BlockHash],
    ) -> Option<Vec<(BlockHash, u32)>> {
        let last = names.iter().rfind(|&&name| self.tiers.is_on_host(name))?;
        let (loan, pages) = self.tiers.lend(&[*last])?;
        self.loans.insert(of_blocks, loan);
        Some(pages)
    }

    /// Ends the loan of states that belongs to a loan of blocks.
    pub(super) fn take_back(&mut self, of_blocks: LoanId) {
        if let Some(loan) = self.loans.remove(&of_blocks) {
            self.tiers.take_back(loan);
        }
    }

    /// Ends all loans.
    pub(super) fn end_loans(&mut self) {
        self.loans.clear();
        self.tiers.end_loans();
    }

    pub(super) fn forget(&mut self, name: BlockHash) {
        self.tiers.forget(name);
    }

    /// Forgets every state without a lease. Returns true if no state is left.
    pub(super) fn flush(&mut self) -> bool {
        self.tiers.flush()
    }

    fn retire(&mut self, last_step: u64, lease: Lease) {
        if let Some(lease) = self.retired.retire(last_step, lease) {
            self.tiers.release(lease);
        }
    }

    pub(super) fn free_retired(&mut self) {
        for lease in self.retired.take_returned() {
            self.tiers.release(lease);
        }
    }

    pub(super) fn stats(&self) -> StateStats {
        let (pages, host) = (self.tiers.hot().counts(), self.tiers.host_counts());
        let moves = self.tiers.moves();
        StateStats {
            pages: self.tiers.hot().size() as usize,
            pages_held: pages.held as usize,
            pages_cached: pages.cached as usize,
            host_pages: (host.free + host.cached + host.held) as usize,
            host_pages_used: (host.cached + host.held) as usize,
            copied: moves.saved,
            restored: moves.restored,
            ..self.counters
        }
    }

    /// Checks that the leased state pages are exactly those of these residents, the retired pages
    /// and the pages of copies.
    pub(super) fn check<'a>(
        &self,
        residents: impl Iterator<Item = &'a Residence>,
    ) -> Result<(), String> {
        self.tiers.check_integrity().map_err(|wrong| format!("states: {wrong}"))?;
        let hot = self.tiers.hot();
        let states = residents.filter_map(|residence| residence.pages.state.as_ref());
        let leases = states.flat_map(ResidentState::leases).chain(self.retired.iter());
        let leases = leases.map(Lease::page).chain(self.tiers.leased_by_copies());
        check_leases("state page", leases, hot.size(), |page| hot.leases(page))
    }
}

impl Entry {
    fn state_mut(&mut self) -> Option<&mut ResidentState> {
        self.residence.as_mut()?.pages.state.as_mut()
    }
}

impl Memory {
    /// The number of these cached leading blocks after which a request can continue. Without
    /// `brings`, the state, if one is needed, has to be on the device.
    pub(super) fn resumable(
        &self,
        names: &[BlockHash],
        brings: bool,
        loan: Option<&Loan>,
    ) -> usize {
        if let Some(windows) = &self.windows {
            return windows.longest(names);
        }
        let longest = |states: &StatePages| states.longest(names, brings, loan);
        self.states.as_ref().map_or(names.len(), longest)
    }

    /// Leases the state after the first `found` blocks of a request. If a copy restores it, returns
    /// its ticket too. `cached` counts the blocks that are cached with or without a state. `None`:
    /// the request shares nothing.
    pub(super) fn lease_state(
        &mut self,
        entry: &Entry,
        found: usize,
        cached: usize,
    ) -> Option<(ResidentState, Option<u32>)> {
        if !self.caches(entry) {
            return None;
        }
        let (states, page_size) = (self.states.as_mut()?, self.page_size);
        let last_page = |tokens: u32| tokens.saturating_sub(1) / page_size * page_size;
        let last = found.checked_sub(1).map(|last| entry.blocks.names[last]);
        // For lack of a state, blocks from `found` on are computed again although they are cached.
        // Keep a state after the last of them.
        let branch = if cached > found { cached as u32 * page_size } else { 0 };
        let lease = |name| states.lease(name, entry.request.loan.as_ref());
        let (load, ticket) = last.map_or((None, None), lease);
        debug_assert!(load.is_some() || found == 0, "it was there, and nothing came in between");
        let state = ResidentState {
            load,
            kept: [branch, last_page(entry.prompt_len)],
            tail: last_page(entry.known()),
            ..ResidentState::default()
        };
        Some((state, ticket))
    }

    /// Counts the prompt tokens that a kept state covered, and those that were computed again
    /// because a state or pages of the window part were missing.
    pub(crate) fn count_state_use(&mut self, queried: u32, hit: u32, missed: u32) {
        self.windows.iter_mut().for_each(|windows| windows.count_use(missed));
        if let Some(states) = &mut self.states {
            states.counters.query_tokens += u64::from(queried);
            states.counters.hit_tokens += u64::from(hit);
            states.counters.missed_tokens += u64::from(missed);
        }
    }

    /// Makes the plan of step `step`, which writes a resident's slot, load its state.
    pub(crate) fn load_state(&mut self, entry: &mut Entry, step: u64, plan: &mut StepPlan) {
        let Some(Residence { slot, pages, .. }) = &mut entry.residence else { return };
        let load = pages.state.as_mut().and_then(|state| state.load.take());
        if let (Some(lease), Some(states)) = (load, &mut self.states) {
            plan.load_state(*slot, lease.page());
            states.counters.loads += 1;
            states.retire(step, lease);
        }
    }

    /// The length of a resident's next row, at most `length`. The row ends at the next position
    /// where the request's state is kept. Prompt rows that do not reach one end at a page boundary
    /// if possible.
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

    /// Makes a plan save the state after a resident's newest row, if the row ends at a page
    /// boundary and a state page is free.
    pub(crate) fn save_state(&mut self, entry: &mut Entry, plan: &mut StepPlan) {
        let (end, page_size) = (entry.computed, self.page_size);
        let Some(states) = &mut self.states else { return };
        if entry.state_mut().is_none() || !end.is_multiple_of(page_size) {
            return;
        }
        if end <= entry.known() {
            let blocks = (end / page_size) as usize;
            let names = entry.name_blocks(blocks, page_size as usize, &self.namer);
            if let Some(&name) = names.last().filter(|&&name| states.tiers.hot().contains(name)) {
                return states.tiers.touch(&[name]);
            }
        }
        let evicts = states.tiers.hot().next_evicted().is_some();
        let Some(lease) = states.tiers.allocate() else {
            states.counters.saves_refused += 1;
            return;
        };
        states.counters.evictions += u64::from(evicts);
        states.counters.saves += 1;
        if let Some(Residence { slot, pages: Pages { state: Some(state), .. }, .. }) =
            &mut entry.residence
        {
            plan.save_state(*slot, lease.page());
            state.saved.push_back((end, lease));
        }
    }

    /// Offers a resident's saved states to the cache, as far as the tokens before them are known.
    /// The blocks before these states must have names.
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
            let named = states.tiers.name(&lease, name);
            states.retire(last_step, lease);
            if let Some(replaced) = state.replaced.take() {
                states.forget(replaced);
            }
            let stays = state.kept.contains(&end) || end.is_multiple_of(states.interval);
            if named && stays {
                states.save_now(name);
            }
            state.replaced = (named && !stays).then_some(name);
        }
    }

    /// Retires the states of a request that loses its slot. Its last state stays in the cache.
    pub(super) fn retire_states(&mut self, last_step: u64, state: Option<ResidentState>) {
        if let (Some(ResidentState { load, saved, replaced, .. }), Some(states)) =
            (state, &mut self.states)
        {
            replaced.into_iter().for_each(|last| states.save_now(last));
            let saved = saved.into_iter().map(|(_, lease)| lease);
            load.into_iter().chain(saved).for_each(|lease| states.retire(last_step, lease));
        }
    }
}
