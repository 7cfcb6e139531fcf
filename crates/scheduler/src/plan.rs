//! The rows of the next step, in this order: decoding requests, requests in the middle of prefill,
//! requests whose blocks have come back, new requests. In quarantine there is one suspect, alone.

use std::ops::Bound;

use forebay_protocol::{MAX_WAIT_US, Row, StepPlan, Want};

use crate::queue::Ticket;
use crate::request::Residence;
use crate::sparse::{save_rows, write_tables};
use crate::transfer::Leased;
use crate::view::Planned;
use crate::{Event, FlightRow, Handle, MAX_IN_FLIGHT, Scheduler, State};

impl Scheduler {
    /// Plans the next step. False: no request can run now, or all wait for results in flight.
    /// `plan` is empty then, but `events` may report preemptions. While copies are under way, there
    /// is always a plan.
    pub fn next_plan(&mut self, plan: &mut StepPlan, events: &mut Vec<Event>) -> bool {
        plan.begin(self.next_step);
        // Where a row may give several tokens, how many they were decides where the next one
        // begins. To plan for the others meanwhile would split the batch for good.
        let most = if self.config.tokens_a_row == 1 { MAX_IN_FLIGHT } else { 1 };
        if self.in_flight.len() >= most || !self.quarantine_permits() {
            return false;
        }
        self.building.step = self.next_step;
        let decodes = match self.suspects.first_key_value() {
            Some((_, &suspect)) => self.plan_suspect(suspect, plan, events),
            None => self.plan_everybody(plan, events),
        };
        // The hand executes in order, so the next plan may share what this one computes. This one
        // may not: its rows run side by side.
        for at in decodes..self.building.rows.len() {
            self.offer_blocks(self.building.rows[at].handle);
        }
        self.plan_copies(plan);
        if self.building.rows.is_empty() && !plan.has_images() {
            let asks = self.in_flight.is_empty() && self.tiers.outstanding() > 0;
            let copies = plan.copies().len() > 0 || asks;
            if !copies && !plan.writes_tables() {
                return false;
            }
            plan.wait(if copies { MAX_WAIT_US } else { 1 });
        }
        self.launch(decodes);
        true
    }

    /// Makes an empty plan, by which this scheduler takes part in the next step of its step group.
    /// It had no plan when it was asked for one, or must not have one now.
    pub fn idle_plan(&mut self, plan: &mut StepPlan) {
        plan.begin(self.next_step);
        self.building.step = self.next_step;
        self.launch(0);
    }

    /// The plan that was made is in flight; `decodes` of its rows decode.
    fn launch(&mut self, decodes: usize) {
        self.planned = Planned::of(&self.building, decodes);
        self.next_step += 1;
        let empty = self.spare.pop().unwrap_or_default();
        self.in_flight.push_back(std::mem::replace(&mut self.building, empty));
    }

    /// Plans rows for all requests with room. Gives the number of decode rows.
    fn plan_everybody(&mut self, plan: &mut StepPlan, events: &mut Vec<Event>) -> usize {
        self.give_way(events);
        self.relieve(plan);
        self.grow_decodes(plan, events);
        self.plan_decodes(plan);
        let decodes = self.building.rows.len();
        self.plan_images(None, plan, events);
        let left = self.config.token_budget.saturating_sub(decodes as u32);
        // Without the floor, enough decoding requests would starve prefill for ever.
        let mut budget = left.max(self.config.page_size);
        self.plan_prefills(&mut budget, plan, events);
        self.admit(&mut budget, plan, events);
        self.prefetch();
        decodes
    }

    /// Plans a row for a suspect and for no other request. The others wait, and keep the pages that
    /// the suspect does not need. Gives the number of decode rows.
    fn plan_suspect(
        &mut self,
        handle: Handle,
        plan: &mut StepPlan,
        events: &mut Vec<Event>,
    ) -> usize {
        let whole = if self.keeps_nothing() { u32::MAX } else { 0 };
        let budget = self.config.token_budget.max(self.config.page_size).max(whole);
        if self.requests[handle].state.residence().is_none() {
            let Some((slot, leased)) = self.make_room(handle, events) else { return 0 };
            self.move_in(handle, slot, leased, plan, events);
        }
        if self.has_arrived(handle) {
            self.arrive(handle, plan, events);
        }
        self.relieve(plan);
        if self.is_sparse(handle) && self.lacks_page(handle) {
            self.grow(handle, plan, events);
        }
        // Pages of a victim that is not in flight are back at once, and then nothing else would
        // bring the next plan.
        while !self.plan_images(Some(handle), plan, events)
            && !plan.has_images()
            && let Some(victim) = self.holds_images(handle)
        {
            self.preempt(victim, events);
        }
        match self.requests[handle].state {
            State::Prefill(_) if self.lacks_page(handle) => 0,
            State::Prefill(_) => {
                self.push_row(handle, budget, plan);
                0
            }
            State::Decode { .. } if self.requests[handle].plannable() => {
                if self.lacks_page(handle) {
                    self.grow(handle, plan, events);
                }
                let fits = matches!(self.requests[handle].state, State::Decode { .. })
                    && !self.lacks_page(handle);
                if fits { self.push_row(handle, 1, plan) as usize } else { 0 }
            }
            State::Arriving { .. } | State::Decode { .. } | State::Planned(_) | State::Waiting => 0,
        }
    }

