//! Preemption, and the other ways in which requests lose their slot and pages.

use crate::entry::Stage;
use crate::slab::Handle;
use crate::{Event, Scheduler};

impl Scheduler {
    /// Preempts a running request: takes its slot and pages for another request. The preempted
    /// request is recomputed when its turn comes. Its named blocks stay cached as long as possible,
    /// and its tokens in flight still count.
    pub(crate) fn preempt(&mut self, handle: Handle, events: &mut Vec<Event>) {
        self.counters.preemptions += 1;
        self.send_back(handle, events);
    }

    /// Preempts all requests that have a slot. No step may be in flight. Afterwards the cache can
    /// be flushed.
    pub fn preempt_all(&mut self, events: &mut Vec<Event>) {
        debug_assert!(self.in_flight() == 0, "a step would write pages of nobody");
        let residents: Vec<Handle> = self.roster.residents.values().copied().collect();
        residents.into_iter().for_each(|handle| self.preempt(handle, events));
        self.turns.unblock();
    }

    /// Preempts the requests that wait for a failed copy. They recompute the missing blocks.
    pub(crate) fn preempt_waiters(&mut self, ticket: u32, events: &mut Vec<Event>) {
        let waits = |&handle: &Handle| {
            let stage = self.roster[handle].stage();
            matches!(stage, Some(Stage::Arriving(pending)) if pending.contains(&ticket))
        };
        let waiters: Vec<Handle> = self.roster.arriving.values().copied().filter(waits).collect();
        waiters.into_iter().for_each(|handle| self.send_back(handle, events));
    }

    /// Puts a resident back into the queue.
    fn send_back(&mut self, handle: Handle, events: &mut Vec<Event>) {
        self.retire(handle);
        self.line_up(handle);
        events.push(Event::Preempted { id: self.roster[handle].request.id });
    }

    /// Removes a request from all parts of the scheduler's state.
    pub(crate) fn remove(&mut self, handle: Handle) {
        self.retire(handle);
        self.places.leave(handle, &mut self.roster[handle]);
        if let Some(entry) = self.roster.remove(handle) {
            self.turns.leave(&entry.ticket(handle));
        }
    }

    /// Takes slot and pages from a request, if it has any, and retires them.
    pub(crate) fn retire(&mut self, handle: Handle) {
        let Some(residence) = self.roster.take_residence(handle) else { return };
        self.images.stop(&self.roster[handle], &self.roster);
        let entry = &mut self.roster[handle];
        self.memory.note_use(entry, &residence.pages);
        self.turns.shares.moved_out(entry.request.client);
        let last_step = residence.last_step;
        self.memory.retire(last_step, residence.pages);
        residence
            .images
            .into_iter()
            .flatten()
            .for_each(|lease| self.images.retire(last_step, lease));
        self.roster.retire_slot(last_step, residence.slot);
    }

    /// Notes that the result of a step has come, so that slots and pages named last by this step
    /// may be freed.
    pub(crate) fn answered(&mut self, step: u64) {
        self.memory.answered(step);
        self.images.retired.answered(step);
        self.roster.retired.answered(step);
    }

    /// Frees slots and KV pages that no step in flight names.
    pub(crate) fn free_retired(&mut self) {
        self.memory.free_retired();
        self.images.free_retired();
        self.roster.free_retired();
    }

    /// Frees everything, even if steps are in flight, because the hand died or the scheduler is
    /// dropped.
    pub(crate) fn free_everything(&mut self) {
        self.turns.shares.forget_promise();
        while let Some(flight) = self.steps.in_flight.pop_front() {
            self.answered(flight.step);
            self.free_retired();
        }
        while let Some((_, &handle)) = self.roster.residents.first_key_value() {
            self.retire(handle);
        }
    }

    /// The number of retired page sets and image leases that were freed so far.
    pub(crate) fn returns(&self) -> u64 {
        self.memory.retired.returns() + self.images.retired.returns()
    }

    /// Preempts a resident in favour of the next request, if fair shares between clients require
    /// that ([`crate::turns::Turns::who_gives_way`]).
    pub(crate) fn give_way(&mut self, events: &mut Vec<Event>) {
        let (step, returns) = (self.steps.next(), self.returns());
        if let Some((victim, ticket)) = self.turns.who_gives_way(&self.roster, step, returns) {
            let lost = self.roster[victim].computed;
            let in_background = |handle: Handle| self.roster[handle].request.background;
            let is_free = in_background(victim) && !in_background(ticket.handle);
            self.preempt(victim, events);
            if is_free {
                // The waiting request is before all background work in the queue, so the next
                // admission need not be promised to it.
                self.turns.unblock();
            } else {
                self.turns.promise(ticket, step, lost);
            }
        }
    }
}
