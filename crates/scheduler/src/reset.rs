//! The death of the hand, and the search for the request that killed it.
//!
//! Each request that had a row in flight when the hand died is a *suspect*. Suspects are replayed
//! first, one at a time and alone in flight (*quarantine*). A suspect's turn lasts until it is past
//! the position that it had reached before, or has ended. Other residents keep their pages and have
//! no rows meanwhile. If the hand dies again, the suspect that was in flight alone is *poisoned*
//! and is given up. So no request is given up for another's fault, and each that is given up was in
//! flight at two deaths. Suspects stay suspects if another replica takes the requests over.

use crate::entry::Entry;
use crate::{Request, Scheduler};

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
    /// wait to be replayed from their prompt and known tokens. Poisoned requests are removed
    /// without an event. Returns the ids of the poisoned requests.
    pub fn reset(&mut self) -> Vec<u64> {
        // If no row was in flight, only a copy can be to blame.
        self.start_again(if self.computes() { Blame::Requests } else { Blame::Copies })
    }

    /// Resets after the hand was given up because no copy ended. So copies are to blame. No request
    /// becomes a suspect, and blocks that were being restored are forgotten.
    pub fn reset_for_copies(&mut self) {
        self.start_again(Blame::Copies);
    }

    /// Resets after a death for which nothing in flight is to blame: memory ran out, or the hand
    /// was stopped. No request becomes a suspect.
    pub fn reset_without_blame(&mut self) {
        self.start_again(Blame::Nothing);
    }

    fn start_again(&mut self, blame: Blame) -> Vec<u64> {
        let mut poisoned = Vec::new();
        let mut marks = Vec::new();
        if blame == Blame::Requests {
            for (handle, end) in self.steps.work() {
                match self.roster.requests.get(handle) {
                    None => {}
                    Some(entry) if entry.mark().is_some() => poisoned.push(handle),
                    Some(_) => marks.push((handle, end)),
                }
            }
        }
        poisoned.sort_unstable();
        poisoned.dedup();
        let in_flight = self.steps.in_flight.iter_mut();
        let read: Vec<u32> = in_flight.flat_map(|flight| flight.read.drain(..)).collect();
        self.free_everything();
        self.memory.hand_died(blame == Blame::Copies);
        self.images.hand_died(read);
        self.turns.unblock();
        self.roster.free_all_slots();
        self.empty_places();
        let poisoned = poisoned
            .into_iter()
            .map(|handle| {
                let id = self.roster[handle].request.id;
                self.remove(handle);
                id
            })
            .collect();
        for (handle, end) in marks {
            let mark = &mut self.roster[handle].request.past.suspect;
            *mark = Some(mark.map_or(end, |mark| mark.max(end)));
        }
        self.leaving.clear();
        for (handle, entry) in self.roster.requests.iter_mut() {
            // A request that was leaving has lost the positions that were not saved. So it is
            // computed here again.
            entry.leaving = false;
            entry.total = entry.known();
            if entry.request.held {
                continue;
            }
            if self.places.enter(handle, entry) {
                self.turns.line_up_again(handle, entry, &self.memory);
            } else {
                self.turns.leave(&entry.ticket(handle));
            }
        }
        poisoned
    }

    /// True if the next plan may be made. In quarantine it waits while any request but the suspect
    /// in turn has a row in flight.
    pub(crate) fn quarantine_permits(&self) -> bool {
        let alone = |suspect| self.steps.work().all(|(handle, _)| handle == suspect);
        self.turns.suspect().is_none_or(alone)
    }

    /// True if a request is suspected of the hand's death. If schedulers share the hand, only one
    /// at a time may then have a plan with rows in flight.
    #[must_use]
    pub fn is_suspected(&self) -> bool {
        self.turns.suspect().is_some()
    }

    /// Removes all live requests and returns them for another scheduler, the most important first.
    /// No step may be in flight: call it after [`Self::reset`], or before the first step.
    pub fn surrender(&mut self) -> Vec<Request> {
        debug_assert!(self.in_flight() == 0, "results would come for nobody");
        self.free_everything();
        self.empty_places();
        self.turns.clear();
        self.leaving.clear();
        let with_place = |mut request: Request| {
            request.past.returned = request.past.handed;
            request
        };
        self.roster.take_all().map(Entry::into_request).map(with_place).collect()
    }
}