    /// A slot and pages for a suspect, at the cost of the least important residents. `None`: they
    /// are retired, and not back yet, or tokens of its own are in flight.
    fn make_room(&mut self, handle: Handle, events: &mut Vec<Event>) -> Option<(u32, Leased)> {
        let entry = &self.requests[handle];
        if entry.known() < entry.total {
            return None;
        }
        loop {
            if (self.residents.len() as u64) < u64::from(self.config.max_running)
                && let Some(slot) = self.free_slots.pop()
            {
                if let Some(leased) = self.lease_pages(handle) {
                    return Some((slot, leased));
                }
                self.free_slots.push(slot);
            }
            let (_, &victim) = self.residents.last_key_value()?;
            self.preempt(victim, events);
        }
    }

    /// Gives a page to each decoding request whose next position begins one, the most important
    /// first.
    fn grow_decodes(&mut self, plan: &mut StepPlan, events: &mut Vec<Event>) {
        let mut needy = std::mem::take(&mut self.needy);
        let catching_up = self.prefills.values().filter(|&&handle| self.is_sparse(handle));
        for &handle in self.decodes.iter().chain(catching_up) {
            let entry = &self.requests[handle];
            if entry.plannable() && self.lacks_page(handle) {
                needy.push((entry.key, handle));
            }
        }
        needy.sort_unstable();
        for (_, handle) in needy.drain(..) {
            // The ones before it may have had to take its pages.
            if self.requests[handle].state.residence().is_some() {
                self.grow(handle, plan, events);
            }
        }
        self.needy = needy;
    }

    /// Gives a page to a request, preempting the least important residents for it, in the end
    /// itself. If retired pages are on their way back, it skips this step. If copies alone hold
    /// pages, it skips too instead of preempting itself.
    fn grow(&mut self, handle: Handle, plan: &mut StepPlan, events: &mut Vec<Event>) {
        loop {
            if self.add_page(handle, plan) {
                return;
            }
            if self.in_flight.iter().any(|flight| !flight.retired.is_empty()) {
                return;
            }
            let Some((_, &victim)) = self.residents.last_key_value() else {
                return;
            };
            if self.tiers.hot().available() == 0 && self.config.sparse.is_some() {
                if self.make_sparse(plan) {
                    continue;
                }
                if self.saves_will_help() {
                    return;
                }
            }
            if victim == handle && self.awaits_pages() {
                return;
            }
            if let Some(residence) = self.requests[victim].state.residence() {
                plan.forget_slot(residence.slot);
            }
            self.preempt(victim, events);
            if victim == handle {
                return;
            }
        }
    }

    /// Gives a page to a request, if there is one.
    fn add_page(&mut self, handle: Handle, plan: &mut StepPlan) -> bool {
        let (lease, host) = match self.config.sparse {
            None => (self.tiers.allocate(), None),
            Some(_) => self.tiers.allocate_backed().unzip(),
        };
        let Some(lease) = lease else { return false };
        if let Some(Residence { slot, pages, .. }) = self.requests[handle].state.residence_mut() {
            let index = pages.len() as u32;
            plan.write_page(*slot, index, lease.page());
            pages.hot.push(Some(lease));
            host.iter().for_each(|host| plan.write_host(*slot, index, host.page()));
            pages.host.extend(host);
        } else {
            self.tiers.release(lease);
            host.into_iter().for_each(|host| self.tiers.release_host(host));
        }
        true
    }

    /// True if pages come back when copies end.
    fn awaits_pages(&self) -> bool {
        match self.config.sparse {
            None => self.tiers.expects_pages(),
            Some(_) => self.tiers.outstanding() > 0,
        }
    }

