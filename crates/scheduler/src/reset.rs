//! The death of the hand, and the search for the request that killed it.
//!
//! Each request that had a row in flight when the hand died is a *suspect*. Suspects are replayed
//! first, one at a time and alone in flight (*quarantine*). A suspect's turn lasts until it is past
//! the position that it had reached before, or has ended. Other residents keep their pages and have
//! no rows meanwhile. If the hand dies again, the suspect in flight was alone. It is then
//! *poisoned*, and is given up. So no request is given up for the fault of another, and none before
//! its second death in flight. If another replica takes the requests over, suspects stay suspects
//! there.

use crate::request::Entry;
use crate::{Flight, FlightRow, Request, Scheduler};

/// The cause of the hand's death, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blame {
    /// One of the requests in flight.
    Requests,
    /// A copy between tiers.
    Copies,
    /// Nothing that was in flight.
    Nothing,
}

impl Scheduler {
    /// Forgets the device's state and the steps in flight, because the hand died. Live requests
    /// wait to be replayed from their prompt and the known tokens. Gives the ids of poisoned
    /// requests. These are removed and have no event.
    pub fn reset(&mut self) -> Vec<u64> {
        // With no row in flight it can only have been a copy.
        self.start_again(if self.computes() { Blame::Requests } else { Blame::Copies })
    }

    /// Resets after a death for which copies are to blame, because none of them ended. No request
    /// becomes a suspect, and blocks that were being restored are forgotten.
    pub fn reset_for_copies(&mut self) {
        self.start_again(Blame::Copies);
    }

    /// Resets after a death for which nothing in flight is to blame, because memory ran out. No
    /// request becomes a suspect.
    pub fn reset_for_memory(&mut self) {
        self.start_again(Blame::Nothing);
    }

    fn start_again(&mut self, blame: Blame) -> Vec<u64> {
        if blame != Blame::Requests {
            for flight in &mut self.in_flight {
                flight.rows.clear();
                flight.towers.clear();
            }
        }
        let mut poisoned = Vec::new();
        let mut marks: Vec<_> = Vec::new();
        for (handle, end) in self.in_flight.iter().flat_map(|flight| {
            let rows = flight.rows.iter().map(|row| (row.handle, row.end));
            rows.chain(flight.towers.iter().map(|image| (image.handle, image.end)))
        }) {
            match self.requests.get(handle) {
                None => {}
                Some(entry) if entry.mark().is_some() => poisoned.push(handle),
                Some(_) => marks.push((handle, end)),
            }
        }
        poisoned.sort_unstable();
        poisoned.dedup();
        let read: Vec<u32> =
            self.in_flight.iter_mut().flat_map(|flight| flight.read.drain(..)).collect();
        self.release_everything();
        self.tiers.hand_died(blame == Blame::Copies);
        if let Some(images) = &mut self.images {
            images.hand_died(read.into_iter());
        }
        self.unfinished.clear();
        self.blocked = None;
        self.free_slots = (0..self.config.slots).rev().collect();
        let poisoned = poisoned
            .into_iter()
            .map(|handle| {
                let id = self.requests[handle].request.id;
                self.remove(handle);
                id
            })
            .collect();
        for (handle, end) in marks {
            let mark = &mut self.requests[handle].request.past.suspect;
            *mark = Some(mark.map_or(end, |mark| mark.max(end)));
        }
        for (handle, entry) in self.requests.iter_mut() {
            entry.total = entry.known();
            let ticket = entry.ticket(handle);
            if entry.request.held {
                continue;
            }
            if entry.mark().is_some() {
                self.queue.remove(&ticket);
                self.suspects.insert(entry.key, handle);
            } else if !self.queue.contains(&ticket) {
                self.queue.insert(ticket, entry.request.past.admitted);
            }
        }
        poisoned
    }

    /// True if the next plan may be made: in quarantine only while no request but the suspect whose
    /// turn it is has a row in flight.
    pub(crate) fn quarantine_permits(&self) -> bool {
        self.suspects.first_key_value().is_none_or(|(_, &suspect)| {
            self.in_flight.iter().flat_map(Flight::handles).all(|handle| handle == suspect)
        })
    }

    /// True if a request is suspected of the hand's death. Of schedulers that share a hand, one at
    /// most may then have a plan with rows in flight.
    #[must_use]
    pub fn is_suspected(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// Gives all live requests away for another scheduler, the most important first. No step may be
    /// in flight. So the caller does this after [`Self::reset`], or before the first step.
    pub fn surrender(&mut self) -> Vec<Request> {
        debug_assert!(self.in_flight.is_empty(), "results would come for nobody");
        self.release_everything();
        let mut keys: Vec<_> = self.requests.iter().map(|(at, entry)| (entry.key, at)).collect();
        keys.sort_unstable_by_key(|&(key, _)| key);
        self.by_id.clear();
        self.queue.clear();
        self.suspects.clear();
        let taken = keys.into_iter().filter_map(|(_, handle)| self.requests.remove(handle));
        taken.map(Entry::surrender).collect()
    }

    /// Clears a suspect that has got past its mark.
    pub(crate) fn clear_suspect(&mut self, row: &FlightRow) {
        let entry = &mut self.requests[row.handle];
        if entry.mark().is_none_or(|mark| row.end < mark) {
            return;
        }
        entry.request.past.suspect = None;
        let (key, resident) = (entry.key, entry.state.residence().is_some());
        self.suspects.remove(&key);
        if !resident {
            self.enqueue(row.handle);
        }
    }
}
