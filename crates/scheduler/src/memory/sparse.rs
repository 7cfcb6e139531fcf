//! Backed pages: requests that continue while most of their pages are dropped (sparse decoding).
//!
//! Hot pages cache host pages (as HiSparse does, SGLang #21932, which uses buffers in place of
//! pages). A full page is saved after the rows that fill it. The newest positions lie in the last
//! pages, which are never dropped. So nothing ever waits for a save. A running request has all its
//! pages on the device until pages run short. Then the request that can drop the most pages becomes
//! *sparse*. The request stays sparse until it ends or is preempted.

use std::ops::Range;

use forebay_kvcache::BackedBlock;
use forebay_protocol::{Span, StepPlan, StepResult};

use super::pages::Pages;
use super::prefix::LeasedPages;
use super::{Kind, Memory, Room};
use crate::config::Sparse;
use crate::entry::{Entry, Residence, Stage};
use crate::roster::Roster;
use crate::slab::Handle;

/// One in `READY_SHARE` hot pages is kept free for the growth of running requests and for new
/// requests.
const READY_SHARE: u32 = 10;
/// Once the tables of a plan have this many words, no more requests become sparse in it.
const TABLE_WORDS: usize = 1 << 19;
/// A request that was sparse recomputes up to this many missing pages one position at a time. With
/// more missing pages, it gets all its pages and recomputes them in chunks.
const MOST_SINGLE: usize = 2;

impl Memory {
    /// Leases pages like [`Self::lease_with_prefix`]. A request that was sparse, or has outgrown
    /// the device's pages, is admitted as sparse. Its saved blocks stay in the host tier, and it
    /// computes the rest position by position.
    pub(super) fn lease_backed(
        &mut self,
        entry: &mut Entry,
        sparse: Sparse,
    ) -> Option<LeasedPages> {
        let found = self.find_backed_prefix(entry);
        let pages = self.pages_for(entry);
        let few_missing = pages - found.len() <= MOST_SINGLE;
        let too_large = pages > self.pages as usize;
        if (entry.blocks.was_sparse && few_missing) || too_large {
            self.lease_sparse(entry, found, sparse)
        } else {
            self.lease_resident(entry, found, pages)
        }
    }

    /// Finds the leading blocks of a request that are in the tiers. Restored blocks are read only
    /// after their copies have ended.
    fn find_backed_prefix(&mut self, entry: &mut Entry) -> Vec<BackedBlock> {
        if !self.caches(entry) {
            return Vec::new();
        }
        let blocks = (entry.reusable() / self.page_size) as usize;
        let names = entry.name_blocks(blocks, self.page_size as usize, &self.namer);
        names.iter().map_while(|&name| self.tiers.find_backed(name)).collect()
    }