    fn lacks_page(&self, handle: Handle) -> bool {
        let entry = &self.requests[handle];
        let pages = entry.state.residence().map_or(0, |residence| residence.pages.len() as u32);
        entry.computed >= pages * self.config.page_size && !self.keeps_nothing()
    }

    fn plan_decodes(&mut self, plan: &mut StepPlan) {
        for at in 0..self.decodes.len() {
            let handle = self.decodes[at];
            if self.requests[handle].plannable() && !self.lacks_page(handle) {
                self.push_row(handle, 1, plan);
            }
        }
    }

    fn plan_prefills(&mut self, budget: &mut u32, plan: &mut StepPlan, events: &mut Vec<Event>) {
        let mut from = Bound::Unbounded;
        while *budget > 0 {
            if let Some(handle) = self.next_arrival(from, plan) {
                self.arrive(handle, plan, events);
            }
            // Each is either done with its prefill and leaves the map, or takes all that is left of
            // the budget, or it is sparse, or it waits for an image, or the result has no room for
            // more of what it gives.
            let Some((&key, &handle)) = self.prefills.range((from, Bound::Unbounded)).next() else {
                return;
            };
            if !self.is_sparse(handle) && !self.is_seeing(handle) {
                let planned = self.push_row(handle, *budget, plan);
                *budget -= planned;
                if planned == 0 {
                    from = Bound::Excluded(key);
                }
                continue;
            }
            if !self.lacks_page(handle) {
                *budget -= self.push_row(handle, *budget, plan);
            }
            from = Bound::Excluded(key);
        }
    }

    fn admit(&mut self, budget: &mut u32, plan: &mut StepPlan, events: &mut Vec<Event>) {
        while *budget > 0 && self.has_place() {
            let Some(ticket) = self.next_candidate() else {
                return;
            };
            let (key, handle) = (ticket.key, ticket.handle);
            let entry = &self.requests[handle];
            if entry.known() < entry.total {
                return;
            }
            // A prompt that must not be cut waits for a step with room for all of it, unless it is
            // longer than any has.
            let whole = self.keeps_nothing() && entry.total > *budget;
            if whole && !self.building.rows.is_empty() {
                return;
            }
            if plan.writes_slots() && !self.has_words_for(handle, plan) {
                return;
            }
            if !self.has_room_in_result(handle) {
                return;
            }
            if self.blocked == Some(key) || !self.may_run(handle) {
                return;
            }
            let Some(slot) = self.free_slots.pop() else {
                return;
            };
            let Some(leased) = self.lease_pages(handle) else {
                self.free_slots.push(slot);
                self.blocked = Some(key);
                self.shares.changed();
                return;
            };
            self.queue.admitted(&ticket);
            self.move_in(handle, slot, leased, plan, events);
            if let State::Arriving { .. } = self.requests[handle].state {
                continue;
            }
            let most = if self.keeps_nothing() { u32::MAX } else { *budget };
            *budget = budget.saturating_sub(self.push_row(handle, most, plan));
        }
    }

    /// True if one more may run, if it is the right one.
    fn has_place(&self) -> bool {
        let (running, most) = (self.residents.len() as u64, u64::from(self.config.max_running));
        running < most || (running == most && self.queue.has_probe())
    }

    /// True if one more may run, if it is this one.
    pub(crate) fn may_run(&self, handle: Handle) -> bool {
        let most =
            u64::from(self.config.max_running) + u64::from(self.requests[handle].request.probe);
        (self.residents.len() as u64) < most
    }

    /// The waiting request whose turn it is. No request overtakes it.
    pub(crate) fn next_candidate(&self) -> Option<Ticket> {
        self.shares.promised().or_else(|| self.queue.first())
    }

