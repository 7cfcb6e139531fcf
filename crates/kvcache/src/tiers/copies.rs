//! Copies between the tiers: requested copies, copies in plans, and the results of copies.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_protocol::{Direction, PageCopy, Span};

use super::Tiers;
use crate::hash::{BlockHash, BuildNameHasher};
use crate::loan::Loan;
use crate::pool::{Host, Hot, Lease};

/// Tickets of state copies start here, so that they differ from those of all other copies. A ticket
/// has 31 bits on the wire.
const STATE_TICKETS: u32 = 1 << 30;

/// The host page of a copy.
#[derive(Debug)]
pub(super) enum HostPage {
    /// A page of these tiers.
    Own(Lease<Host>),
    /// A page of another replica's tiers. The page keeps its content while the loan exists.
    Lent { loan: Arc<Loan>, page: u32 },
}

impl HostPage {
    fn page(&self) -> u32 {
        match self {
            Self::Own(lease) => lease.page(),
            Self::Lent { page, .. } => *page,
        }
    }

    /// The lease, if the page belongs to these tiers.
    pub(super) fn own(&self) -> Option<&Lease<Host>> {
        match self {
            Self::Own(lease) => Some(lease),
            Self::Lent { .. } => None,
        }
    }

    /// The lender, if the page belongs to another replica.
    fn lender(&self) -> Option<u32> {
        match self {
            Self::Own(_) => None,
            Self::Lent { loan, .. } => Some(loan.lender()),
        }
    }
}

/// A copy whose end was not reported yet.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) direction: Direction,
    /// The block; `None`: rows of a page that is not full.
    pub(super) name: Option<BlockHash>,
    pub(super) hot: Option<Lease<Hot>>,
    pub(super) host: HostPage,
    pub(super) span: Option<Span>,
    /// True if the block can be found at the target after the copy.
    pub(super) publish: bool,
    /// True if a plan has named the copy.
    pub(super) sent: bool,
}

impl Tiers {
    /// Starts to restore a block that was found in the host tier. Returns its new page, and the
    /// ticket. If every hot page is held, returns `None` and gives the lease back.
    pub fn restore(&mut self, name: BlockHash, host: Lease<Host>) -> Option<(Lease<Hot>, u32)> {
        let Some(hot) = self.allocate() else {
            self.host.release(host);
            return None;
        };
        let waiter = self.hot.join(&hot);
        let ticket = self.start(Direction::Restore, Some(name), Some(hot), HostPage::Own(host));
        self.unsent.push_back(ticket);
        Some((waiter, ticket))
    }

    /// Requests a save of a block of the hot tier, for a later time.
    pub fn want_saved(&mut self, name: BlockHash) {
        if self.host.size() == 0 || self.hot.is_saved(name) || !self.is_wanted.insert(name) {
            return;
        }
        self.wanted.push_back(name);
        if self.wanted.len() > 2 * self.hot.size() as usize {
            // Usually, most of the queued blocks are no longer on the device. Drop these.
            let (hot, is_wanted) = (&self.hot, &mut self.is_wanted);
            self.wanted.retain(|&name| hot.contains(name) || !is_wanted.remove(&name));
        }
    }

    /// The next restore for a plan.
    pub fn next_restore(&mut self) -> Option<PageCopy> {
        let ticket = self.unsent.pop_front()?;
        self.send(ticket)
    }

    /// Starts the next requested save, unless `most` saves are under way.
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

    /// Starts to save the least recently used block that is only in the hot tier, unless `goal` hot
    /// pages are free or saved already, or `most` saves are in flight.
    pub fn sweep(&mut self, goal: u32, most: u32) -> Option<PageCopy> {
        let enough = self.hot.spare() + self.saving >= goal;
        if enough || self.saving >= most || self.host.available() == 0 || self.sweeping_fails {
            return None;
        }
        // Saving a block now would evict the host page of a block that is also on the device. The
        // evicted block would then be unsaved, so nothing would be gained, and the next sweep would
        // repeat it.
        if self.host.next_evicted().is_some_and(|name| self.hot.contains(name)) {
            return None;
        }
        self.save(self.hot.oldest_unsaved()?)
    }

