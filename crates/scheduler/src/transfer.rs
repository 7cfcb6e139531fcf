//! The places of blocks: the blocks of a request in each tier, and the copies between the device's
//! memory and the host's.
//!
//! Plans order copies, and results report their ends. Nothing waits for a save. A request waits for
//! the restores of its own blocks. It is an *arriving* resident then: it has its slot and pages,
//! and no row.

use std::collections::VecDeque;
use std::ops::Bound;

use forebay_kvcache::Found;
use forebay_protocol::{COPY_OK, CopyEnd, PageCopy, StepPlan, StepResult};

use crate::request::{Key, Pages, Residence};
use crate::{Event, Handle, HostStats, HostTier, SavePolicy, Scheduler, State};

/// A part of all hot pages that saves may lease at a time.
const SAVING_SHARE: u32 = 8;
/// The policy *write back* keeps this part of all hot pages ready to be given up, and at least so
/// many.
const READY_SHARE: u32 = 10;
const READY_PAGES: u32 = 64;

/// The largest number of requests whose blocks are remembered until they are saved.
const UNFINISHED: usize = 64;

/// The pages of a request that is admitted.
#[derive(Default)]
pub(crate) struct Leased {
    pub(crate) pages: Pages,
    /// Copies to wait for.
    pub(crate) pending: VecDeque<u32>,
    /// Pages that copies bring.
    pub(crate) restored: u32,
}

impl Scheduler {
    /// Leases pages for all known tokens of a request and, if it generates, the next one. The first
    /// pages hold its leading blocks, or will when copies have ended; `cached` tells the number of
    /// their positions. New pages follow. `None`, and nothing is leased, if there are too few.
    pub(crate) fn lease_pages(&mut self, handle: Handle) -> Option<Leased> {
        // From here on it needs tokens of its own.
        self.requests[handle].settle();
        let (mut leases, mut pending, mut restored) = (Vec::new(), VecDeque::new(), 0);
        if self.keeps_nothing() {
            return Some(Leased::default());
        }
        if let Some(sparse) = self.config.sparse {
            return self.lease_backed(handle, sparse);
        }
        let page_size = self.config.page_size;
        let entry = &self.requests[handle];
        let pages = (entry.known() + u32::from(entry.generates())).div_ceil(page_size) as usize;
        let (found, declined) = self.find_blocks(handle);
        let new = pages - found.iter().filter(|found| !matches!(found, Found::Host(_))).count();
        let entry = &mut self.requests[handle];
        if (self.tiers.hot().available() as usize) < new {
            self.give_up(found);
            return None;
        }
        leases.reserve_exact(pages);
        for (found, &name) in found.into_iter().zip(&entry.names) {
            let (lease, ticket) = match found {
                Found::Hot(lease) => (Some(lease), None),
                Found::Arriving(lease, ticket) => (Some(lease), Some(ticket)),
                Found::Host(lease) => self.tiers.restore(name, lease).unzip(),
            };
            leases.push(lease);
            restored += u32::from(ticket.is_some());
            pending.extend(ticket);
        }
        entry.cached = leases.len() as u32 * page_size;
        self.counters.host.restores_chosen += u64::from(restored > 0);
        if declined {
            self.counters.host.restores_declined += 1;
            self.rates.declined();
        }
        leases.resize_with(pages, || self.tiers.allocate());
        let pages = Pages { hot: leases, ..Pages::default() };
        Some(Leased { pages, pending, restored })
    }

    /// Finds the leading blocks of a request in the tiers, unless computing them again is cheaper
    /// than to bring them back. The second value is true if it is.
    fn find_blocks(&mut self, handle: Handle) -> (Vec<Found>, bool) {
        let page_size = self.config.page_size;
        let entry = &mut self.requests[handle];
        if !self.config.prefix_cache || entry.request.spec.embeds.is_some() {
            return (Vec::new(), false);
        }
        let selective =
            self.config.host.is_some_and(|host| host.policy == SavePolicy::WriteThroughSelective);
        let recomputes = entry.request.past.admitted
            && self.config.host.is_some_and(|host| !host.restore_preempted);
        let blocks = (entry.reusable() / page_size) as usize;
        let (mut found, mut first_on_host, mut on_host) = (Vec::new(), usize::MAX, 0);
        for &name in entry.name_blocks(blocks, page_size as usize, &self.config.namer) {
            match self.tiers.find(name) {
                None => break,
                Some(Found::Host(lease)) if recomputes => {
                    self.tiers.release_host(lease);
                    break;
                }
                Some(Found::Host(lease)) => {
                    first_on_host = first_on_host.min(found.len());
                    on_host += 1;
                    found.push(Found::Host(lease));
                }
                Some(on_device) => {
                    if selective && matches!(on_device, Found::Hot(_)) {
                        self.tiers.want_saved(name);
                    }
                    found.push(on_device);
                }
            }
        }
        let tokens = (found.len() - first_on_host.min(found.len())) as u32 * page_size;
        let declined = on_host > 0 && !self.rates.restores(on_host, tokens);
        if declined {
            let rest = found.split_off(first_on_host);
            self.give_up(rest);
        }
        (found, declined)
    }

