//! The way back of slots and pages. A plan in flight may read and write the slots and pages that it
//! names. So none of them returns to the pool before the result of the last step that names it was
//! applied; until then it is retired.

use crate::request::Residence;
use crate::{Event, Handle, Retired, Scheduler, State};

impl Scheduler {
    /// Takes the pages of a resident for another request. It computes them again when its turn
    /// comes. Its named blocks stay in the cache as long as possible, and tokens in flight still
    /// count.
    pub(crate) fn preempt(&mut self, handle: Handle, events: &mut Vec<Event>) {
        self.vacate(handle);
        let entry = &self.requests[handle];
        let (id, suspect) = (entry.request.id, entry.mark().is_some());
        if !suspect {
            self.enqueue(handle);
        }
        self.counters.preemptions += 1;
        events.push(Event::Preempted { id });
    }

    /// Takes slot and pages from a request, if it has any, and retires them.
    pub(crate) fn vacate(&mut self, handle: Handle) {
        let entry = &mut self.requests[handle];
        if let State::Prefill(_) | State::Decode { .. } = entry.state {
            entry.lost = entry.computed;
        }
        (entry.cached, entry.computed, entry.repeats) = (0, 0, false);
        let (key, client) = (entry.key, entry.request.client);
        let residence = match std::mem::replace(&mut entry.state, State::Waiting) {
            State::Waiting => return,
            State::Arriving { residence, .. } => {
                self.arriving.remove(&key);
                residence
            }
            State::Prefill(residence) => {
                self.prefills.remove(&key);
                residence
            }
            State::Planned(residence) => residence,
            State::Decode { residence, at } => {
                self.decodes.swap_remove(at);
                if let Some(&moved) = self.decodes.get(at)
                    && let State::Decode { at: place, .. } = &mut self.requests[moved].state
                {
                    *place = at;
                }
                residence
            }
        };
        self.requests[handle].was_sparse = residence.pages.is_sparse();
        self.stop_seeing(handle);
        self.note_use(handle, &residence);
        self.residents.remove(&key);
        self.shares.moved_out(client);
        self.retire(residence);
    }

    fn retire(&mut self, residence: Residence) {
        let Residence { slot, pages, images, last_step, .. } = residence;
        let images = images.into_iter().flatten().collect();
        self.retire_until(last_step, Retired { slot: Some(slot), pages, images });
    }

    /// Gives something back when the result of a step is applied, or now if it was.
    pub(crate) fn retire_until(&mut self, last_step: u64, retired: Retired) {
        let planned = std::iter::once(&mut self.building).filter(|_| last_step == self.next_step);
        let mut flights = self.in_flight.iter_mut().chain(planned).rev();
        match flights.find(|flight| flight.step == last_step) {
            Some(flight) => flight.retired.push(retired),
            None => self.give_back(retired),
        }
    }

    /// Returns to the pool what no step in flight names.
    pub(crate) fn give_back(&mut self, mut retired: Retired) {
        retired.pages.release(&mut self.tiers);
        if let Some(images) = &mut self.images {
            retired.images.drain(..).for_each(|lease| images.release(lease));
        }
        self.free_slots.extend(retired.slot);
        self.blocked = None;
    }

    /// Returns everything to the pool, whatever is in flight, because the device or the scheduler
    /// is gone.
    pub(crate) fn release_everything(&mut self) {
        self.shares.forget_promise();
        while let Some(flight) = self.in_flight.pop_front() {
            for retired in flight.retired {
                self.give_back(retired);
            }
        }
        while let Some((_, &handle)) = self.residents.first_key_value() {
            self.vacate(handle);
        }
    }
}
