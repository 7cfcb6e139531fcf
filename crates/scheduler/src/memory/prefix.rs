//! The prefix cache at admission: the blocks that a request finds in the tiers, and the new pages
//! after them.

use std::collections::VecDeque;

use forebay_kvcache::{BlockHash, Found, Loan};

use super::pages::Pages;
use super::states::StatePages;
use super::{Kind, Memory};
use crate::config::SavePolicy;
use crate::entry::Entry;
use crate::roster::Roster;
use crate::turns::Turns;

/// The pages of a request that is admitted.
#[derive(Default)]
pub(crate) struct LeasedPages {
    pub(crate) pages: Pages,
    /// Copies that the request waits for.
    pub(crate) pending: VecDeque<u32>,
    /// The number of positions that these copies restore.
    pub(crate) restored: u32,
    /// Cached positions that are computed again, because no state is kept after them or the window
    /// part lacks their pages.
    pub(crate) missed: u32,
}

/// A cached block that a request reuses.
enum Block {
    /// The block is in a tier of this replica.
    Here(Found),
    /// The block is in the host tier of another replica, which has lent it to the request.
    Lent,
}

impl Block {
    /// True if the block is not on the device.
    fn is_away(&self) -> bool {
        matches!(self, Self::Here(Found::Host(_)) | Self::Lent)
    }
}

/// The leading blocks of a request that are in the tiers.
#[derive(Default)]
struct Prefix {
    /// The blocks that the request reuses.
    found: Vec<Block>,
    /// The number of blocks after which the request could continue if nothing were restored.
    here: usize,
    /// The number of all cached blocks. The request may be unable to continue after the last ones.
    cached: usize,
    /// True if the request recomputes some blocks, because that is cheaper than restoring them.
    declined: bool,
}

impl Memory {
    /// Looks up the prefix of a request, and leases pages for all its known tokens and, if it
    /// generates, the next one. The first pages hold the request's leading blocks, some only once
    /// copies have ended; `entry.cached` counts the positions of these blocks. New pages follow. If
    /// there are too few pages, returns `None` and leases nothing.
    pub(crate) fn lease_with_prefix(&mut self, entry: &mut Entry) -> Option<LeasedPages> {
        // From here on the request needs its own copy of its tokens.
        entry.settle();
        let mut leased = match self.kind {
            Kind::Nothing => LeasedPages::default(),
            Kind::Paged => self.lease_paged(entry)?,
            Kind::Backed(sparse) => self.lease_backed(entry, sparse)?,
        };
        leased.pages.named = entry.cached / self.page_size;
        self.host_counters.restores_chosen += u64::from(leased.restored > 0);
        leased.restored *= self.page_size;
        Some(leased)
    }

    /// The number of leading positions of a waiting request that are in a tier now, as far as its
    /// blocks are named. The number at its admission may differ.
    pub(crate) fn expected_prefix(&self, entry: &Entry) -> u32 {
        if !self.caches(entry) {
            return 0;
        }
        let names = entry.known_names();
        let most = (entry.reusable() / self.page_size) as usize;
        // Later blocks are dropped before earlier ones, so a binary search finds the end.
        let knows = |&name: &BlockHash| self.tiers.knows(name) || entry.is_lent(name);
        let found = names[..most.min(names.len())].partition_point(knows);
        let loan = entry.request.loan.as_deref();
        self.resumable(&names[..found], true, loan) as u32 * self.page_size
    }

    /// The number of pages for all known tokens of a request and the next one.
    pub(super) fn pages_for(&self, entry: &Entry) -> usize {
        (entry.known() + u32::from(entry.generates())).div_ceil(self.page_size) as usize
    }

    fn lease_paged(&mut self, entry: &mut Entry) -> Option<LeasedPages> {
        let count = self.pages_for(entry);
        let Prefix { found, here, cached, declined } = self.find_prefix(entry);
        let new = count - found.iter().filter(|block| !block.is_away()).count();
        if (self.tiers.hot().available() as usize) < new {
            self.free_found(found);
            return None;
        }
        let (mut leased, mut brought) = (LeasedPages::default(), 0);
        if let Some(windows) = &mut self.windows {
            let window = windows.lease(&entry.blocks.names[..found.len()], count);
            if window.is_none() {
                self.free_found(found);
                return None;
            }
            leased.pages.window = window;
            leased.missed = (cached - found.len()) as u32 * self.page_size;
        }
        if self.states.is_some() {
            leased.missed = (cached - found.len()) as u32 * self.page_size;
            if let Some((state, ticket)) = self.lease_state(entry, found.len(), cached) {
                leased.pages.state = Some(state);
                brought = ticket.map_or(0, |_| found.len() - here);
                leased.pending.extend(ticket);
            }
        }
        leased.pages.hot.reserve_exact(count);
        for (found, &name) in found.into_iter().zip(&entry.blocks.names) {
            let (lease, ticket) = match found {
                Block::Here(Found::Hot(lease)) => (Some(lease), None),
                Block::Here(Found::Arriving(lease, ticket)) => (Some(lease), Some(ticket)),
                Block::Here(Found::Host(lease)) => self.tiers.restore(name, lease).unzip(),
                Block::Lent => {
                    let loan = entry.request.loan.as_ref();
                    loan.and_then(|loan| self.tiers.borrow(name, loan)).unzip()
                }
            };
            leased.pages.hot.push(lease);
            leased.restored += u32::from(ticket.is_some());
            leased.pending.extend(ticket);
        }
        // Blocks on the device cannot be used before their state is restored.
        leased.restored = leased.restored.max(brought as u32);
        entry.cached = leased.pages.len() as u32 * self.page_size;
        if declined {
            self.host_counters.restores_declined += 1;
            self.rates.declined();
        }
        leased.pages.hot.resize_with(count, || self.tiers.allocate());
        Some(leased)
    }