    /// Gives back the leases of blocks that were found, the deepest first.
    fn give_up(&mut self, found: Vec<Found>) {
        for found in found.into_iter().rev() {
            match found {
                Found::Hot(lease) | Found::Arriving(lease, _) => self.tiers.release(lease),
                Found::Host(lease) => self.tiers.release_host(lease),
            }
        }
    }

    /// True if a request waited for copies, and waits no more.
    pub(crate) fn has_arrived(&self, handle: Handle) -> bool {
        matches!(&self.requests[handle].state, State::Arriving { pending, .. } if pending.is_empty())
    }

    /// The most important request whose blocks have come back. It has to go before all in prefill
    /// from there on, and the plan must have room for it.
    pub(crate) fn next_arrival(&self, from: Bound<Key>, plan: &StepPlan) -> Option<Handle> {
        let before = self.prefills.range((from, Bound::Unbounded)).next().map(|(key, _)| key);
        let (key, &handle) = self.arriving.iter().find(|(_, at)| self.has_arrived(**at))?;
        let first = before.is_none_or(|before| key < before);
        let room = !plan.writes_slots() || self.has_words_for(handle, plan);
        (first && room && self.has_room_in_result(handle)).then_some(handle)
    }

    /// A request's blocks are on the device: it goes on with the rest.
    pub(crate) fn arrive(&mut self, handle: Handle, plan: &mut StepPlan, events: &mut Vec<Event>) {
        let entry = &mut self.requests[handle];
        match std::mem::replace(&mut entry.state, State::Waiting) {
            State::Arriving { residence, .. } => {
                self.arriving.remove(&entry.key);
                events.push(Event::Arrived { id: entry.request.id });
                self.begin_prefill(handle, residence, plan, events);
            }
            other => entry.state = other,
        }
    }

    /// Brings back blocks of the next requests. It uses pages that are free of loss and that no
    /// earlier request needs.
    pub(crate) fn prefetch(&mut self) {
        let Some(host) = self.config.host.filter(|host| host.prefetch > 0) else { return };
        debug_assert!(self.config.sparse.is_none(), "they restore no index keys");
        let page_size = self.config.page_size;
        if !self.rates.restores(1, page_size) {
            return;
        }
        // Those who run may need a page each before these come free again.
        let mut room = self.tiers.hot().spare().saturating_sub(self.residents.len() as u32);
        for ticket in self.queue.upcoming(host.prefetch as usize) {
            let entry = &mut self.requests[ticket.handle];
            let pages = entry.total.div_ceil(page_size);
            let recomputes = entry.request.past.admitted && !host.restore_preempted;
            if room == 0 {
                return;
            }
            if entry.prefetched || recomputes || entry.request.spec.embeds.is_some() {
                room = room.saturating_sub(pages);
                continue;
            }
            // Once only, also where there is not room for all: what comes back later would take the
            // pages of what came before.
            entry.prefetched = true;
            entry.settle();
            let blocks = (entry.reusable() / page_size) as usize;
            for &name in entry.name_blocks(blocks, page_size as usize, &self.config.namer) {
                if room == 0 {
                    return;
                }
                if self.tiers.only_on_host(name)
                    && let Some(Found::Host(lease)) = self.tiers.find(name)
                    && let Some((waiter, _)) = self.tiers.restore(name, lease)
                {
                    self.tiers.release(waiter);
                    room -= 1;
                } else if !self.tiers.knows(name) {
                    break;
                }
            }
        }
    }

    /// Notes that a request used its blocks, so that its first one is the last to go.
    pub(crate) fn note_use(&mut self, handle: Handle, residence: &Residence) {
        if self.config.host.is_none() {
            return;
        }
        let names = &self.requests[handle].names;
        let names = &names[..names.len().min(residence.pages.len())];
        self.tiers.touch(names);
        // A block that is being saved is nobody's latest use yet, and the last one is saved last.
        if names.last().is_some_and(|&last| self.tiers.will_be_saved(last))
            && self.unfinished.len() < UNFINISHED
        {
            self.unfinished.push(names.to_vec());
        }
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
        let Some(host) = self.config.host else { return };
        for _ in 0..host.copies_a_step {
            let Some(copy) = self.tiers.next_restore().or_else(|| self.next_save(host)) else {
                return;
            };
            plan.push_copy(copy);
        }
    }

