//! The tiers of one replica's memory, and the copies between them.
//!
//! The hot tier is the device's memory. The host tier keeps blocks longer, under the same names. A
//! *save* copies a block from the hot tier to the host tier, a *restore* copies it back. Each copy
//! has a number, its *ticket*, until the hand has reported its end.
//!
//! The rules: a copy leases its source and its target until its end is reported, even if its
//! request ends first. A block can be found in a tier only after its copy was reported as done. A
//! copy does not publish a block that was forgotten meanwhile. Nothing here waits: if the host tier
//! has no page, a block is not saved.
//!
//! In *backed* tiers ([`Tiers::backed`]) every hot page of a request has a page of the host tier
//! from the start. The hot page can then be given up while the request continues; `backed` has the
//! rules.
//!
//! Kept states of recurrent layers have separate tiers ([`Tiers::of_states`]), with the same rules.
//! Their pages are state pages, and the state after a block has the block's name.

mod backed;
mod copies;
mod loans;

pub use backed::BackedBlock;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use forebay_protocol::Direction;

use crate::event::{BlockEvent, Place};
use crate::hash::{BlockHash, BuildNameHasher};
use crate::pool::{Counts, Host, Hot, Lease, PagePool};
use backed::BackedTiers;
use copies::Copying;
use loans::Loans;

/// The tier of a found block, with the lease of its page.
#[derive(Debug)]
pub enum Found {
    /// The block is on the device.
    Hot(Lease<Hot>),
    /// The block is being restored to this page. The number is the ticket of the copy.
    Arriving(Lease<Hot>, u32),
    /// The block is in the host's memory.
    Host(Lease<Host>),
}

/// Counts of the tiers' work since their start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moves {
    /// Blocks that reached the host tier.
    pub saved: u64,
    /// Blocks that came back from the host tier.
    pub restored: u64,
    /// Copies that failed in the hand.
    pub failed: u64,
    /// The number of blocks that the device dropped and no other tier had.
    pub dropped_unsaved: u64,
    /// Blocks that were not saved, because every page of the host tier was in use.
    pub refused: u64,
}

/// The pages of both tiers, and the copies in flight.
#[derive(Debug)]
pub struct Tiers {
    hot: PagePool<Hot>,
    host: PagePool<Host>,
    /// The copies by ticket. Restores that no plan has named yet are in `unsent` too.
    copies: BTreeMap<u32, Copying>,
    /// By block, the ticket of the copy after which the block can be found.
    under_way: HashMap<BlockHash, u32, BuildNameHasher>,
    /// Restores that no plan has named yet.
    unsent: VecDeque<u32>,
    /// The blocks of requested saves, oldest first, and the same blocks as a set. Some of them may
    /// have been evicted.
    wanted: VecDeque<BlockHash>,
    is_wanted: HashSet<BlockHash, BuildNameHasher>,
    saving: u32,
    /// True if a save has failed since the last block was named. Further sweeps would repeat that
    /// save for ever.
    sweeping_fails: bool,
    next_ticket: u32,
    moves: Moves,
    cleared: bool,
    noting: bool,
    backed: Option<BackedTiers>,
    /// True if the pages are state pages.
    of_states: bool,
    loans: Loans,
}

impl Tiers {
    /// Creates tiers of `hot_pages` and `host_pages` free pages. 0 host pages: there is no host
    /// tier.
    #[must_use]
    pub fn new(hot_pages: u32, host_pages: u32) -> Self {
        Self {
            hot: PagePool::new(hot_pages),
            host: PagePool::new(host_pages),
            copies: BTreeMap::new(),
            under_way: HashMap::default(),
            unsent: VecDeque::new(),
            wanted: VecDeque::new(),
            is_wanted: HashSet::default(),
            saving: 0,
            sweeping_fails: false,
            next_ticket: 0,
            moves: Moves::default(),
            cleared: false,
            noting: false,
            backed: None,
            of_states: false,
            loans: Loans::default(),
        }
    }

    /// Creates tiers of `pages` and `host_pages` free state pages. Their copies have a separate
    /// range of tickets.
    #[must_use]
    pub fn of_states(pages: u32, host_pages: u32) -> Self {
        Self { of_states: true, ..Self::new(pages, host_pages) }
    }

    /// The hot tier, for reads.
    #[must_use]
    pub fn hot(&self) -> &PagePool<Hot> {
        &self.hot
    }

    /// Pages of the host tier in each state; all 0 without one.
    #[must_use]
    pub fn host_counts(&self) -> Counts {
        self.host.counts()
    }

    /// Counts of the tiers' work so far.
    #[must_use]
    pub fn moves(&self) -> Moves {
        self.moves
    }

