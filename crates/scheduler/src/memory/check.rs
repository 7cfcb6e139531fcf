//! Invariants of memory.

use forebay_kvcache::Lease;

use super::pages::Pages;
use super::{Kind, Memory};
use crate::entry::Entry;
use crate::retirement::check_leases;
use crate::roster::Roster;

impl Memory {
    /// Checks that the leased pages of the pools are exactly the pages of residents, the retired
    /// pages and the pages of copies.
    pub(crate) fn check(&self, roster: &Roster) -> Result<(), String> {
        self.tiers.check_integrity()?;
        let residents = || roster.requests.iter().filter_map(|(_, entry)| entry.residence.as_ref());
        let pages = || residents().map(|residence| &residence.pages).chain(self.retired.iter());
        let hot = pages().flat_map(Pages::leases).map(Lease::page);
        let hot = hot.chain(self.tiers.leased_by_copies());
        let host = pages().flat_map(|pages| &pages.host).map(Lease::page);
        let host = host.chain(self.tiers.host_leased_by_copies());
        let host = host.chain(self.tiers.host_leased_by_loans());
        let host_pages = self.host.map_or(0, |host| host.pages);
        check_leases("page", hot, self.pages, |page| self.tiers.hot().leases(page))?;
        self.states.as_ref().map_or(Ok(()), |states| states.check(residents()))?;
        self.windows.as_ref().map_or(Ok(()), |windows| windows.check(pages()))?;
        check_leases("host page", host, host_pages, |page| self.tiers.host_leases(page))
    }

    /// Checks that a resident has pages for all its positions.
    pub(crate) fn check_pages(&self, entry: &Entry) -> Result<(), String> {
        let (id, computed) = (entry.request.id, entry.computed);
        let Some(residence) = entry.residence.as_ref() else { return Ok(()) };
        let count = residence.pages.len();
        let behind = if let Kind::Backed(_) = self.kind { count } else { 0 };
        if residence.pages.host.len() != behind {
            return Err(format!("request {id}: pages have no page behind them"));
        }
        let room = residence.pages.reach() * self.page_size;
        if computed > room && !matches!(self.kind, Kind::Nothing) {
            return Err(format!("request {id}: {computed} computed, but pages for {room}"));
        }
        Ok(())
    }
}
