//! Prefill and admission: which requests get a slot, pages and rows besides the decode rows.

use std::ops::Bound;

use crate::entry::{Residence, Stage};
use crate::memory::LeasedPages;
use crate::request::{Key, Ticket};
use crate::steps::NewStep;
use crate::words::has_words;
use crate::{Event, Handle, Scheduler};

impl Scheduler {
    /// Plans chunked prefill: prompt rows within `budget` tokens, each cut by [`Self::push_row`].
    /// Some prompts pass the first in turn ([`crate::passing`]); all others get their rows in turn.
    pub(crate) fn plan_prompts(&mut self, budget: u32, step: &mut NewStep<'_>) {
        let mut passed = std::mem::take(&mut self.passed);
        let mut budget = budget - self.plan_passing(budget, &mut passed, step);
        self.plan_prefills(&mut budget, &passed, step);
        self.admit(&mut budget, step);
        passed.clear();
        self.passed = passed;
    }

    /// Plans rows for resident prompts in the order of their turns, except those that have passed
    /// others.
    fn plan_prefills(&mut self, budget: &mut u32, passed: &[Handle], step: &mut NewStep<'_>) {
        let mut from = Bound::Unbounded;
        while *budget > 0 {
            if let Some(handle) = self.next_arrived(from, step) {
                // Admit waiting requests just before this row: if the row takes the whole budget,
                // no request is admitted after it.
                if self.admit_before(self.roster[handle].key, &mut from, budget, step) {
                    continue;
                }
                self.arrive(handle, step);
            }
            // Each prompt here either completes its prefill and leaves the map, or is stopped: by
            // the budget, by a page it lacks, by an image that is not ready, or by the room in the
            // result.
            let prefills = &self.roster.prefills;
            let Some((&key, &handle)) = prefills.range((from, Bound::Unbounded)).next() else {
                return;
            };
            // All requests from here on are background work.
            if self.waits_for_others(key) {
                return;
            }
            if self.admit_before(key, &mut from, budget, step) {
                continue;
            }
            if passed.contains(&handle) {
                from = Bound::Excluded(key);
                continue;
            }
            let entry = &self.roster[handle];
            let in_parts = entry.grows_in_prefill() || self.images.are_ahead(entry);
            let planned = if in_parts && self.memory.lacks_page(entry) {
                0
            } else {
                let most = self.images.row_limit(entry, *budget);
                self.push_row(handle, most, step)
            };
            *budget = budget.saturating_sub(planned);
            self.count_received(handle, planned);
            // Still in prefill: the row ends before the prompt, for example because the result has
            // no more room, or because a state is kept at the row's end.
            let was_cut = matches!(self.roster[handle].stage(), Some(Stage::Prefill));
            if in_parts || planned == 0 || was_cut {
                from = Bound::Excluded(key);
            }
        }
    }

    /// Admits the request whose turn it is, if it goes before `key`. `from` then moves past the
    /// admitted request.
    fn admit_before(
        &mut self,
        key: Key,
        from: &mut Bound<Key>,
        budget: &mut u32,
        step: &mut NewStep<'_>,
    ) -> bool {
        if !self.goes_before(key) {
            return false;
        }
        let Some(admitted) = self.admit_next(budget, step) else { return false };
        if !matches!(from, Bound::Excluded(last) if *last > admitted) {
            *from = Bound::Excluded(admitted);
        }
        true
    }

    /// The most important request whose blocks have been restored, if it goes before every prefill
    /// from `from` on and the plan has room for it.
    fn next_arrived(&self, from: Bound<Key>, step: &NewStep<'_>) -> Option<Handle> {
        let arrived = self.roster.next_arrived(from);
        arrived.filter(|&handle| {
            !self.waits_for_others(self.roster[handle].key) && self.has_room_in_plan(handle, step)
        })
    }

    /// True if the plan and its result have room for this request too.
    pub(crate) fn has_room_in_plan(&self, handle: Handle, step: &NewStep<'_>) -> bool {
        let entry = &self.roster[handle];
        let answers = |most| step.flight.answers_left(self.config.step_words, most);
        (!step.plan.writes_slots() || has_words(&self.config, &self.memory, step, entry))
            && entry.has_room_in_result(answers)
    }

    /// Admits waiting requests in the order of their turns, as long as the plan has room.
    fn admit(&mut self, budget: &mut u32, step: &mut NewStep<'_>) {
        while self.admit_next(budget, step).is_some() {}
    }

    /// Admits the request whose turn it is, and plans its row. `None`: it has to wait.
    fn admit_next(&mut self, budget: &mut u32, step: &mut NewStep<'_>) -> Option<Key> {
        if *budget == 0 || !self.roster.has_place(self.turns.queue.has_probe()) {
            return None;
        }
        let ticket = self.turns.next().filter(|next| !self.waits_for_others(next.key))?;
        // A prompt that must not be cut waits for a step with room for all of it, unless no step
        // has that much room.
        let most = self.memory.row_limit(self.roster[ticket.handle].total, *budget);
        let waits = most > *budget && !step.flight.rows.is_empty();
        if waits || !self.try_admit(&ticket, step) {
            return None;
        }
        if let Some(Stage::Prefill) = self.roster[ticket.handle].stage() {
            let most = self.images.row_limit(&self.roster[ticket.handle], most);
            let planned = self.push_row(ticket.handle, most, step);
            *budget = budget.saturating_sub(planned);
            self.count_received(ticket.handle, planned);
        }
        Some(ticket.key)
    }