    fn lease_resident(
        &mut self,
        entry: &mut Entry,
        found: Vec<BackedBlock>,
        count: usize,
    ) -> Option<LeasedPages> {
        let missing = count - found.len();
        let away = found.iter().filter(|block| block.hot.is_none()).count();
        let room = (self.tiers.hot().available() as usize, self.tiers.host_available() as usize);
        if room.0 < missing + away || room.1 < missing {
            found.into_iter().rev().for_each(|block| self.tiers.release_backed(block));
            return None;
        }
        let mut leased = LeasedPages::default();
        entry.cached = found.len() as u32 * self.page_size;
        for (block, &name) in found.into_iter().zip(&entry.blocks.names) {
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
        entry: &mut Entry,
        mut found: Vec<BackedBlock>,
        sparse: Sparse,
    ) -> Option<LeasedPages> {
        for block in found.iter_mut().filter(|block| block.saved) {
            block.pending = None;
            block.hot.take().into_iter().for_each(|hot| self.tiers.release(hot));
        }
        // The request gets its pages one by one, and drops the first page before it needs the last.
        let room = (self.tiers.hot().available(), self.tiers.host_available());
        if room.0 < sparse.row_pages + 1 || room.1 < 1 {
            for (block, &name) in found.iter().zip(&entry.blocks.names) {
                if !block.saved && !self.tiers.will_be_saved(name) {
                    self.tiers.want_saved(name);
                }
            }
            found.into_iter().rev().for_each(|block| self.tiers.release_backed(block));
            return None;
        }
        let mut leased = LeasedPages::default();
        entry.cached = found.len() as u32 * self.page_size;
        for (block, &name) in found.into_iter().zip(&entry.blocks.names) {
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

    /// Makes sparse requests drop newly saved pages.
    pub(crate) fn drop_saved(&mut self, roster: &mut Roster, plan: &mut StepPlan) {
        if let Kind::Backed(_) = self.kind {
            for &handle in roster.residents.values() {
                self.drop_saved_of(&mut roster.requests[handle], plan);
            }
        }
    }

    /// Makes requests sparse if the device's pages run short. `total`: the number of tokens of the
    /// next request if it lacks nothing but pages; else 0.
    pub(crate) fn keep_ready(&mut self, roster: &mut Roster, total: u32, plan: &mut StepPlan) {
        let Kind::Backed(sparse) = self.kind else { return };
        let next = (total / self.page_size + 1).min(self.pages);
        let goal = sparse.row_pages.max(self.pages / READY_SHARE).max(next);
        while self.tiers.hot().available() + self.returning() < goal
            && plan.words() < TABLE_WORDS
            && self.make_sparse(sparse, roster, plan)
        {}
    }

    /// Makes room for a page when all are leased, by dropping pages of other requests.
    pub(crate) fn make_room(&mut self, roster: &mut Roster, plan: &mut StepPlan) -> Room {
        match self.kind {
            Kind::Backed(sparse) if self.tiers.hot().available() == 0 => {
                if self.make_sparse(sparse, roster, plan) {
                    Room::Made
                } else if self.saves_will_help(roster) {
                    Room::WithCopies
                } else {
                    Room::None
                }
            }
            Kind::Nothing | Kind::Paged | Kind::Backed(_) => Room::None,
        }
    }

    /// The number of pages that will be free after the steps in flight.
    fn returning(&self) -> u32 {
        self.retired.iter().map(|pages| pages.leases().count() as u32).sum()
    }

    /// Drops saved pages of a sparse request, the first positions first.
    fn drop_saved_of(&mut self, entry: &mut Entry, plan: &mut StepPlan) {
        let Some(Residence { slot, pages, last_step, stage, .. }) = &mut entry.residence else {
            return;
        };
        if !pages.is_sparse() || !matches!(stage, Stage::Prefill | Stage::Decode { .. }) {
            return;
        }
        let keep = (pages.len() as u32).saturating_sub(Sparse::TAIL);
        let mut dropped = Pages::default();
        while pages.settled < keep {
            let index = pages.settled;
            let page = &mut pages.hot[index as usize];
            if let Some(hot) = page {
                if self.tiers.can_drop(hot) {
                    plan.drop_page(*slot, index);
                    dropped.hot.push(page.take());
                } else if let Some(name) = self.tiers.name_of(hot) {
                    if !self.tiers.will_be_saved(name) {
                        self.tiers.want_saved(name);
                    }
                    break;
                } else if index >= pages.named {
                    break;
                }
                // Otherwise another host page already holds this block, and this page is never
                // saved.
            }
            pages.settled += 1;
        }
        self.retire_dropped(*last_step, dropped);
    }

    fn retire_dropped(&mut self, last_step: u64, pages: Pages) {
        if pages.len() > 0 {
            self.sparse_counters.pages_dropped += pages.len() as u64;
            self.retire(last_step, pages);
        }
    }

    /// Chooses the request that can drop the most pages, and makes it sparse. Returns false if no
    /// request would drop more pages than its hot rows need.
    fn make_sparse(&mut self, sparse: Sparse, roster: &mut Roster, plan: &mut StepPlan) -> bool {
        let gain = |handle: Handle| {
            let entry = &roster[handle];
            let pages = entry.residence.as_ref().filter(|r| !r.pages.is_sparse()).map(|r| &r.pages);
            let able = entry.plannable() && entry.request.spec.embeds.is_none();
            let pages = pages.filter(|_| able)?;
            let keep = pages.len().saturating_sub(Sparse::TAIL as usize);
            let given = pages.hot[..keep]
                .iter()
                .flatten()
                .filter(|hot| self.tiers.can_drop(hot) && self.tiers.hot().leases(hot.page()) == 1);
            (given.count() as u32).checked_sub(sparse.row_pages).filter(|&gain| gain > 0)
        };
        let gains = roster.decodes.iter().filter_map(|&handle| Some((gain(handle)?, handle)));
        // Among equal gains, take the least important request.
        let best = gains.max_by_key(|&(gain, handle)| (gain, roster[handle].key));
        let Some((_, handle)) = best else { return false };
        let residence = &mut roster[handle].residence;
        let Some(Residence { slot, pages, last_step, .. }) = residence else { return false };
        let keep = pages.len() - Sparse::TAIL as usize;
        let (mut dropped, mut rows) = (Pages::default(), Vec::new());
        for (index, page) in pages.hot[..keep].iter_mut().enumerate() {
            let Some(hot) = page.take_if(|hot| self.tiers.can_drop(hot)) else { continue };
            plan.drop_page(*slot, index as u32);
            // The hand executes in order, so steps in flight read the page before a row is copied
            // into it.
            if rows.len() < sparse.row_pages as usize && self.tiers.take_over(&hot) {
                plan.write_hot_rows(*slot, rows.len() as u32, hot.page());
                rows.push(hot);
            } else {
                dropped.hot.push(Some(hot));
            }
        }
        pages.rows = rows;
        self.sparse_counters.conversions += 1;
        self.retire_dropped(*last_step, dropped);
        true
    }

    /// True if residents could drop more pages after saves. Also requests failed saves again.
    fn saves_will_help(&mut self, roster: &mut Roster) -> bool {
        let mut unsaved = false;
        let Roster { decodes, prefills, requests, .. } = roster;
        for &handle in decodes.iter().chain(prefills.values()) {
            let entry = &mut requests[handle];
            let Some(Residence { pages, .. }) = entry.residence.as_mut() else { continue };
            let keep = pages.len().saturating_sub(Sparse::TAIL as usize);
            for (index, hot) in pages.hot[..keep].iter().enumerate() {
                let Some(hot) = hot.as_ref().filter(|hot| !self.tiers.can_drop(hot)) else {
                    continue;
                };
                let name = match self.tiers.name_of(hot) {
                    None if index < pages.named as usize => {
                        // So far another page held this page's block, or the block was forgotten.
                        let name = entry.blocks.names[index];
                        if !self.tiers.name_backed(hot, &pages.host[index], name) {
                            continue;
                        }
                        // The page can be saved and dropped from now on.
                        pages.settled = pages.settled.min(index as u32);
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

    /// Makes the plan that computes a row's positions save them too.
    pub(crate) fn save_rows(&mut self, pages: &Pages, positions: Range<u32>, plan: &mut StepPlan) {
        if !matches!(self.kind, Kind::Backed(sparse) if sparse.save_rows) {
            return;
        }
        let mut at = positions.start;
        while at < positions.end {
            let (page, first) = ((at / self.page_size) as usize, at % self.page_size);
            let count = (self.page_size - first).min(positions.end - at);
            if let Some(Some(hot)) = pages.hot.get(page)
                && let Some(copy) =
                    self.tiers.save_rows(hot, &pages.host[page], Span { first, count })
            {
                plan.push_copy(copy);
            }
            at += count;
        }
    }

    /// Counts the positions that sparse requests chose.
    pub(crate) fn count_chosen(&mut self, result: &StepResult) {
        let (counters, rows) = (&mut self.sparse_counters, result.sparse_rows.unwrap_or_default());
        counters.selected += u64::from(rows.selected);
        counters.on_pages += u64::from(rows.on_pages);
        counters.in_rows += u64::from(rows.in_rows);
        counters.missed += u64::from(rows.missed);
        counters.waited_us += u64::from(result.copy_wait_us.unwrap_or(0));
    }
}
