//! Recurrent states that are kept for later requests, in tiers like those of keys and values.
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
//!
//! With a host tier, states are saved there as blocks are. The state of the last kind is saved when
//! its request loses its slot: before that, the next one replaces it. A request waits for its state
//! as it waits for its blocks.

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

/// A part of all state pages that saves to the host may lease at a time.
const SAVING_SHARE: u32 = 8;
/// The policy *write back* keeps this part of all state pages ready to be given up.
const READY_SHARE: u32 = 4;

/// The state pages, and the states in them.
#[derive(Debug)]
pub(super) struct StatePages {
    pub(super) tiers: Tiers,
    /// Positions from one kept state to the next, in whole pages.
    interval: u32,
    /// The number of blocks whose copies take as long as that of a state.
    weight: u32,
    policy: SavePolicy,
    pub(super) retired: Retirement<Lease>,
    /// The loan of states that goes with a loan of blocks.
    loans: BTreeMap<LoanId, LoanId>,
    counters: StateStats,
}

impl StatePages {
    /// State pages as `config` has them. Without `host` no state is copied.
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

    /// Goes on with other numbers of pages, or as many, without any state. No page has a lease.
    pub(super) fn begin_again(&mut self, pages: u32, host_pages: u32) {
        let mut tiers = Tiers::of_states(pages, host_pages);
        tiers.go_on_from(&self.tiers);
        self.tiers = tiers;
    }

    /// Forgets every state in all tiers. No page has a lease.
    pub(super) fn forget_all(&mut self) {
        let host = self.tiers.host_counts();
        self.begin_again(self.tiers.hot().size(), host.free + host.cached + host.held);
    }

    /// True if there is a page at all.
    pub(super) fn keeps_any(&self) -> bool {
        self.tiers.hot().size() > 0
    }

    /// The largest number of these leading blocks after which a state is kept that a request can
    /// have: in the tiers, or lent to it. Without `brings`, only those on the device.
    fn longest(&self, names: &[BlockHash], brings: bool, loan: Option<&Loan>) -> usize {
        let brings = brings && self.has_room();
        let has = |&name: &BlockHash| match self.tiers.knows(name) {
            true => brings || !self.tiers.only_on_host(name),
            false => brings && loan.is_some_and(|loan| loan.state(name).is_some()),
        };
        names.iter().rposition(has).map_or(0, |last| last + 1)
    }

    /// True if a state can be brought to the device now.
    pub(super) fn has_room(&self) -> bool {
        self.tiers.hot().available() > 0
    }

    /// The number of blocks whose copies take as long as it takes to bring this state to the
    /// device; 0: it is there, or on its way.
    pub(super) fn cost(&self, name: BlockHash) -> u32 {
        let is_away = self.tiers.only_on_host(name) || !self.tiers.knows(name);
        if is_away { self.weight } else { 0 }
    }

    /// States that came back, each counted as the blocks whose copies take as long.
    pub(super) fn restored_weight(&self) -> u64 {
        self.tiers.moves().restored * u64::from(self.weight)
    }

    /// Leases the state after a block, with the ticket of the copy that brings it. `None`: there is
    /// none, or every page is leased.
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

    /// Brings a state back before its request's turn, if a page can be had without a loss.
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

    /// Lends the state after the longest possible part of these leading blocks, with their loan.
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

    /// Ends the loan of the states that were lent with a loan of blocks.
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

    /// Forgets every state without a lease. True: nothing is left.
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

    /// Checks that the leases of these residents, of retired pages and of copies are all there are.
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
    /// The largest number of these leading blocks, which are cached, that a request can go on
    /// after. Without `brings` a state on the device is needed, if any is.
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

    /// Leases the state after the first `found` blocks of a request, of which `cached` are cached.
    /// If a copy brings it, its ticket is there too. `None`: the request shares nothing.
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
        // All of a prompt that is computed again may be cached, but for its state.
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

    /// Loads a resident's state in the plan of step `step`, which writes its slot.
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

    /// Makes a plan save the state after a resident's newest row, if the row ends with a page and a
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

    /// Retires the states of a request that loses its slot. Its last one stays from now on.
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
