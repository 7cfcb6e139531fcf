//! The tiers of one replica's memory, and the copies between them.
//!
//! The hot tier is the device's memory. The host tier holds blocks that outlive it there, under the same names. A *save* copies a block
//! from the hot tier to the host tier, a *restore* copies it back. Each copy has a number, its *ticket*, until the hand has reported its end.
//!
//! The rules: a copy leases its source and its target until its end is reported, whatever becomes of the requests around it. A block can be
//! found in a tier only when its copy was reported done. What was forgotten meanwhile is not published by a copy that ends later.
//! Nothing here waits: where the host tier has no page, a block is not saved.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::event::{BlockEvent, Place};
use crate::hash::{BlockHash, BuildNameHasher};
use crate::pool::{Counts, Host, Hot, Lease, PagePool};

/// Which way a block is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the hot tier to the host tier.
    Save,
    /// From the host tier to the hot tier.
    Restore,
}

/// A copy of one page, as a plan names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// Its number.
    pub ticket: u32,
    /// Which way.
    pub direction: Direction,
    /// The page in the hot tier.
    pub hot: u32,
    /// The page in the host tier.
    pub host: u32,
}

/// Where a block was found, with the right to use it.
#[derive(Debug)]
pub enum Found {
    /// On the device.
    Hot(Lease<Hot>),
    /// On its way there: the page it will be on, and the copy to wait for.
    Arriving(Lease<Hot>, u32),
    /// In the host's memory.
    Host(Lease<Host>),
}

/// What the tiers have done since there were any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moves {
    /// Blocks that reached the host tier.
    pub saved: u64,
    /// Blocks that came back from it.
    pub restored: u64,
    /// Copies that the hand could not do.
    pub failed: u64,
    /// Blocks that the device gave up and no other tier had.
    pub dropped_unsaved: u64,
    /// Blocks that were not saved, because every page of the host tier was in use.
    pub refused: u64,
}

#[derive(Debug)]
struct Copying {
    direction: Direction,
    name: BlockHash,
    hot: Lease<Hot>,
    host: Lease<Host>,
    /// Its block can be found at the target when it has ended.
    publish: bool,
    /// A plan has named it.
    sent: bool,
}

/// The pages of both tiers, and the copies under way.
#[derive(Debug)]
pub struct Tiers {
    hot: PagePool<Hot>,
    host: PagePool<Host>,
    /// By ticket. Those that no plan has named yet are in `unsent` too.
    copies: BTreeMap<u32, Copying>,
    /// The copies whose blocks can be found when they have ended.
    under_way: HashMap<BlockHash, u32, BuildNameHasher>,
    /// Restores that no plan has named yet.
    unsent: VecDeque<u32>,
    /// Blocks to save when there is time, oldest first, and the same for looking up. Some may be gone.
    wanted: VecDeque<BlockHash>,
    is_wanted: HashSet<BlockHash, BuildNameHasher>,
    saving: u32,
    /// A save has failed since a block was named last: to sweep on would go round for ever.
    sweeping_fails: bool,
    next_ticket: u32,
    moves: Moves,
    cleared: bool,
    noting: bool,
}

