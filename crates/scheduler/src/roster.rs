//! The live requests, the slots, and the ordered sets of requests with a slot.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Bound, Index, IndexMut};

use forebay_kvcache::Namer;

use crate::config::SchedulerConfig;
use crate::entry::{Entry, Residence, Stage};
use crate::request::{Key, Request};
use crate::retirement::{Retirement, check_leases};
use crate::slab::{Handle, Slab};

/// All live requests, by handle.
#[derive(Debug)]
pub(crate) struct Roster {
    pub(crate) requests: Slab<Entry>,
    by_id: HashMap<u64, Handle>,
    next_arrival: i64,
    /// The arrival number of the next request that goes before all new ones
    /// ([`crate::request::Past::goes_first`]). It is below 0 and grows.
    next_return: i64,

    slots: u32,
    max_running: u32,
    pub(crate) free_slots: Vec<u32>,
    pub(crate) retired: Retirement<u32>,

    /// All requests with a slot.
    pub(crate) residents: BTreeMap<Key, Handle>,
    /// The residents in prefill.
    pub(crate) prefills: BTreeMap<Key, Handle>,
    /// The residents whose blocks are being restored from the host tier.
    pub(crate) arriving: BTreeMap<Key, Handle>,
    /// The residents in decode, in the order of their rows.
    pub(crate) decodes: Vec<Handle>,
}

