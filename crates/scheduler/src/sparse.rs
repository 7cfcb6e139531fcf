//! Sparse decoding from host memory: requests that go on while most of their pages are given up.
//!
//! Hot pages are a cache of host pages (HiSparse, SGLang #21932, with pages in place of its
//! buffers). A full page is saved whole, behind the rows that fill it. The newest positions lie in
//! the last pages, which are never given up. So nothing ever waits for a save. A request is
//! *resident* with all its pages on the device until pages run short. Then the request that can
//! give up most pages becomes *sparse*. It stays sparse until it ends or is preempted.

use std::ops::Range;

use forebay_kvcache::{BackedBlock, Tiers};
use forebay_protocol::{Span, StepPlan, StepResult};

use crate::request::{Pages, Residence};
use crate::transfer::Leased;
use crate::{Handle, Retired, Scheduler, Sparse, SparseStats, State};

/// This part of the device's pages is kept for growth and for new requests.
const READY_SHARE: u32 = 10;
/// A plan that has come to so many words makes no more requests sparse.
const TABLE_WORDS: usize = 1 << 19;
/// Pages that a request which was sparse may compute again one position at a time, rather than all
/// pages at once.
const MOST_SINGLE: usize = 2;

/// Writes where all pages of a new resident are.
pub(crate) fn write_tables(residence: &Residence, plan: &mut StepPlan) {
    let Residence { slot, pages, .. } = residence;
    for (index, lease) in pages.hot.iter().enumerate() {
        match lease {
            Some(lease) => plan.write_page(*slot, index as u32, lease.page()),
            None => plan.drop_page(*slot, index as u32),
        }
    }
    for (index, lease) in pages.host.iter().enumerate() {
        plan.write_host(*slot, index as u32, lease.page());
    }
    for (index, lease) in pages.rows.iter().enumerate() {
        plan.write_hot_rows(*slot, index as u32, lease.page());
    }
}

/// Has the positions of a row saved by the plan that computes them.
pub(crate) fn save_rows(
    tiers: &mut Tiers,
    pages: &Pages,
    positions: Range<u32>,
    page_size: u32,
    plan: &mut StepPlan,
) {
    let mut at = positions.start;
    while at < positions.end {
        let (page, first) = ((at / page_size) as usize, at % page_size);
        let count = (page_size - first).min(positions.end - at);
        if let Some(Some(hot)) = pages.hot.get(page)
            && let Some(copy) = tiers.save_rows(hot, &pages.host[page], Span { first, count })
        {
            plan.push_copy(copy);
        }
        at += count;
    }
}

impl Scheduler {
    /// True if a resident is sparse.
    pub(crate) fn is_sparse(&self, handle: Handle) -> bool {
        let residence = self.requests[handle].state.residence();
        residence.is_some_and(|residence| residence.pages.is_sparse())
    }

    /// Leases pages like [`Self::lease_pages`], for tiers in which every page has one of the host's
    /// tier behind it. A request comes back sparse if it was sparse, or has outgrown the device's
    /// pages. It leaves the saved blocks in the host tier, and computes the rest position by
    /// position.
    pub(crate) fn lease_backed(&mut self, handle: Handle, sparse: Sparse) -> Option<Leased> {
        let page_size = self.config.page_size;
        let found = self.find_backed(handle);
        let entry = &self.requests[handle];
        let pages = (entry.known() + u32::from(entry.generates())).div_ceil(page_size) as usize;
        let few_missing = pages - found.len() <= MOST_SINGLE;
        let too_large = pages > self.config.pages as usize;
        let leased = if (entry.was_sparse && few_missing) || too_large {
            self.lease_sparse(handle, found, sparse)
        } else {
            self.lease_resident(handle, found, pages)
        }?;
        self.counters.host.restores_chosen += u64::from(leased.restored > 0);
        Some(leased)
    }

    /// The leading blocks of a request that are in the tiers. None is read before the copies have
    /// ended that bring it back.
    fn find_backed(&mut self, handle: Handle) -> Vec<BackedBlock> {
        let page_size = self.config.page_size;
        let entry = &mut self.requests[handle];
        if entry.request.spec.embeds.is_some() {
            return Vec::new();
        }
        let blocks = (entry.reusable() / page_size) as usize;
        let names = entry.name_blocks(blocks, page_size as usize, &self.config.namer);
        names.iter().map_while(|&name| self.tiers.find_backed(name)).collect()
    }