impl Tiers {
    /// Tiers of so many free pages each. With 0 pages of the host there is no host tier.
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
        }
    }

    /// The hot tier, to look at.
    #[must_use]
    pub fn hot(&self) -> &PagePool<Hot> {
        &self.hot
    }

    /// Pages of the host tier in each state; all 0 without one.
    #[must_use]
    pub fn host_counts(&self) -> Counts {
        self.host.counts()
    }

    /// What was done so far.
    #[must_use]
    pub fn moves(&self) -> Moves {
        self.moves
    }

    /// Copies under way: started, and not reported as ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.copies.len()
    }

    /// Whether a copy is under way, named by a plan or not yet.
    #[must_use]
    pub fn is_under_way(&self, ticket: u32) -> bool {
        self.copies.contains_key(&ticket)
    }

    /// Whether a plan has named a copy whose end was not reported.
    #[must_use]
    pub fn is_sent(&self, ticket: u32) -> bool {
        self.copies.get(&ticket).is_some_and(|copy| copy.sent)
    }

    /// Whether some page is held by a copy alone, and so is free when that copy ends.
    #[must_use]
    pub fn expects_pages(&self) -> bool {
        self.copies.values().any(|copy| self.hot.leases(copy.hot.page()) == 1)
    }

    /// Leases a hot page whose content is nobody's. Never waits for a save: what has to go goes. `None`: every page is held.
    #[must_use]
    pub fn allocate(&mut self) -> Option<Lease<Hot>> {
        let (lease, evicted) = self.hot.allocate()?;
        let lost = evicted.is_some_and(|evicted| !evicted.saved);
        self.moves.dropped_unsaved += u64::from(lost && self.host.size() > 0);
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
        {
            return Some(Found::Arriving(self.hot.join(&copy.hot), ticket));
        }
        self.host.share(name).map(Found::Host)
    }

    /// Whether a block is in the host tier only, and on no way back.
    #[must_use]
    pub fn only_on_host(&self, name: BlockHash) -> bool {
        !self.hot.contains(name) && !self.under_way.contains_key(&name) && self.host.contains(name)
    }

    /// Whether a block is in a tier, or on its way to the hot one.
    #[must_use]
    pub fn knows(&self, name: BlockHash) -> bool {
        self.hot.contains(name) || self.under_way.contains_key(&name) || self.host.contains(name)
    }

    /// Starts to bring a block back that was found in the host tier: the page it will be on, and the ticket. `None`, and the lease is
    /// given back, if every hot page is held.
    pub fn restore(&mut self, name: BlockHash, host: Lease<Host>) -> Option<(Lease<Hot>, u32)> {
        let Some(hot) = self.allocate() else {
            self.host.release(host);
            return None;
        };
        let waiter = self.hot.join(&hot);
        let ticket = self.start(Direction::Restore, name, hot, host);
        self.unsent.push_back(ticket);
        Some((waiter, ticket))
    }

    /// Says what a hot page holds. False where another page holds that block already or the page has a name.
    pub fn name(&mut self, lease: &Lease<Hot>, name: BlockHash) -> bool {
        let named = self.hot.name(lease, name);
        self.sweeping_fails &= !named;
        if named && self.host.contains(name) {
            self.hot.set_saved(name, true);
        }
        named
    }

    /// Asks for a block of the hot tier to be saved when there is time.
    pub fn want_saved(&mut self, name: BlockHash) {
        if self.host.size() == 0 || self.hot.is_saved(name) || !self.is_wanted.insert(name) {
            return;
        }
        self.wanted.push_back(name);
        if self.wanted.len() > 2 * self.hot.size() as usize {
            // Most of them are gone.
            let (hot, is_wanted) = (&self.hot, &mut self.is_wanted);
            self.wanted.retain(|&name| hot.contains(name) || !is_wanted.remove(&name));
        }
    }

    /// The next restore to tell the hand of.
    pub fn next_restore(&mut self) -> Option<PageCopy> {
        let ticket = self.unsent.pop_front()?;
        self.send(ticket)
    }

    /// Starts the next save that was asked for, unless `most` are under way.
    pub fn next_save(&mut self, most: u32) -> Option<PageCopy> {
        while self.saving < most {
            let name = self.wanted.pop_front()?;
            self.is_wanted.remove(&name);
            if let Some(copy) = self.save(name) {
                return Some(copy);
            }
        }
        None
    }

    /// Starts to save the longest unused block that is in the hot tier only, as long as fewer than `goal` hot pages can be given up
    /// without a loss, and fewer than `most` saves are under way.
    pub fn sweep(&mut self, goal: u32, most: u32) -> Option<PageCopy> {
        let enough = self.hot.spare() + self.saving >= goal;
        if enough || self.saving >= most || self.host.available() == 0 || self.sweeping_fails {
            return None;
        }
        // To take the host page of a block that could itself be given up without a loss would gain nothing, for ever.
        if self.host.next_evicted().is_some_and(|name| self.hot.contains(name)) {
            return None;
        }
        self.save(self.hot.oldest_unsaved()?)
    }

    fn save(&mut self, name: BlockHash) -> Option<PageCopy> {
        if self.hot.is_saved(name) || self.under_way.contains_key(&name) {
            return None;
        }
        if self.host.available() == 0 {
            self.moves.refused += u64::from(self.hot.contains(name));
            return None;
        }
        let hot = self.hot.share(name)?;
        let Some((host, evicted)) = self.host.allocate() else {
            self.hot.release(hot);
            return None;
        };
        if let Some(evicted) = evicted {
            self.hot.set_saved(evicted.name, false);
        }
        self.saving += 1;
        let ticket = self.start(Direction::Save, name, hot, host);
        self.send(ticket)
    }

    fn start(
        &mut self,
        direction: Direction,
        name: BlockHash,
        hot: Lease<Hot>,
        host: Lease<Host>,
    ) -> u32 {
        let ticket = self.next_ticket;
        // It has 31 bits on the wire. No copy is under way for two billion others.
        self.next_ticket = (ticket + 1) & i32::MAX.cast_unsigned();
        self.under_way.insert(name, ticket);
        let copy = Copying { direction, name, hot, host, publish: true, sent: false };
        self.copies.insert(ticket, copy);
        ticket
    }

    fn send(&mut self, ticket: u32) -> Option<PageCopy> {
        let copy = self.copies.get_mut(&ticket)?;
        copy.sent = true;
        let Copying { direction, hot, host, .. } = copy;
        Some(PageCopy { ticket, direction: *direction, hot: hot.page(), host: host.page() })
    }

    /// The hand has reported the end of a copy. False: there is no such copy.
    pub fn ended(&mut self, ticket: u32, fine: bool) -> bool {
        let Some(copy) = self.copies.remove(&ticket) else { return false };
        let Copying { direction, name, hot, host, publish, .. } = copy;
        if self.under_way.get(&name) == Some(&ticket) {
            self.under_way.remove(&name);
        }
        self.saving -= u32::from(direction == Direction::Save);
        match (direction, fine) {
            (Direction::Save, true) => {
                self.moves.saved += 1;
                if publish && self.host.name(&host, name) {
                    self.hot.set_saved(name, true);
                }
            }
            (Direction::Restore, true) => {
                self.moves.restored += 1;
                if publish {
                    self.name(&hot, name);
                }
            }
            (_, false) => {
                self.moves.failed += 1;
                self.sweeping_fails |= direction == Direction::Save;
                if direction == Direction::Restore && publish {
                    // Nobody knows which side is to blame. What was not read once is not tried again.
                    self.host.forget(name);
                    self.hot.set_saved(name, false);
                }
            }
        }
        self.hot.release(hot);
        self.host.release(host);
        true
    }

    /// Gives a lease back.
    pub fn release(&mut self, lease: Lease<Hot>) {
        self.hot.release(lease);
    }

    /// Gives back a lease of the host tier that was found and is not needed.
    pub fn release_host(&mut self, lease: Lease<Host>) {
        self.host.release(lease);
    }

    /// Gives back the leases of one request, the deepest first ([`PagePool::release_all`]).
    pub fn release_all(&mut self, leases: &mut Vec<Lease<Hot>>) {
        self.hot.release_all(leases);
    }

    /// A request with these leading blocks was here: its first block is the last one that a tier gives up.
    pub fn touch(&mut self, names: &[BlockHash]) {
        for &name in names.iter().rev() {
            self.hot.touch(name);
            self.host.touch(name);
        }
    }

    /// Whether a block is being saved, or will be.
    #[must_use]
    pub fn will_be_saved(&self, name: BlockHash) -> bool {
        self.under_way.contains_key(&name) || self.is_wanted.contains(&name)
    }

    /// Forgets a block in every tier, because its content cannot be trusted. Copies of it that end later publish nothing.
    pub fn forget(&mut self, name: BlockHash) {
        self.hot.forget(name);
        self.host.forget(name);
        if let Some(ticket) = self.under_way.remove(&name)
            && let Some(copy) = self.copies.get_mut(&ticket)
        {
            copy.publish = false;
        }
    }

    /// Forgets every block that nobody leases but copies, in all tiers. True: nothing is left.
    pub fn flush(&mut self) -> bool {
        for name in std::mem::take(&mut self.under_way).into_keys() {
            self.host.forget(name);
            self.hot.set_saved(name, false);
        }
        for copy in self.copies.values_mut() {
            copy.publish = false;
            if self.hot.leases(copy.hot.page()) == 1 {
                self.hot.forget(copy.name);
            }
        }
        self.wanted.clear();
        self.is_wanted.clear();
        self.hot.flush();
        // What requests still use on the device is not to be found on the host either.
        self.host.flush();
        self.hot.unsave_all();
        self.note_cleared()
    }

    /// The hand died: the hot tier and all copies are gone with it. Every other lease of the hot tier must be back. The host tier stays,
    /// but for what was being restored if copies are to `blame`: whoever tried that again would lose the next hand too.
    pub fn hand_died(&mut self, blame: bool) {
        for (_, copy) in std::mem::take(&mut self.copies) {
            if blame && copy.sent && copy.direction == Direction::Restore {
                self.host.forget(copy.name);
            }
            self.hot.release(copy.hot);
            self.host.release(copy.host);
        }
        self.under_way.clear();
        self.unsent.clear();
        self.wanted.clear();
        self.is_wanted.clear();
        self.saving = 0;
        self.hot.flush();
        self.note_cleared();
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

    /// Has the tiers note from now on which blocks they get and lose. Whoever asks must take them.
    pub fn note_events(&mut self) {
        self.noting = true;
        self.hot.note_changes();
        self.host.note_changes();
    }

    /// Appends what was noted since the last time.
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

    /// Hot pages that copies lease, once for each.
    pub fn leased_by_copies(&self) -> impl Iterator<Item = u32> {
        self.copies.values().map(|copy| copy.hot.page())
    }

    /// Walks over everything: both pools, each copy's pages, and which blocks are in both tiers. For idle moments and tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.hot.check_integrity()?;
        self.host.check_integrity()?;
        let mut leased = vec![0_u32; self.host.size() as usize];
        for copy in self.copies.values() {
            leased[copy.host.page() as usize] += 1;
        }
        for (page, &leases) in leased.iter().enumerate() {
            let counted = self.host.leases(page as u32);
            if leases != counted {
                return Err(format!("host page {page}: {counted} leases, {leases} copies"));
            }
        }
        for name in self.hot.names() {
            if self.hot.is_saved(name) != self.host.contains(name) {
                return Err(format!("{name:?} is saved, or is not, against what its page says"));
            }
        }
        let saves = self.copies.values().filter(|copy| copy.direction == Direction::Save).count();
        if saves != self.saving as usize {
            return Err(format!("{saves} saves under way, {} counted", self.saving));
        }
        let unsent: Vec<u32> = self.copies.iter().filter(|c| !c.1.sent).map(|c| *c.0).collect();
        let mut listed = Vec::from(self.unsent.clone());
        listed.sort_unstable();
        if unsent != listed {
            return Err(format!("restores {unsent:?} are to be sent, {listed:?} are listed"));
        }
        for (name, ticket) in &self.under_way {
            let known = self.copies.get(ticket).is_some_and(|c| c.publish && c.name == *name);
            if !known {
                return Err(format!("{name:?} is not under way as copy {ticket}"));
            }
        }
        Ok(())
    }
}