impl Roster {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        Self {
            requests: Slab::new(),
            by_id: HashMap::new(),
            next_arrival: 0,
            next_return: i64::MIN,
            slots: config.slots,
            max_running: config.max_running,
            free_slots: (0..config.slots).rev().collect(),
            retired: Retirement::default(),
            residents: BTreeMap::new(),
            prefills: BTreeMap::new(),
            arriving: BTreeMap::new(),
            decodes: Vec::new(),
        }
    }

    /// Adds a request. It has no slot yet.
    pub(crate) fn add(&mut self, request: Request, rank: i64, namer: &Namer) -> Handle {
        let counter =
            if request.past.goes_first() { &mut self.next_return } else { &mut self.next_arrival };
        let key = Key { rank, arrival: *counter };
        *counter += 1;
        let id = request.id;
        let handle = self.requests.insert(Entry::new(request, key, namer));
        let previous = self.by_id.insert(id, handle);
        debug_assert!(previous.is_none(), "two live requests with id {id}");
        handle
    }

    /// Removes a request that has no slot. `None`: it was removed already.
    pub(crate) fn remove(&mut self, handle: Handle) -> Option<Entry> {
        let entry = self.requests.remove(handle)?;
        debug_assert!(entry.residence.is_none(), "it has been retired");
        self.by_id.remove(&entry.request.id);
        Some(entry)
    }

    pub(crate) fn find(&self, id: u64) -> Option<Handle> {
        self.by_id.get(&id).copied()
    }

    /// True if another request may run. `probe`: whether that is a health check.
    pub(crate) fn has_place(&self, probe: bool) -> bool {
        (self.residents.len() as u64) < u64::from(self.max_running) + u64::from(probe)
    }

    /// True if any request runs that is not background work.
    pub(crate) fn has_foreground(&self) -> bool {
        self.residents.first_key_value().is_some_and(|(key, _)| !key.is_background())
    }

    /// True if two more requests may run.
    pub(crate) fn has_two_places(&self) -> bool {
        self.residents.len() + 2 <= self.max_running as usize && self.free_slots.len() >= 2
    }

    /// Retires a slot until the result of `last_step` is applied.
    pub(crate) fn retire_slot(&mut self, last_step: u64, slot: u32) {
        self.free_slots.extend(self.retired.retire(last_step, slot));
    }

    /// Frees the slots that no step in flight names.
    pub(crate) fn free_retired(&mut self) {
        self.free_slots.extend(self.retired.take_returned());
    }

    /// Makes all slots free, because the hand died.
    pub(crate) fn free_all_slots(&mut self) {
        self.free_slots = (0..self.slots).rev().collect();
    }

    /// Makes a waiting request a resident, which waits for copies or begins its prefill.
    pub(crate) fn move_in(&mut self, handle: Handle, residence: Residence) {
        let entry = &mut self.requests[handle];
        let set = match residence.stage {
            Stage::Arriving(_) => &mut self.arriving,
            _ => &mut self.prefills,
        };
        set.insert(entry.key, handle);
        self.residents.insert(entry.key, handle);
        entry.residence = Some(residence);
    }

    /// Moves a resident whose copies have ended into prefill.
    pub(crate) fn arrive(&mut self, handle: Handle) {
        let entry = &mut self.requests[handle];
        if let Some(residence) = &mut entry.residence {
            residence.stage = Stage::Prefill;
            self.arriving.remove(&entry.key);
            self.prefills.insert(entry.key, handle);
        }
    }

    /// The most important resident whose copies have ended, if it goes before every prefill from
    /// `from` on.
    pub(crate) fn next_arrived(&self, from: Bound<Key>) -> Option<Handle> {
        let before = self.prefills.range((from, Bound::Unbounded)).next().map(|(key, _)| key);
        let arrived = |handle: &Handle| self.requests[*handle].has_arrived();
        let (key, &handle) = self.arriving.iter().find(|(_, handle)| arrived(handle))?;
        before.is_none_or(|before| key < before).then_some(handle)
    }

    /// Notes that a resident's last known position is planned. From now on the request decodes if
    /// `decodes` is true. Otherwise it samples nothing and has no more rows.
    pub(crate) fn end_prefill(&mut self, handle: Handle, decodes: bool) {
        let entry = &mut self.requests[handle];
        if let Some(Residence { stage: stage @ Stage::Prefill, .. }) = &mut entry.residence {
            self.prefills.remove(&entry.key);
            *stage = Stage::Planned;
            if decodes {
                *stage = Stage::Decode { at: self.decodes.len() };
                self.decodes.push(handle);
            }
        }
    }

    /// Takes slot and pages from a request and returns them; `None`: the request had none. The
    /// request is no longer resident.
    pub(crate) fn take_residence(&mut self, handle: Handle) -> Option<Residence> {
        let entry = &mut self.requests[handle];
        if let Some(Stage::Prefill | Stage::Decode { .. }) = entry.stage() {
            entry.lost = entry.computed;
        }
        (entry.cached, entry.computed, entry.repeats) = (0, 0, false);
        let (key, residence) = (entry.key, entry.residence.take()?);
        self.residents.remove(&key);
        match residence.stage {
            Stage::Arriving(_) => _ = self.arriving.remove(&key),
            Stage::Prefill => _ = self.prefills.remove(&key),
            Stage::Planned => {}
            Stage::Decode { at } => {
                self.decodes.swap_remove(at);
                if let Some(&moved) = self.decodes.get(at)
                    && let Some(moved) = &mut self.requests[moved].residence
                {
                    moved.stage = Stage::Decode { at };
                }
            }
        }
        Some(residence)
    }

    /// Removes all requests, the most important first. No request may have a slot.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Entry> {
        let mut keys: Vec<_> = self.requests.iter().map(|(at, entry)| (entry.key, at)).collect();
        keys.sort_unstable_by_key(|&(key, _)| key);
        self.by_id.clear();
        keys.into_iter().filter_map(|(_, handle)| self.requests.remove(handle))
    }

    /// Checks that each request is in the right sets, and that each slot is used, retired or free
    /// exactly once.
    pub(crate) fn check(&self) -> Result<(), String> {
        let entries = || self.requests.iter().map(|(_, entry)| entry);
        let taken = entries().filter_map(|entry| entry.residence.as_ref()).map(|r| r.slot);
        let slots = taken.chain(self.retired.iter().copied()).chain(self.free_slots.clone());
        check_leases("slot", slots, self.slots, |_| 1)?;
        for (handle, entry) in self.requests.iter() {
            let (key, resident) = (&entry.key, entry.residence.is_some());
            let (mut arriving, mut prefill, mut misplaced) = (false, false, false);
            match entry.stage() {
                Some(Stage::Arriving(_)) => arriving = true,
                Some(Stage::Prefill) => prefill = true,
                Some(Stage::Decode { at }) => misplaced = self.decodes.get(*at) != Some(&handle),
                Some(Stage::Planned) | None => {}
            }
            let places = [
                ("by_id", self.find(entry.request.id) == Some(handle), true),
                ("residents", self.residents.get(key) == Some(&handle), resident),
                ("prefills", self.prefills.get(key) == Some(&handle), prefill),
                ("arriving", self.arriving.get(key) == Some(&handle), arriving),
                ("another's place among the decodes", misplaced, false),
            ];
            if let Some((place, is, _)) = places.iter().find(|(_, is, should)| is != should) {
                return Err(format!("request {} in {place}: {is}", entry.request.id));
            }
        }
        let residents = entries().filter(|entry| entry.residence.is_some()).count();
        let planned =
            entries().filter(|entry| matches!(entry.stage(), Some(Stage::Planned))).count();
        let rest = self.arriving.len() + self.prefills.len() + self.decodes.len();
        let listed = [
            ("id", self.by_id.len(), self.requests.len()),
            ("residents", self.residents.len(), residents),
            ("arriving, prefills, decodes and planned", rest + planned, residents),
        ];
        match listed.into_iter().find(|(_, listed, expected)| listed != expected) {
            None => Ok(()),
            Some((what, listed, expected)) => {
                Err(format!("{what}: {listed} listed, {expected} exist"))
            }
        }
    }
}

impl Index<Handle> for Roster {
    type Output = Entry;

    fn index(&self, handle: Handle) -> &Entry {
        &self.requests[handle]
    }
}

impl IndexMut<Handle> for Roster {
    fn index_mut(&mut self, handle: Handle) -> &mut Entry {
        &mut self.requests[handle]
    }
}
