//! Copies between the device's memory and the host's: the saves and restores in a plan, and the
//! ends of copies in a result.
//!
//! Nothing waits for a save. A request waits for the restores of its own blocks.

use forebay_kvcache::{BlockHash, Tiers};
use forebay_protocol::{COPY_OK, CopyEnd, PageCopy, StepPlan, StepResult};

use super::pages::Pages;
use super::states::StatePages;
use super::{Kind, Memory};
use crate::config::{HostTier, SavePolicy};
use crate::entry::{Entry, Residence, Stage};
use crate::event::HostStats;
use crate::roster::Roster;

/// Saves may lease at most one in `SAVING_SHARE` hot pages at a time.
const SAVING_SHARE: u32 = 8;
/// The policy *write back* keeps at least one in `READY_SHARE` hot pages free or saved.
const READY_SHARE: u32 = 10;
const READY_PAGES: u32 = 64;

/// The largest number of ended requests whose blocks are remembered until they are saved.
const UNFINISHED: usize = 64;

/// The counters as they were before a result's copies were applied.
pub(crate) struct CopiesBefore {
    restored: u64,
    available: u32,
}

impl Memory {
    /// Marks the blocks of a request that loses its pages as used, such that the first block is
    /// evicted last.
    pub(crate) fn note_use(&mut self, entry: &mut Entry, pages: &Pages) {
        entry.blocks.was_sparse = pages.is_sparse();
        if self.host.is_none() {
            return;
        }
        let names = &entry.blocks.names;
        let names = &names[..names.len().min(pages.len())];
        self.tiers.touch(names);
        // A block counts as just used when its save ends. The blocks are saved in order, so the
        // last one would be evicted last. To correct this, `touch_finished` marks them again after
        // the last save.
        if names.last().is_some_and(|&last| self.tiers.will_be_saved(last))
            && self.unfinished.len() < UNFINISHED
        {
            self.unfinished.push(names.to_vec());
        }
    }

    /// True if any of a request's blocks, or a state after one, is being saved or will be.
    pub(crate) fn will_save(&self, names: &[BlockHash]) -> bool {
        let saves = |name| self.all_tiers().any(|tiers| tiers.will_be_saved(name));
        // The last block is saved last, so it is checked first.
        names.iter().rev().any(|&name| saves(name))
    }

    fn touch_finished(&mut self) {
        let tiers = &mut self.tiers;
        self.unfinished.retain(|names| {
            let waits = names.last().is_some_and(|&last| tiers.will_be_saved(last));
            if !waits {
                tiers.touch(names);
            }
            waits
        });
    }

    /// Adds copies to the plan. Restores are first, because requests wait for them.
    pub(crate) fn plan_copies(&mut self, plan: &mut StepPlan) {
        let Some(host) = self.host else { return };
        for _ in 0..host.copies_a_step {
            let Some(copy) = self.next_restore().or_else(|| self.next_save(host)) else { return };
            plan.push_copy(copy);
        }
    }

    /// The tiers of blocks, and those of states if the model has recurrent layers.
    fn all_tiers(&self) -> impl Iterator<Item = &Tiers> {
        [&self.tiers].into_iter().chain(self.states.as_ref().map(|states| &states.tiers))
    }

    fn next_restore(&mut self) -> Option<PageCopy> {
        let of_states = |states: &mut StatePages| states.tiers.next_restore();
        self.tiers.next_restore().or_else(|| self.states.as_mut().and_then(of_states))
    }

    fn next_save(&mut self, host: HostTier) -> Option<PageCopy> {
        // States first: there are few states, and many blocks.
        if let Some(copy) = self.states.as_mut().and_then(StatePages::next_save) {
            return Some(copy);
        }
        let pages = self.pages;
        // Pages are unavailable while saves lease them, so limit their number.
        let most = (pages / SAVING_SHARE).max(host.copies_a_step.min(pages / 4)).max(1);
        match host.policy {
            SavePolicy::WriteThrough | SavePolicy::WriteThroughSelective => {
                self.tiers.next_save(most)
            }
            SavePolicy::WriteBack => {
                self.tiers.sweep((pages / READY_SHARE).max(READY_PAGES).min(pages), most)
            }
        }
    }