    /// Gives a waiting request a slot and pages. Returns false if the request has to wait.
    pub(crate) fn try_admit(&mut self, ticket: &Ticket, step: &mut NewStep<'_>) -> bool {
        let (key, handle) = (ticket.key, ticket.handle);
        let entry = &self.roster[handle];
        let returns = self.returns();
        if entry.known() < entry.total
            || !self.has_room_in_plan(handle, step)
            || self.turns.is_blocked(key, returns)
            || self.holds_leaving && entry.request.leaves && !entry.request.probe
            || !self.roster.has_place(entry.request.probe)
        {
            return false;
        }
        let Some(slot) = self.roster.free_slots.pop() else { return false };
        let Some(leased) = self.memory.lease_with_prefix(&mut self.roster[handle]) else {
            self.roster.free_slots.push(slot);
            self.turns.block(key, returns);
            return false;
        };
        self.turns.admitted(ticket);
        self.move_in(handle, slot, leased, step);
        true
    }

    /// Gives a suspect a slot and pages, preempting the least important residents for them. `None`:
    /// retired slots or pages are not free yet, or the suspect has tokens in flight.
    pub(crate) fn make_room(
        &mut self,
        handle: Handle,
        events: &mut Vec<Event>,
    ) -> Option<(u32, LeasedPages)> {
        let entry = &self.roster[handle];
        if entry.known() < entry.total {
            return None;
        }
        loop {
            if self.roster.has_place(false)
                && let Some(slot) = self.roster.free_slots.pop()
            {
                if let Some(leased) = self.memory.lease_with_prefix(&mut self.roster[handle]) {
                    return Some((slot, leased));
                }
                self.roster.free_slots.push(slot);
            }
            let (_, &victim) = self.roster.residents.last_key_value()?;
            self.preempt(victim, events);
        }
    }

    /// Makes a waiting request a resident. Its slot and pages are written into the plan at once,
    /// unless it waits for copies.
    pub(crate) fn move_in(
        &mut self,
        handle: Handle,
        slot: u32,
        leased: LeasedPages,
        step: &mut NewStep<'_>,
    ) {
        let LeasedPages { pages, pending, restored, missed } = leased;
        let entry = &mut self.roster[handle];
        entry.passed = 0;
        entry.computed = entry.cached;
        // Each copy in flight keeps its own reference to the loan.
        entry.request.loan = None;
        let past = &mut entry.request.past;
        let known = std::mem::replace(&mut past.admitted, true);
        let handed = std::mem::take(&mut past.handed);
        past.returned = false;
        let replayed = known && !handed;
        let cached_tokens = if known { 0 } else { entry.cached.min(entry.prompt_len) };
        if !known && self.memory.caches(entry) {
            let from_host = restored.min(cached_tokens);
            self.counters.prefix_queries += u64::from(entry.prompt_len);
            self.counters.prefix_hits += u64::from(cached_tokens - from_host);
            self.counters.host_hits += u64::from(from_host);
            self.memory.count_state_use(entry.prompt_len, cached_tokens, missed);
        }
        if replayed {
            let lost = std::mem::take(&mut entry.lost).saturating_sub(entry.cached);
            self.counters.recomputed_tokens += u64::from(lost);
        }
        let (id, restoring) = (entry.request.id, !pending.is_empty());
        step.events.push(Event::Admitted { id, cached_tokens, replayed, restoring });
        self.turns.shares.moved_in(entry.request.client, handle);
        let stage = if restoring { Stage::Arriving(pending) } else { Stage::Prefill };
        let (images, passed, last_step) = (vec![], 0, 0);
        self.roster.move_in(handle, Residence { slot, pages, images, passed, last_step, stage });
        if !restoring {
            self.write_slot(handle, step);
        }
    }

    /// Moves a request whose blocks have been restored to the device into prefill.
    pub(crate) fn arrive(&mut self, handle: Handle, step: &mut NewStep<'_>) {
        self.roster.arrive(handle);
        step.events.push(Event::Arrived { id: self.roster[handle].request.id });
        self.write_slot(handle, step);
    }

    /// Writes a resident's slot and pages into the plan, so that it can have rows.
    fn write_slot(&mut self, handle: Handle, step: &mut NewStep<'_>) {
        let entry = &mut self.roster[handle];
        let Some(Residence { slot, pages, .. }) = &entry.residence else { return };
        step.plan.write_slot(&entry.slot(*slot));
        pages.write_tables(*slot, step.plan);
        self.memory.load_state(entry, step.flight.step, step.plan);
        self.images.begin(handle, entry, step);
    }
}