    fn lease_resident(
        &mut self,
        handle: Handle,
        found: Vec<BackedBlock>,
        count: usize,
    ) -> Option<Leased> {
        let missing = count - found.len();
        let away = found.iter().filter(|block| block.hot.is_none()).count();
        let room = (self.tiers.hot().available() as usize, self.tiers.host_available() as usize);
        if room.0 < missing + away || room.1 < missing {
            found.into_iter().rev().for_each(|block| self.tiers.release_backed(block));
            return None;
        }
        let mut leased = Leased::default();
        let entry = &mut self.requests[handle];
        entry.cached = found.len() as u32 * self.config.page_size;
        for (block, &name) in found.into_iter().zip(&entry.names) {
            let BackedBlock { host, hot, pending, indexed, .. } = block;
            leased.restored += u32::from(hot.is_none());
            let (hot, ticket) = match hot {
                Some(hot) => (Some(hot), pending),
                None => self.tiers.restore_backed(name, &host).unzip(),
            };
            leased.pending.extend(ticket);
            leased.pages.hot.push(hot);
            if !indexed {
                leased.pending.push_back(self.tiers.restore_index(name, &host));
            }
            leased.pages.host.push(host);
        }
        for _ in 0..missing {
            let (hot, host) = self.tiers.allocate_backed().unzip();
            leased.pages.hot.push(hot);
            leased.pages.host.extend(host);
        }
        Some(leased)
    }

    fn lease_sparse(
        &mut self,
        handle: Handle,
        mut found: Vec<BackedBlock>,
        sparse: Sparse,
    ) -> Option<Leased> {
        for block in found.iter_mut().filter(|block| block.saved) {
            block.pending = None;
            block.hot.take().into_iter().for_each(|hot| self.tiers.release(hot));
        }
        // Its own pages come one by one: it gives up the first before it needs the last.
        let room = (self.tiers.hot().available(), self.tiers.host_available());
        if room.0 < sparse.row_pages + 1 || room.1 < 1 {
            for (block, &name) in found.iter().zip(&self.requests[handle].names) {
                if !block.saved && !self.tiers.will_be_saved(name) {
                    self.tiers.want_saved(name);
                }
            }
            found.into_iter().rev().for_each(|block| self.tiers.release_backed(block));
            return None;
        }
        let mut leased = Leased::default();
        let entry = &mut self.requests[handle];
        entry.cached = found.len() as u32 * self.config.page_size;
        for (block, &name) in found.into_iter().zip(&entry.names) {
            let BackedBlock { host, hot, pending, indexed, .. } = block;
            if !indexed {
                leased.pending.push_back(self.tiers.restore_index(name, &host));
                leased.restored += 1;
            }
            leased.pending.extend(pending);
            leased.pages.hot.push(hot);
            leased.pages.host.push(host);
        }
        let (hot, host) = self.tiers.allocate_backed().unzip();
        leased.pages.hot.push(hot);
        leased.pages.host.extend(host);
        leased.pages.rows.extend((0..sparse.row_pages).map_while(|_| self.tiers.allocate()));
        Some(leased)
    }

    /// Has sparse requests give up newly saved pages, and makes some requests sparse if the
    /// device's pages run short.
    pub(crate) fn relieve(&mut self, plan: &mut StepPlan) {
        let Some(sparse) = self.config.sparse else { return };
        let residents: Vec<Handle> = self.residents.values().copied().collect();
        for handle in residents {
            self.drop_saved(handle, plan);
        }
        let goal = sparse.row_pages.max(self.config.pages / READY_SHARE).max(self.next_needs());
        while self.tiers.hot().available() + self.returning() < goal
            && plan.words() < TABLE_WORDS
            && self.make_sparse(plan)
        {}
    }

    /// Pages that the next request lacks, if pages are all that it lacks.
    fn next_needs(&self) -> u32 {
        let next = self.next_candidate().filter(|next| self.blocked == Some(next.key));
        let next = next.filter(|next| !self.free_slots.is_empty() && self.may_run(next.handle));
        let pages = next.map_or(0, |next| self.requests[next.handle].total / self.config.page_size);
        (pages + 1).min(self.config.pages)
    }

    /// Pages that are free when the steps in flight are done.
    fn returning(&self) -> u32 {
        let retired = self.in_flight.iter().flat_map(|flight| &flight.retired);
        retired.map(|retired| retired.pages.leases().count() as u32).sum()
    }

    /// Gives up saved pages of a sparse request, from the front on.
    fn drop_saved(&mut self, handle: Handle, plan: &mut StepPlan) {
        let entry = &mut self.requests[handle];
        let Some(residence) = running(&mut entry.state).filter(|r| r.pages.is_sparse()) else {
            return;
        };
        let keep = (residence.pages.len() as u32).saturating_sub(Sparse::TAIL);
        let mut dropped = Pages::default();
        while residence.settled < keep {
            let index = residence.settled;
            let page = &mut residence.pages.hot[index as usize];
            if let Some(hot) = page {
                if self.tiers.can_drop(hot) {
                    plan.drop_page(residence.slot, index);
                    dropped.hot.push(page.take());
                } else if let Some(name) = self.tiers.name_of(hot) {
                    if !self.tiers.will_be_saved(name) {
                        self.tiers.want_saved(name);
                    }
                    break;
                } else if index >= residence.named {
                    break;
                }
                // Else another request's page holds its block, and this one is never saved.
            }
            residence.settled += 1;
        }
        let last_step = residence.last_step;
        self.retire_pages(last_step, dropped);
    }