    /// The number of copies under way: started, and not reported as ended yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.copies.len()
    }

    /// True if a copy is under way, named by a plan or not yet.
    #[must_use]
    pub fn is_under_way(&self, ticket: u32) -> bool {
        self.copies.contains_key(&ticket)
    }

    /// True if a plan has named a copy whose end is not reported yet.
    #[must_use]
    pub fn is_sent(&self, ticket: u32) -> bool {
        self.copies.get(&ticket).is_some_and(|copy| copy.sent)
    }

    /// True if some page is leased only by copies. It becomes free when they end.
    #[must_use]
    pub fn expects_pages(&self) -> bool {
        self.copies_of_pages().iter().any(|(&page, &copies)| self.hot.leases(page) == copies)
    }

    /// Leases a hot page without content. It never waits for a save, so it may evict an unsaved
    /// block. `None`: every page is held.
    #[must_use]
    pub fn allocate(&mut self) -> Option<Lease<Hot>> {
        let (lease, evicted) = self.hot.allocate()?;
        if let Some(lost) = evicted.filter(|evicted| !evicted.saved) {
            self.moves.dropped_unsaved += u64::from(self.host.size() > 0);
            self.lost_unsaved(lost.name);
        }
        self.begin_page(&lease);
        Some(lease)
    }

    /// Finds a block and leases the page that holds it.
    pub fn find(&mut self, name: BlockHash) -> Option<Found> {
        if let Some(lease) = self.hot.share(name) {
            return Some(Found::Hot(lease));
        }
        if let Some(&ticket) = self.under_way.get(&name)
            && let Some(copy) = self.copies.get(&ticket)
            && copy.direction == Direction::Restore
            && let Some(hot) = &copy.hot
        {
            return Some(Found::Arriving(self.hot.join(hot), ticket));
        }
        self.host.share(name).map(Found::Host)
    }

    /// True if a block is only in the host tier, and no copy restores it.
    #[must_use]
    pub fn only_on_host(&self, name: BlockHash) -> bool {
        !self.hot.contains(name) && !self.under_way.contains_key(&name) && self.host.contains(name)
    }

    /// True if the host tier holds a block.
    #[must_use]
    pub fn is_on_host(&self, name: BlockHash) -> bool {
        self.host.contains(name)
    }

    /// True if a block is in a tier, or is being restored to the hot tier.
    #[must_use]
    pub fn knows(&self, name: BlockHash) -> bool {
        self.hot.contains(name) || self.under_way.contains_key(&name) || self.host.contains(name)
    }

    /// Names the block of a hot page. Returns false if another page holds that block already, or if
    /// the page already has a name.
    pub fn name(&mut self, lease: &Lease<Hot>, name: BlockHash) -> bool {
        let named = self.hot.name(lease, name);
        self.sweeping_fails &= !named;
        if named && self.host.contains(name) {
            self.hot.set_saved(name, true);
        }
        named
    }

    /// Gives a lease back.
    pub fn release(&mut self, lease: Lease<Hot>) {
        self.hot.release(lease);
    }

    /// Gives back a lease of the host tier from [`Self::find`] that is not needed.
    pub fn release_host(&mut self, lease: Lease<Host>) {
        self.host.release(lease);
    }

    /// Notes that a request used these leading blocks. Of these, the first block is evicted last.
    pub fn touch(&mut self, names: &[BlockHash]) {
        for &name in names.iter().rev() {
            self.hot.touch(name);
            self.host.touch(name);
        }
    }

    /// Forgets a block in every tier, because its content cannot be trusted. Its copies publish
    /// nothing when they end.
    pub fn forget(&mut self, name: BlockHash) {
        self.hot.forget(name);
        self.host.forget(name);
        for direction in [Direction::Restore, Direction::RestoreIndex] {
            if let Some(ticket) = self.moving(direction).remove(&name)
                && let Some(copy) = self.copies.get_mut(&ticket)
            {
                copy.publish = false;
            }
        }
    }

    /// Forgets every block, in all tiers, that has no lease or only leases of copies. Returns true
    /// if no block is left.
    pub fn flush(&mut self) -> bool {
        if self.backed.is_some() {
            self.flush_backed();
            return self.note_cleared();
        }
        for name in std::mem::take(&mut self.under_way).into_keys() {
            self.host.forget(name);
            self.hot.set_saved(name, false);
        }
        let copies = self.copies_of_pages();
        for copy in self.copies.values_mut() {
            copy.publish = false;
            if let (Some(hot), Some(name)) = (&copy.hot, copy.name)
                && self.hot.leases(hot.page()) == copies[&hot.page()]
            {
                self.hot.forget(name);
            }
        }
        self.wanted.clear();
        self.is_wanted.clear();
        self.hot.flush();
        // Pages that requests still use on the device must not be found in the host tier either.
        self.forget_lent();
        self.host.flush();
        self.hot.unsave_all();
        self.note_cleared()
    }

    /// Clears the hot tier and all copies, because the hand died. All leases of the hot tier except
    /// those of copies must have been given back. The host tier stays. If copies are to `blame`,
    /// blocks that were being restored are forgotten, since another try would kill the next hand
    /// too.
    pub fn hand_died(&mut self, blame: bool) {
        self.index_is_gone();
        for (_, copy) in std::mem::take(&mut self.copies) {
            if let Some(name) = copy.name
                && blame
                && copy.sent
                && copy.direction != Direction::Save
                && copy.host.own().is_some()
            {
                self.host.forget(name);
            }
            copy.hot.into_iter().for_each(|hot| self.hot.release(hot));
            self.release_source(copy.host);
        }
        self.under_way.clear();
        self.unsent.clear();
        self.wanted.clear();
        self.is_wanted.clear();
        self.saving = 0;
        self.hot.flush();
        self.note_cleared();
    }

    /// Continues the counts and tickets of earlier tiers of other sizes. The earlier tiers must
    /// have no lease, and their blocks are lost.
    pub fn go_on_from(&mut self, earlier: &Self) {
        self.moves = earlier.moves;
        self.next_ticket = earlier.next_ticket;
        self.lend_as(earlier);
        if earlier.noting {
            self.note_events();
            self.cleared = true;
        }
    }

    fn note_cleared(&mut self) -> bool {
        let empty = self.hot.blocks() + self.host.blocks() == 0;
        if empty && self.noting {
            self.hot.take_changes();
            self.host.take_changes();
            self.cleared = true;
        }
        empty
    }

    /// Starts recording which blocks the tiers get and lose. The caller has to take the events.
    pub fn note_events(&mut self) {
        self.noting = true;
        self.hot.note_changes();
        self.host.note_changes();
    }

    /// Appends the events since the last call.
    pub fn take_events(&mut self, into: &mut Vec<BlockEvent>) {
        if !self.noting {
            return;
        }
        if std::mem::take(&mut self.cleared) {
            into.push(BlockEvent::Cleared);
        }
        let mut changed: Vec<BlockHash> = self.hot.take_changes().collect();
        changed.extend(self.host.take_changes());
        into.extend(changed.into_iter().map(|name| {
            match (self.hot.contains(name), self.host.contains(name)) {
                (true, false) => BlockEvent::Stored(name, Place::Device),
                (false, true) => BlockEvent::Stored(name, Place::Host),
                (true, true) => BlockEvent::Stored(name, Place::Both),
                (false, false) => BlockEvent::Dropped(name),
            }
        }));
    }

    /// Iterates over the hot pages that copies lease, once per lease.
    pub fn leased_by_copies(&self) -> impl Iterator<Item = u32> {
        self.copies.values().filter_map(|copy| copy.hot.as_ref()).map(Lease::page)
    }

    /// The number of copies that lease each hot page. It can be two: a save that began before a
    /// flush, and one that began after it.
    fn copies_of_pages(&self) -> BTreeMap<u32, u32> {
        let mut copies = BTreeMap::new();
        self.leased_by_copies().for_each(|page| *copies.entry(page).or_default() += 1);
        copies
    }

    /// Iterates over the host pages that copies lease, once per lease.
    pub fn host_leased_by_copies(&self) -> impl Iterator<Item = u32> {
        self.copies.values().filter_map(|copy| copy.host.own()).map(Lease::page)
    }

    /// Checks both pools, the pages of each copy, and the blocks that are in both tiers. For idle
    /// moments and tests.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.hot.check_integrity()?;
        self.host.check_integrity()?;
        let mut leased = vec![0_u32; self.host.size() as usize];
        for page in self.host_leased_by_copies().chain(self.host_leased_by_loans()) {
            leased[page as usize] += 1;
        }
        self.check_loans()?;
        for (page, &leases) in leased.iter().enumerate() {
            let counted = self.host.leases(page as u32);
            // In backed tiers requests lease host pages too.
            if leases != counted && !(self.backed.is_some() && leases < counted) {
                return Err(format!(
                    "host page {page}: {counted} leases, {leases} of copies and loans"
                ));
            }
        }
        for name in self.hot.names() {
            let (saved, on_host) = (self.hot.is_saved(name), self.host.contains(name));
            if (saved || self.backed.is_some()) != on_host {
                return Err(format!("{name:?} is saved, or is not, against what its page says"));
            }
        }
        let saves = self.copies.values();
        let saves = saves.filter(|c| c.direction == Direction::Save && c.span.is_none()).count();
        if saves != self.saving as usize {
            return Err(format!("{saves} saves under way, {} counted", self.saving));
        }
        let unsent: Vec<u32> = self.copies.iter().filter(|c| !c.1.sent).map(|c| *c.0).collect();
        let mut listed = Vec::from(self.unsent.clone());
        listed.sort_unstable();
        if unsent != listed {
            return Err(format!("restores {unsent:?} are to be sent, {listed:?} are listed"));
        }
        let indexing = self.backed.iter().flat_map(BackedTiers::indexed);
        for (name, ticket) in self.under_way.iter().chain(indexing) {
            let known = self.copies.get(ticket).is_some_and(|c| c.publish && c.name == Some(*name));
            if !known {
                return Err(format!("{name:?} is not under way as copy {ticket}"));
            }
        }
        Ok(())
    }
}