    /// The number of copies whose ends are not reported yet.
    pub(crate) fn copies_outstanding(&self) -> usize {
        self.all_tiers().map(Tiers::outstanding).sum()
    }

    /// True if a plan has named this copy, and the copy's end is not reported yet.
    pub(crate) fn has_sent(&self, ticket: u32) -> bool {
        self.all_tiers().any(|tiers| tiers.is_sent(ticket))
    }

    /// True if pages become free when copies end.
    pub(crate) fn expects_pages(&self) -> bool {
        match self.kind {
            Kind::Nothing | Kind::Paged => self.tiers.expects_pages(),
            Kind::Backed(_) => self.tiers.outstanding() > 0,
        }
    }

    /// Learns the cost of computing from the time of a step with rows of these lengths.
    pub(crate) fn learn(&mut self, lengths: impl Iterator<Item = u32> + Clone, device_us: u32) {
        if self.host.is_some() {
            let positions = lengths.clone().sum();
            let single = lengths.filter(|&length| length == 1).count() as u32;
            self.rates.computed(positions, single, device_us);
        }
    }

    /// Records the times of a result's copies. `None`: no copy has ended.
    pub(crate) fn begin_copy_ends(&mut self, result: &StepResult) -> Option<CopiesBefore> {
        let timing = result.copy_timing.unwrap_or_default();
        self.host_counters.save_us += u64::from(timing.save_us);
        self.host_counters.restore_us += u64::from(timing.restore_us);
        let (restored, available) = (self.restored(), self.tiers.hot().available());
        (!result.copied.is_empty()).then_some(CopiesBefore { restored, available })
    }

    /// The number of restored blocks. A restored state counts as the number of blocks that take as
    /// long to copy.
    fn restored(&self) -> u64 {
        let states = self.states.as_ref().map_or(0, StatePages::restored_weight);
        self.tiers.moves().restored + states
    }

    /// Applies the end of a copy. If the copy failed, the requests that waited for it have lost
    /// their pages.
    pub(crate) fn copy_ended(&mut self, end: CopyEnd) {
        let fine = end.error == COPY_OK;
        if !self.tiers.ended(end.ticket, fine)
            && let Some(states) = &mut self.states
        {
            states.tiers.ended(end.ticket, fine);
        }
    }

    /// Lets requests whose copies have ended continue. Returns true if pages may be free for
    /// requests that lacked some.
    pub(crate) fn finish_copy_ends(
        &mut self,
        before: &CopiesBefore,
        result: &StepResult,
        roster: &mut Roster,
    ) -> bool {
        let restore_us = result.copy_timing.unwrap_or_default().restore_us;
        self.rates.restored(self.restored() - before.restored, restore_us);
        let is_under_way = |ticket| self.all_tiers().any(|tiers| tiers.is_under_way(ticket));
        for &handle in roster.arriving.values() {
            let residence = &mut roster.requests[handle].residence;
            if let Some(Residence { stage: Stage::Arriving(pending), .. }) = residence {
                while pending.front().is_some_and(|&ticket| !is_under_way(ticket)) {
                    pending.pop_front();
                }
            }
        }
        self.touch_finished();
        self.tiers.hot().available() > before.available || matches!(self.kind, Kind::Backed(_))
    }

    pub(super) fn host_stats(&self) -> HostStats {
        let (moves, pages) = (self.tiers.moves(), self.tiers.host_counts());
        let page_size = self.page_size as usize;
        let used = (pages.cached + pages.held) as usize;
        let all = used + pages.free as usize;
        HostStats {
            pages: all,
            pages_used: used,
            tokens: all * page_size,
            tokens_used: used * page_size,
            tokens_restored: moves.restored * page_size as u64,
            lent_pages: self.all_tiers().map(Tiers::lent_pages).sum(),
            copies_outstanding: self.copies_outstanding(),
            blocks_saved: moves.saved,
            blocks_restored: moves.restored,
            copies_failed: self.all_tiers().map(|tiers| tiers.moves().failed).sum(),
            dropped_unsaved: moves.dropped_unsaved,
            saves_refused: moves.refused,
            ..self.host_counters
        }
    }
}