    fn next_save(&mut self, host: HostTier) -> Option<PageCopy> {
        let pages = self.config.pages;
        // Pages that saves lease are nobody's meanwhile.
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

    /// Takes the ends of copies. A request whose restore failed waits for its turn again, and
    /// computes the missing blocks.
    pub(crate) fn copies_ended(&mut self, result: &StepResult, events: &mut Vec<Event>) {
        let timing = result.copy_timing.unwrap_or_default();
        self.counters.host.save_us += u64::from(timing.save_us);
        self.counters.host.restore_us += u64::from(timing.restore_us);
        if result.copied.is_empty() {
            return;
        }
        let (restored, available) = (self.tiers.moves().restored, self.tiers.hot().available());
        for &CopyEnd { ticket, error } in &result.copied {
            if error != COPY_OK {
                self.turn_away(ticket, events);
            }
            self.tiers.ended(ticket, error == COPY_OK);
        }
        self.rates.restored(self.tiers.moves().restored - restored, timing.restore_us);
        for &handle in self.arriving.values() {
            if let State::Arriving { pending, .. } = &mut self.requests[handle].state {
                while pending.front().is_some_and(|&ticket| !self.tiers.is_under_way(ticket)) {
                    pending.pop_front();
                }
            }
        }
        self.touch_finished();
        if self.tiers.hot().available() > available || self.config.sparse.is_some() {
            self.blocked = None;
            self.shares.changed();
        }
    }

    fn turn_away(&mut self, ticket: u32, events: &mut Vec<Event>) {
        let waits = |&handle: &Handle| match &self.requests[handle].state {
            State::Arriving { pending, .. } => pending.contains(&ticket),
            _ => false,
        };
        let waiters: Vec<Handle> = self.arriving.values().copied().filter(waits).collect();
        for handle in waiters {
            self.vacate(handle);
            let entry = &self.requests[handle];
            events.push(Event::Preempted { id: entry.request.id });
            if entry.mark().is_none() {
                self.enqueue(handle);
            }
        }
    }

    pub(crate) fn host_stats(&self) -> HostStats {
        let (moves, pages) = (self.tiers.moves(), self.tiers.host_counts());
        let page_size = self.config.page_size as usize;
        let used = (pages.cached + pages.held) as usize;
        let all = used + pages.free as usize;
        HostStats {
            pages: all,
            pages_used: used,
            tokens: all * page_size,
            tokens_used: used * page_size,
            tokens_restored: moves.restored * page_size as u64,
            copies_outstanding: self.tiers.outstanding(),
            arriving: self.arriving.len(),
            blocks_saved: moves.saved,
            blocks_restored: moves.restored,
            copies_failed: moves.failed,
            dropped_unsaved: moves.dropped_unsaved,
            saves_refused: moves.refused,
            ..self.counters.host
        }
    }

    /// Offers a resident's blocks to the cache whose tokens are known and whose keys and values are
    /// planned.
    pub(crate) fn offer_blocks(&mut self, handle: Handle) {
        let caching = self.config.prefix_cache && !self.keeps_nothing();
        let page_size = self.config.page_size;
        let by_rows = self.config.sparse.is_some_and(|sparse| sparse.save_rows);
        let saves = self.config.host.is_some_and(|host| host.policy == SavePolicy::WriteThrough)
            && !by_rows;
        let entry = &mut self.requests[handle];
        let cached = caching && entry.request.spec.embeds.is_none();
        let ready = entry.certain() / page_size;
        let named = entry.state.residence().map_or(ready, |residence| residence.named);
        if !cached || named >= ready {
            return;
        }
        entry.name_blocks(ready as usize, page_size as usize, &self.config.namer);
        if let Some(residence) = entry.state.residence_mut() {
            for block in named as usize..ready as usize {
                let (pages, name) = (&residence.pages, entry.names[block]);
                let fresh = match (&pages.hot[block], pages.host.get(block)) {
                    (Some(hot), None) => self.tiers.name(hot, name),
                    (Some(hot), Some(host)) => self.tiers.name_backed(hot, host, name),
                    (None, _) => false,
                };
                if fresh && saves {
                    self.tiers.want_saved(entry.names[block]);
                }
            }
            residence.named = ready;
        }
    }
}