    fn save(&mut self, name: BlockHash) -> Option<PageCopy> {
        if self.hot.is_saved(name) || self.under_way.contains_key(&name) {
            return None;
        }
        if self.backed.is_some() {
            return self.save_backed(name);
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
        let host = HostPage::Own(host);
        let ticket = self.start(Direction::Save, Some(name), Some(hot), host);
        self.send(ticket)
    }

    pub(super) fn start(
        &mut self,
        direction: Direction,
        name: Option<BlockHash>,
        hot: Option<Lease<Hot>>,
        host: HostPage,
    ) -> u32 {
        let ticket = self.next_ticket + if self.of_states { STATE_TICKETS } else { 0 };
        // Tickets wrap around, but no copy stays in flight while a billion others start.
        self.next_ticket = (self.next_ticket + 1) % STATE_TICKETS;
        if let Some(name) = name {
            self.moving(direction).insert(name, ticket);
        }
        let copy = Copying { direction, name, hot, host, span: None, publish: true, sent: false };
        self.copies.insert(ticket, copy);
        ticket
    }

    pub(super) fn send(&mut self, ticket: u32) -> Option<PageCopy> {
        let copy = self.copies.get_mut(&ticket)?;
        copy.sent = true;
        let hot = copy.hot.as_ref().map(Lease::page);
        let &mut Copying { direction, ref host, span, .. } = copy;
        let direction = match direction {
            Direction::Save if self.of_states => Direction::SaveState,
            Direction::Restore if self.of_states => Direction::RestoreState,
            other => other,
        };
        let (page, lender) = (host.page(), host.lender());
        Some(PageCopy { ticket, direction, hot, host: page, span, lender })
    }

    /// The tickets of the copies in this direction, by block.
    pub(super) fn moving(
        &mut self,
        direction: Direction,
    ) -> &mut HashMap<BlockHash, u32, BuildNameHasher> {
        match (direction, &mut self.backed) {
            (Direction::RestoreIndex, Some(backed)) => backed.indexing(),
            _ => &mut self.under_way,
        }
    }

    /// Ends a copy whose end the hand has reported. `fine`: the copy succeeded. Returns false if no
    /// copy has this ticket.
    pub fn ended(&mut self, ticket: u32, fine: bool) -> bool {
        let Some(copy) = self.copies.remove(&ticket) else { return false };
        let Copying { direction, name, hot, host, span, publish, .. } = copy;
        if let Some(name) = name
            && self.moving(direction).get(&name) == Some(&ticket)
        {
            self.moving(direction).remove(&name);
        }
        self.saving -= u32::from(direction == Direction::Save && span.is_none());
        self.moves.failed += u64::from(!fine);
        let name = name.filter(|_| publish);
        if let Some(hot) = hot.as_ref().filter(|_| direction == Direction::Save) {
            self.note_save(hot, span.is_none(), fine);
        }
        match (direction, fine, &hot) {
            (Direction::Save, _, Some(hot)) if span.is_some() => {
                span.into_iter().for_each(|span| self.rows_left(hot, span, fine));
            }
            (Direction::Save, true, _) => {
                host.own().into_iter().for_each(|host| self.was_saved(name, host));
            }
            (Direction::Save, false, _) => self.sweeping_fails = true,
            (Direction::Restore, true, Some(hot)) => {
                self.moves.restored += 1;
                if let Some(name) = name {
                    self.came_back(hot, name);
                    // Borrowed content is kept like computed content, and may be lent in turn.
                    if host.own().is_none() {
                        self.want_saved(name);
                    }
                }
            }
            (Direction::RestoreIndex, true, _) => self.index_is_there(host.page()),
            // The fault may be on either side. A failed block is not tried again.
            (Direction::Restore | Direction::RestoreIndex, false, _) => {
                name.into_iter().for_each(|name| self.not_readable(name));
            }
            (Direction::Restore, true, None) => {}
            // Only plans use these variants: here a state is saved and restored like a block.
            (Direction::SaveState | Direction::RestoreState, ..) => {}
        }
        hot.into_iter().for_each(|hot| self.hot.release(hot));
        self.release_source(host);
        true
    }

    /// Gives the host page of a copy back.
    pub(super) fn release_source(&mut self, host: HostPage) {
        if let HostPage::Own(lease) = host {
            self.host.release(lease);
        }
    }

    fn was_saved(&mut self, name: Option<BlockHash>, host: &Lease<Host>) {
        self.moves.saved += 1;
        if let Some(name) = name
            && (self.backed.is_some() || self.host.name(host, name))
        {
            self.hot.set_saved(name, true);
        }
    }

    fn not_readable(&mut self, name: BlockHash) {
        if self.backed.is_some() {
            return self.forget(name);
        }
        self.host.forget(name);
        self.hot.set_saved(name, false);
    }

    /// True if a block is being saved, or will be.
    #[must_use]
    pub fn will_be_saved(&self, name: BlockHash) -> bool {
        self.under_way.contains_key(&name) || self.is_wanted.contains(&name)
    }
}
