//! Invariants of memory.

use super::{Kind, Memory};
use crate::entry::Entry;
use crate::roster::Roster;

impl Memory {
    /// Checks that the leases of residents, of retired pages and of copies are all that is missing
    /// from the pools.
    pub(crate) fn check(&self, roster: &Roster) -> Result<(), String> {
        self.tiers.check_integrity()?;
        let host_pages = self.host.map_or(0, |host| host.pages);
        let mut hot = vec![0_u32; self.pages as usize];
        let mut host = vec![0_u32; host_pages as usize];
        let residents = roster.iter().filter_map(|(_, entry)| entry.state.residence());
        for pages in residents.map(|residence| &residence.pages).chain(self.retired.iter()) {
            pages.leases().for_each(|lease| hot[lease.page() as usize] += 1);
            pages.host.iter().for_each(|lease| host[lease.page() as usize] += 1);
        }
        self.tiers.leased_by_copies().for_each(|page| hot[page as usize] += 1);
        self.tiers.host_leased_by_copies().for_each(|page| host[page as usize] += 1);
        let hot = hot
            .iter()
            .zip(0..)
            .map(|(&owned, page)| (format!("page {page}"), owned, self.tiers.hot().leases(page)));
        let host = host.iter().zip(0..).map(|(&owned, page)| {
            (format!("host page {page}"), owned, self.tiers.host_leases(page))
        });
        match hot.chain(host).find(|(_, owned, counted)| owned != counted) {
            None => Ok(()),
            Some((page, owned, counted)) => {
                Err(format!("{page}: {owned} leases of {counted} exist"))
            }
        }
    }

    /// Checks that a resident has the pages that its positions are in.
    pub(crate) fn check_pages(&self, entry: &Entry) -> Result<(), String> {
        let (id, computed) = (entry.request.id, entry.computed);
        let Some(residence) = entry.state.residence() else { return Ok(()) };
        let count = residence.pages.len();
        let behind = if let Kind::Backed(_) = self.kind { count } else { 0 };
        if residence.pages.host.len() != behind {
            return Err(format!("request {id}: pages have no page behind them"));
        }
        let room = count as u32 * self.page_size;
        if computed > room && !matches!(self.kind, Kind::Nothing) {
            return Err(format!("request {id}: {computed} computed, but pages for {room}"));
        }
        Ok(())
    }
}