    /// Makes a waiting request a resident. Unless it has to wait for copies, slot and pages are
    /// written into the plan.
    fn move_in(
        &mut self,
        handle: Handle,
        slot: u32,
        leased: Leased,
        plan: &mut StepPlan,
        events: &mut Vec<Event>,
    ) {
        let Leased { pages, pending, restored } = leased;
        let page_size = self.config.page_size;
        let entry = &mut self.requests[handle];
        entry.computed = entry.cached;
        let named = entry.cached / page_size;
        let residence =
            Residence { slot, pages, settled: 0, named, images: vec![], passed: 0, last_step: 0 };
        let replayed = std::mem::replace(&mut entry.request.past.admitted, true);
        let cached_tokens = if replayed { 0 } else { entry.cached.min(entry.prompt_len) };
        let cacheable = self.config.prefix_cache && entry.request.spec.embeds.is_none();
        if !replayed && cacheable && self.config.pages > 0 {
            let from_host = (restored * page_size).min(cached_tokens);
            self.counters.prefix_queries += u64::from(entry.prompt_len);
            self.counters.prefix_hits += u64::from(cached_tokens - from_host);
            self.counters.host_hits += u64::from(from_host);
        }
        if replayed {
            let lost = std::mem::take(&mut entry.lost).saturating_sub(entry.cached);
            self.counters.recomputed_tokens += u64::from(lost);
        }
        let (id, restoring) = (entry.request.id, !pending.is_empty());
        events.push(Event::Admitted { id, cached_tokens, replayed, restoring });
        self.residents.insert(entry.key, handle);
        self.shares.moved_in(entry.request.client, handle);
        if restoring {
            entry.state = State::Arriving { residence, pending };
            self.arriving.insert(entry.key, handle);
        } else {
            self.begin_prefill(handle, residence, plan, events);
        }
    }

    /// Writes slot and pages of a resident into the plan: from here on it has rows.
    pub(crate) fn begin_prefill(
        &mut self,
        handle: Handle,
        mut residence: Residence,
        plan: &mut StepPlan,
        events: &mut Vec<Event>,
    ) {
        plan.write_slot(&self.requests[handle].slot(residence.slot));
        write_tables(&residence, plan);
        self.see_images(handle, &mut residence, plan, events);
        let entry = &mut self.requests[handle];
        entry.state = State::Prefill(residence);
        self.prefills.insert(entry.key, handle);
    }

    /// Plans up to `most` of a resident's positions. Gives their number. The row that reaches
    /// `total` samples, and then the request decodes. A pooled request has no further rows then.
    fn push_row(&mut self, handle: Handle, most: u32, plan: &mut StepPlan) -> u32 {
        let most = most.min(self.visible(handle)).min(self.permitted(handle));
        // The positions that one row chooses have room in the hot rows, those of several may not.
        let most = if self.is_sparse(handle) { most.min(1) } else { most };
        let (start, goal) = (self.requests[handle].computed, self.requests[handle].goal());
        let length = self.room_in_result(handle, most.min(goal - start));
        if length == 0 {
            return 0;
        }
        let end = start + length;
        let slot = self.requests[handle].state.residence().map_or(0, |residence| residence.slot);
        let prompt = self.wanted_of(handle, slot, (start, end));
        let entry = &mut self.requests[handle];
        let pools = entry.pools();
        let pages = entry.state.residence().map_or(0, |residence| residence.pages.len() as u32);
        let want = if end < entry.total {
            Want::Nothing
        } else if pools {
            Want::Vector
        } else if entry.request.masked {
            Want::Masked
        } else if self.config.tokens_a_row == 1 {
            Want::TOKEN
        } else {
            // The positions of all tokens but the last are computed too, and need pages.
            let room = (pages * self.config.page_size - end).min(entry.limit - end - 1);
            Want::Tokens(self.config.tokens_a_row.min(1 + room))
        };
        entry.computed = end;
        entry.total += u32::from(want.samples());
        // What a row that sat out has computed was saved with it.
        let fresh = start + u32::from(std::mem::take(&mut entry.repeats));
        let Some(residence) = entry.state.residence_mut() else {
            return 0;
        };
        residence.last_step = self.building.step;
        if self.config.sparse.is_some_and(|sparse| sparse.save_rows) {
            save_rows(&mut self.tiers, &residence.pages, fresh..end, self.config.page_size, plan);
        }
        plan.push_row(Row { slot, start, length, want });
        prompt.into_iter().for_each(|want| plan.want_prompt_logprobs(want));
        self.building.rows.push(FlightRow { handle, start, end, want, prompt, sits_out: false });
        self.building.sampled += usize::from(want.samples());
        self.building.pooled += usize::from(want == Want::Vector);
        if end == goal {
            entry.state = match std::mem::replace(&mut entry.state, State::Waiting) {
                State::Prefill(residence) => {
                    self.prefills.remove(&entry.key);
                    if !want.samples() {
                        State::Planned(residence)
                    } else {
                        self.decodes.push(handle);
                        State::Decode { residence, at: self.decodes.len() - 1 }
                    }
                }
                other => other,
            };
        }
        self.pass_images(handle);
        length
    }
}