    /// Looks up a request's prefix cache hit: its leading blocks in the tiers, and their state.
    /// Leaves out blocks that are cheaper to compute than to restore. With recurrent layers, the
    /// prefix ends at the last kept state. With a window part, it ends where that part has the
    /// pages that the next row reads.
    fn find_prefix(&mut self, entry: &mut Entry) -> Prefix {
        if !self.caches(entry) {
            return Prefix::default();
        }
        let selective =
            self.host.is_some_and(|host| host.policy == SavePolicy::WriteThroughSelective);
        // Without a host tier a plan has no copies.
        let loan = entry.request.loan.clone().filter(|_| self.host.is_some());
        let (recomputes, handed) = (self.recomputes(entry), entry.request.past.handed);
        let blocks = (entry.reusable() / self.page_size) as usize;
        let mut found = Vec::new();
        let names = entry.name_blocks(blocks, self.page_size as usize, &self.namer);
        let (cached, names) = self.useful_blocks(names, !recomputes, loan.as_deref());
        for &name in names {
            let lent = loan.as_ref().is_some_and(|loan| loan.page(name).is_some());
            let block = match self.tiers.find(name) {
                None if lent => Block::Lent,
                None => break,
                Some(Found::Host(lease)) if recomputes => {
                    self.tiers.release_host(lease);
                    break;
                }
                Some(block) => Block::Here(block),
            };
            if selective && matches!(block, Block::Here(Found::Hot(_))) {
                self.tiers.want_saved(name);
            }
            found.push(block);
        }
        // `found` lacks the blocks that are computed again, so the last usable state may be an
        // earlier one.
        let resumable = self.resumable(&names[..found.len()], !recomputes, loan.as_deref());
        let rest = found.split_off(resumable);
        self.free_found(rest);
        let away = found.iter().filter(|block| block.is_away()).count() as u32;
        let first_away = found.iter().position(Block::is_away).unwrap_or(found.len());
        let here = self.resumable(&names[..first_away], false, None);
        let tokens = (found.len() - here) as u32 * self.page_size;
        let last = found.len().checked_sub(1).map(|last| names[last]);
        let of_state = |states: &StatePages| last.map_or(0, |name| states.cost(name));
        let cost = away + self.states.as_ref().map_or(0, of_state);
        // The prefill replica has computed these blocks for this replica, which must not compute
        // them again.
        let declined = cost > 0 && !handed && !self.rates.restores(cost, tokens);
        if declined {
            let rest = found.split_off(here);
            self.free_found(rest);
        }
        Prefix { here, cached: cached.max(found.len()), found, declined }
    }

    /// Counts the leading blocks that are in a tier, on their way to a tier, or lent. Also returns
    /// the longest prefix of these blocks after which a request can continue. Without `brings`,
    /// only blocks on the device count for that prefix.
    fn useful_blocks<'a>(
        &self,
        names: &'a [BlockHash],
        brings: bool,
        loan: Option<&Loan>,
    ) -> (usize, &'a [BlockHash]) {
        if self.states.is_none() && self.windows.is_none() {
            return (0, names);
        }
        let is_lent = |name| loan.is_some_and(|loan| loan.page(name).is_some());
        let knows = |&&name: &&BlockHash| self.tiers.knows(name) || is_lent(name);
        let cached = names.iter().take_while(knows).count();
        (cached, &names[..self.resumable(&names[..cached], brings, loan)])
    }

    /// True if the request computes its blocks again instead of restoring them.
    fn recomputes(&self, entry: &Entry) -> bool {
        entry.request.past.admitted && self.host.is_some_and(|host| !host.restore_preempted)
    }

    /// Frees the leases of blocks that were found, the last block first.
    fn free_found(&mut self, found: Vec<Block>) {
        for found in found.into_iter().rev() {
            match found {
                Block::Here(Found::Hot(lease) | Found::Arriving(lease, _)) => {
                    self.tiers.release(lease);
                }
                Block::Here(Found::Host(lease)) => self.tiers.release_host(lease),
                Block::Lent => {}
            }
        }
    }

    /// Restores the prefixes of the next requests. Takes only pages that no earlier request needs.
    /// Such a page is free, or its block is in another tier too.
    pub(crate) fn prefetch_prefixes(&mut self, roster: &mut Roster, turns: &Turns) {
        let Some(host) = self.host.filter(|host| host.prefetch > 0) else { return };
        debug_assert!(matches!(self.kind, Kind::Paged), "backed pages restore no index keys here");
        let page_size = self.page_size;
        if !self.rates.restores(1, page_size) {
            return;
        }
        // Keep one page for each running request: pages that restores lease are unavailable until
        // the copies end.
        let mut room = self.tiers.hot().spare().saturating_sub(roster.residents.len() as u32);
        for ticket in turns.queue.upcoming(host.prefetch as usize) {
            let entry = &mut roster[ticket.handle];
            let pages = entry.total.div_ceil(page_size);
            if room == 0 {
                return;
            }
            let embeds = entry.request.spec.embeds.is_some();
            if entry.blocks.prefetched || self.recomputes(entry) || embeds {
                room = room.saturating_sub(pages);
                continue;
            }
            // Try only once, even if the room does not suffice: at a second try, the request's
            // later blocks would evict its earlier ones.
            entry.blocks.prefetched = true;
            entry.settle();
            let blocks = (entry.reusable() / page_size) as usize;
            let names = entry.name_blocks(blocks, page_size as usize, &self.namer);
            let useful = self.useful_blocks(names, true, None).1;
            if let (Some(&last), Some(states)) = (useful.last(), &mut self.states) {
                states.prefetch(last);
            }
            for &name in useful {
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
}
