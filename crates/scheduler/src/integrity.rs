//! Invariants that hold before and after each call.

use std::collections::HashMap;

use forebay_kvcache::ImageLease;
use forebay_protocol::Want;

use crate::request::Entry;
use crate::{FlightRow, Handle, Scheduler, State};

impl Scheduler {
    /// Walks over all state and compares. All pages and slots are accounted for. Each request's
    /// numbers agree with its tokens, its pages and the steps in flight. Each queue holds the right
    /// requests. The time is proportional to the state, so this is for idle moments and tests.
    ///
    /// # Errors
    /// The fault, in words.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.tiers.check_integrity()?;
        self.check_ownership()?;
        for (handle, entry) in self.requests.iter() {
            self.check_numbers(handle, entry)?;
            self.check_places(handle, entry)?;
        }
        let residents = self.requests.iter().filter(|(_, e)| e.state.residence().is_some()).count();
        let whole = self.requests.iter().filter(|(_, e)| matches!(e.state, State::Planned(_)));
        let planned =
            self.arriving.len() + self.prefills.len() + self.decodes.len() + whole.count();
        let listed = [
            ("id", self.by_id.len(), self.requests.len()),
            ("residents", self.residents.len(), residents),
            ("arriving, prefills, decodes and planned", planned, residents),
            ("steps", self.building.rows.len() + self.building.retired.len(), 0),
        ];
        for (what, listed, expected) in listed {
            ensure(listed == expected, || format!("{what}: {listed} listed, {expected} exist"))?;
        }
        self.check_shares()
    }

    fn check_shares(&self) -> Result<(), String> {
        let mut counts = HashMap::new();
        for &handle in self.residents.values() {
            *counts.entry(self.requests[handle].request.client).or_default() += 1;
        }
        let listed = self.shares.counts();
        ensure(*listed == counts, || format!("shares: {listed:?} listed, {counts:?} exist"))?;
        let promised = self.shares.promised();
        let waits = promised.is_none_or(|ticket| self.queue.contains(&ticket));
        ensure(waits, || format!("{promised:?} does not wait"))
    }

    /// Slots and leases of residents and retired ones are all that is missing from the pools.
    fn check_ownership(&self) -> Result<(), String> {
        let mut slots = vec![0_u32; self.config.slots as usize];
        let mut leases = vec![0_u32; self.config.pages as usize];
        let mut host = vec![0_u32; self.config.host.map_or(0, |host| host.pages) as usize];
        for &slot in &self.free_slots {
            slots[slot as usize] += 1;
        }
        let residents = self.requests.iter().filter_map(|(_, entry)| entry.state.residence());
        let retired = self.in_flight.iter().flat_map(|flight| &flight.retired);
        let owners =
            residents.map(|r| (Some(r.slot), &r.pages)).chain(retired.map(|r| (r.slot, &r.pages)));
        for (slot, pages) in owners {
            slot.into_iter().for_each(|slot| slots[slot as usize] += 1);
            pages.leases().for_each(|lease| leases[lease.page() as usize] += 1);
            pages.host.iter().for_each(|lease| host[lease.page() as usize] += 1);
        }
        self.tiers.host_leased_by_copies().for_each(|page| host[page as usize] += 1);
        for (page, &owned) in host.iter().enumerate() {
            let counted = self.tiers.host_leases(page as u32);
            let told = || format!("host page {page}: {owned} leases of {counted} exist");
            ensure(owned == counted, told)?;
        }
        self.check_images()?;
        for page in self.tiers.leased_by_copies() {
            leases[page as usize] += 1;
        }
        for (slot, &owners) in slots.iter().enumerate() {
            ensure(owners == 1, || format!("slot {slot} is in {owners} places"))?;
        }
        for (page, &owned) in leases.iter().enumerate() {
            let counted = self.tiers.hot().leases(page as u32);
            ensure(owned == counted, || format!("page {page}: {owned} leases of {counted} exist"))?;
        }
        Ok(())
    }

    /// Checks that leases of image pages belong to residents, to the tower, or to retired requests.
    fn check_images(&self) -> Result<(), String> {
        let Some(images) = &self.images else { return Ok(()) };
        let residents = self.requests.iter().filter_map(|(_, entry)| entry.state.residence());
        let retired = self.in_flight.iter().flat_map(|flight| &flight.retired);
        let owned = residents
            .flat_map(|residence| residence.images.iter().flatten())
            .chain(retired.flat_map(|retired| &retired.images))
            .chain(images.in_work());
        let mut leases = vec![0_u32; images.size() as usize];
        for page in owned.flat_map(ImageLease::pages) {
            leases[page as usize] += 1;
        }
        for (page, &owned) in leases.iter().enumerate() {
            let counted = images.leases(page as u32);
            let told = || format!("image page {page}: {owned} leases of {counted} exist");
            ensure(owned == counted, told)?;
        }
        let ahead = |(_, entry): &(Handle, &Entry)| {
            let residence = entry.state.residence();
            residence.is_some_and(|residence| residence.passed < residence.images.len())
        };
        let seeing = self.requests.iter().filter(ahead).count();
        let listed = images.seeing();
        ensure(listed == seeing, || format!("seeing: {listed} listed, {seeing} exist"))
    }

    fn check_numbers(&self, handle: Handle, entry: &Entry) -> Result<(), String> {
        let rows_of = |handle| {
            let rows = self.in_flight.iter().flat_map(|flight| &flight.rows);
            rows.filter(move |row| row.handle == handle)
        };
        let pending = rows_of(handle).filter(|row| row.want.samples()).count() as u32;
        let (cached, computed, total) = (entry.cached, entry.computed, entry.total);
        let told = || {
            format!(
                "request {}: {cached} cached, {computed} computed, {total} total",
                entry.request.id
            )
        };
        ensure(cached <= computed && computed <= total && total <= entry.limit, told)?;
        ensure(entry.known() + pending == total, || {
            format!("{}, {} known, {pending} in flight", told(), entry.known())
        })?;
        let Some(residence) = entry.state.residence() else {
            return ensure(computed == 0, || format!("{}, but it owns no page", told()));
        };
        let pages = &residence.pages;
        let behind = pages.host.len() == if self.config.sparse.is_some() { pages.len() } else { 0 };
        ensure(behind, || format!("{}: pages have no page behind them", entry.request.id))?;
        let room = pages.len() as u32 * self.config.page_size;
        ensure(computed <= room || self.keeps_nothing(), || {
            format!("{}, but pages for {room}", told())
        })?;
        match entry.state {
            State::Decode { .. } => {
                ensure(computed + 1 == total, || format!("{}, but it decodes", told()))
            }
            State::Planned(_) => {
                let last = |row: &&FlightRow| row.want == Want::Vector || row.prompt.is_some();
                let ends = rows_of(handle).any(|row| last(&row) && row.end == computed);
                let goal = entry.goal();
                ensure(computed == goal && ends, || format!("{}, but all is planned", told()))
            }
            State::Arriving { .. } => {
                let (last_step, rows) = (residence.last_step, rows_of(handle).count());
                let unnamed = last_step == 0 && computed == cached;
                // Rows of an earlier stay may still be in flight.
                ensure(unnamed, || format!("{}, but it arrives, {rows} rows", told()))
            }
            State::Waiting | State::Prefill(_) => Ok(()),
        }
    }

    fn check_places(&self, handle: Handle, entry: &Entry) -> Result<(), String> {
        let key = &entry.key;
        let resident = entry.state.residence().is_some();
        let misplaced = match entry.state {
            State::Decode { at, .. } => self.decodes.get(at) != Some(&handle),
            State::Waiting | State::Arriving { .. } | State::Prefill(_) | State::Planned(_) => {
                false
            }
        };
        let prefill = matches!(entry.state, State::Prefill(_));
        let arriving = matches!(entry.state, State::Arriving { .. });
        let held = entry.request.held;
        let suspect = entry.mark().is_some() && !held;
        let places = [
            ("by_id", self.by_id.get(&entry.request.id) == Some(&handle), true),
            ("queue", self.queue.contains(&entry.ticket(handle)), !resident && !suspect && !held),
            ("suspects", self.suspects.get(key) == Some(&handle), suspect),
            ("held", held && resident, false),
            ("residents", self.residents.get(key) == Some(&handle), resident),
            ("prefills", self.prefills.get(key) == Some(&handle), prefill),
            ("arriving", self.arriving.get(key) == Some(&handle), arriving),
            ("another's place among the decodes", misplaced, false),
        ];
        for (place, is, should) in places {
            ensure(is == should, || format!("request {} in {place}: {is}", entry.request.id))?;
        }
        Ok(())
    }
}

fn ensure(fine: bool, wrong: impl FnOnce() -> String) -> Result<(), String> {
    if fine { Ok(()) } else { Err(wrong()) }
}