    fn retire_pages(&mut self, last_step: u64, pages: Pages) {
        if pages.len() > 0 {
            self.counters.sparse.pages_dropped += pages.len() as u64;
            self.retire_until(last_step, Retired { pages, ..Retired::default() });
        }
    }

    /// Makes the request sparse that gives up most. False: none would give up more than it needs
    /// for its hot rows.
    pub(crate) fn make_sparse(&mut self, plan: &mut StepPlan) -> bool {
        let Some(sparse) = self.config.sparse else { return false };
        let gain = |handle: Handle| {
            let entry = &self.requests[handle];
            let pages = entry.state.residence().filter(|r| !r.pages.is_sparse()).map(|r| &r.pages);
            let able = entry.plannable() && entry.request.spec.embeds.is_none();
            let pages = pages.filter(|_| able)?;
            let keep = pages.len().saturating_sub(Sparse::TAIL as usize);
            let given = pages.hot[..keep]
                .iter()
                .flatten()
                .filter(|hot| self.tiers.can_drop(hot) && self.tiers.hot().leases(hot.page()) == 1);
            (given.count() as u32).checked_sub(sparse.row_pages).filter(|&gain| gain > 0)
        };
        let gains = self.decodes.iter().filter_map(|&handle| Some((gain(handle)?, handle)));
        // Of equals the least important one.
        let best = gains.max_by_key(|&(gain, handle)| (gain, self.requests[handle].key));
        let Some((_, handle)) = best else { return false };
        let entry = &mut self.requests[handle];
        let Some(residence) = running(&mut entry.state) else { return false };
        let keep = residence.pages.len() - Sparse::TAIL as usize;
        let (slot, last_step) = (residence.slot, residence.last_step);
        let (mut dropped, mut rows) = (Pages::default(), Vec::new());
        for (index, page) in residence.pages.hot[..keep].iter_mut().enumerate() {
            let Some(hot) = page.take_if(|hot| self.tiers.can_drop(hot)) else { continue };
            plan.drop_page(slot, index as u32);
            // The hand executes in order: a step in flight reads the page before another row is
            // copied to it.
            if rows.len() < sparse.row_pages as usize && self.tiers.take_over(&hot) {
                plan.write_hot_rows(slot, rows.len() as u32, hot.page());
                rows.push(hot);
            } else {
                dropped.hot.push(Some(hot));
            }
        }
        residence.pages.rows = rows;
        self.counters.sparse.conversions += 1;
        self.retire_pages(last_step, dropped);
        true
    }

    /// True if residents could give up more after saves. Failed saves are requested again.
    pub(crate) fn saves_will_help(&mut self) -> bool {
        let mut unsaved = false;
        for handle in self.decodes.iter().chain(self.prefills.values()) {
            let entry = &self.requests[*handle];
            let Some(residence) = entry.state.residence() else { continue };
            let keep = residence.pages.len().saturating_sub(Sparse::TAIL as usize);
            let Pages { hot, host, .. } = &residence.pages;
            for (index, hot) in hot[..keep].iter().enumerate() {
                let Some(hot) = hot.as_ref().filter(|hot| !self.tiers.can_drop(hot)) else {
                    continue;
                };
                let name = match self.tiers.name_of(hot) {
                    None if index < residence.named as usize => {
                        // Another's page held its block, or it was forgotten.
                        let name = entry.names[index];
                        if !self.tiers.name_backed(hot, &host[index], name) {
                            continue;
                        }
                        name
                    }
                    None => continue,
                    Some(name) => name,
                };
                unsaved = true;
                if !self.tiers.will_be_saved(name) {
                    self.tiers.want_saved(name);
                }
            }
        }
        unsaved && self.tiers.expects_saves()
    }

    pub(crate) fn count_rows(&mut self, result: &StepResult) {
        let (counters, rows) = (&mut self.counters.sparse, result.sparse_rows.unwrap_or_default());
        counters.selected += u64::from(rows.selected);
        counters.on_pages += u64::from(rows.on_pages);
        counters.in_rows += u64::from(rows.in_rows);
        counters.missed += u64::from(rows.missed);
        counters.waited_us += u64::from(result.copy_wait_us.unwrap_or(0));
    }

    pub(crate) fn sparse_stats(&self) -> SparseStats {
        let requests = match self.config.sparse {
            None => 0,
            Some(_) => self.residents.values().filter(|&&handle| self.is_sparse(handle)).count(),
        };
        SparseStats { requests, ..self.counters.sparse }
    }
}

/// The residence of a request that has rows.
fn running(state: &mut State) -> Option<&mut Residence> {
    match state {
        State::Prefill(residence) | State::Decode { residence, .. } => Some(residence),
        State::Waiting | State::Arriving { .. } | State::Planned(_) => None,
    }
}
