//! The rows of the next step, in this order: decoding requests, requests in the middle of prefill,
//! requests whose blocks were restored, new requests. In quarantine a plan has rows of one suspect
//! only.

use forebay_protocol::{MAX_WAIT_US, Row, StepPlan, Want};

use crate::entry::Stage;
use crate::request::Key;
use crate::steps::{Flight, FlightRow, NewStep};
use crate::{Event, Handle, MAX_IN_FLIGHT, Scheduler};

impl Scheduler {
    /// Plans the next step. Returns false if no request can run now, or if the next plan has to
    /// wait for results in flight. `plan` is empty then, but `events` may report preemptions. If
    /// copies but no steps are in flight, there is always a plan.
    pub fn next_plan(&mut self, plan: &mut StepPlan, events: &mut Vec<Event>) -> bool {
        plan.begin(self.steps.next());
        // If a row may return several tokens, the request's next row begins after them, so it waits
        // for the result. A plan of only the other requests would split the batch into two for
        // good.
        let awaits = self.awaits_tokens();
        let alone = self.config.tokens_a_row > 1 || awaits;
        let most = if alone { 1 } else { MAX_IN_FLIGHT };
        if self.in_flight() >= most || !self.quarantine_permits() {
            self.drafting.waits |= awaits && self.in_flight() < MAX_IN_FLIGHT;
            return false;
        }
        self.plan_places(plan);
        let mut step = NewStep { plan, events, flight: self.steps.begin() };
        let decodes = match self.turns.suspect() {
            Some(suspect) => self.plan_suspect(suspect, &mut step),
            None => self.plan_everybody(&mut step),
        };
        let NewStep { plan, events, flight } = step;
        // The hand executes plans in order, so the next plan may share blocks that this plan
        // computes. Rows of the same plan may not share these blocks, because the rows are computed
        // at the same time.
        for row in &flight.rows[decodes..] {
            self.memory.offer_blocks(&mut self.roster[row.handle]);
        }
        self.memory.plan_copies(plan);
        self.report_left(events);
        if flight.rows.is_empty() && !plan.has_images() {
            let asks = self.in_flight() == 0 && self.copies_outstanding() > 0;
            let copies = plan.copies().len() > 0 || !plan.place_writes().is_empty() || asks;
            if !copies && !plan.writes_tables() {
                self.steps.reuse(flight);
                return false;
            }
            plan.wait(if copies { MAX_WAIT_US } else { 1 });
        }
        let waited = std::mem::take(&mut self.drafting.waits);
        self.steps.launch(Flight { waited, ..flight }, decodes);
        true
    }

    /// Makes an empty plan, with which this scheduler takes part in the next step of its step
    /// group. Call it if this scheduler has no work for that step, or must not run its work.
    pub fn idle_plan(&mut self, plan: &mut StepPlan) {
        plan.begin(self.steps.next());
        let flight = self.steps.begin();
        self.steps.launch(flight, 0);
    }

    /// Plans rows for all requests that fit. Returns the number of decode rows.
    fn plan_everybody(&mut self, step: &mut NewStep<'_>) -> usize {
        self.give_way(step.events);
        self.keep_pages_ready(step.plan);
        self.grow_decodes(step);
        self.background_waits = self.turns.background.is_spent() && self.roster.has_foreground();
        let mut decodes = self.plan_rows(step);
        let idle = step.flight.rows.is_empty() && !step.plan.has_images();
        if std::mem::take(&mut self.background_waits) && idle && self.in_flight() == 0 {
            // No other request could get a row, so this second attempt, with background work,
            // delays none of them.
            decodes = self.plan_rows(step);
        }
        self.memory.prefetch_prefixes(&mut self.roster, &self.turns);
        decodes
    }

    /// True if a request is background work that gets no row in this step.
    pub(crate) fn waits_for_others(&self, key: Key) -> bool {
        self.background_waits && key.is_background()
    }

    /// Plans rows for all requests that may have some in this step, within
    /// `--max-num-batched-tokens`. Returns the number of decode rows.
    fn plan_rows(&mut self, step: &mut NewStep<'_>) -> usize {
        self.plan_decodes(step);
        let decodes = step.flight.rows.len();
        self.images.plan(&mut self.roster, None, step);
        let mut left = self.config.token_budget.saturating_sub(decodes as u32);
        if decodes > 0 {
            let prefills = self.roster.prefills.values();
            let depth = prefills.map(|&handle| self.roster[handle].computed).max();
            let context = step.flight.rows.iter().map(|row| u64::from(row.start)).sum();
            left = self.turns.pace.tokens(left, depth.unwrap_or(0), context);
        }
        // Without a minimum of one page, many decoding requests would starve prefill for ever.
        self.plan_prompts(left.max(self.config.page_size), step);
        self.plan_drafts(decodes, step);
        decodes
    }

    /// Plans a row for a suspect and for no other request. The others wait, and keep the pages that
    /// the suspect does not need. Returns the number of decode rows.
    fn plan_suspect(&mut self, handle: Handle, step: &mut NewStep<'_>) -> usize {
        if self.roster[handle].residence.is_none() {
            let Some((slot, leased)) = self.make_room(handle, step.events) else { return 0 };
            self.move_in(handle, slot, leased, step);
        }
        if self.roster[handle].has_arrived() {
            self.arrive(handle, step);
        }
        self.keep_pages_ready(step.plan);
        if self.roster[handle].grows_in_prefill() {
            self.grow(handle, step);
        }
        // Try again after each preemption. If the victim is not in flight, its pages are free at
        // once, and no later event would trigger another plan.
        while !self.images.plan(&mut self.roster, Some(handle), step)
            && !step.plan.has_images()
            && let Some(victim) = self.images.holder(handle, &self.roster)
        {
            self.preempt(victim, step.events);
        }
        let entry = &self.roster[handle];
        match entry.stage() {
            Some(Stage::Prefill) if !self.memory.lacks_page(entry) => {
                let budget = self.config.token_budget.max(self.config.page_size);
                let most = self.memory.row_limit(entry.total, budget);
                let most = self.images.row_limit(entry, most);
                self.push_row(handle, most, step);
                0
            }
            Some(Stage::Decode { .. }) if entry.plannable() => {
                self.grow(handle, step);
                let entry = &self.roster[handle];
                let decodes = matches!(entry.stage(), Some(Stage::Decode { .. }));
                let fits = decodes && !self.memory.lacks_page(entry);
                if fits { self.push_row(handle, 1, step) as usize } else { 0 }
            }
            _ => 0,
        }
    }

    fn plan_decodes(&mut self, step: &mut NewStep<'_>) {
        for at in 0..self.roster.decodes.len() {
            let handle = self.roster.decodes[at];
            let entry = &self.roster[handle];
            let waits = self.waits_for_others(entry.key);
            if !waits && entry.plannable() && !self.memory.lacks_page(entry) {
                self.push_row(handle, 1, step);
            }
        }
    }

    /// Plans a row of up to `most` of a resident's positions. Returns the number of planned
    /// positions. The row that reaches `total` samples, and the request then decodes; a pooled
    /// request is finished with it.
    pub(crate) fn push_row(&mut self, handle: Handle, most: u32, step: &mut NewStep<'_>) -> u32 {
        let NewStep { plan, flight, .. } = step;
        // Each resident may need a page of the window part for its next token, drafts excluded.
        let others = self.roster.residents.len() as u32;
        let entry = &mut self.roster[handle];
        self.memory.pass_window(entry, plan);
        let Some(slot) = entry.residence.as_ref().map(|residence| residence.slot) else { return 0 };
        let (start, goal) = (entry.computed, entry.goal());
        let answers = |most| flight.answers_left(self.config.step_words, most);
        let length = entry.room_in_result(most.min(entry.longest_row()), answers);
        let length = self.images.length_to_image(entry, length);
        // No recurrent state is kept inside an image that must lie in one row.
        let to_state = self.memory.length_to_state(entry, length);
        let to_state = self.images.length_to_image(entry, to_state);
        let length = if to_state == 0 { length } else { to_state };
        // This may end the row inside an image. But models with a window part have no images that
        // must lie in one row.
        let length = self.memory.window_room(entry, length, others, plan);
        if length == 0 {
            return 0;
        }
        let pages = entry.residence.as_ref().map_or(0, |residence| residence.pages.reach());
        let end = start + length;
        let prompt = entry.given_by(slot, start, end);
        let want = if end < entry.total {
            Want::Nothing
        } else if entry.pools() {
            Want::Vector
        } else if entry.request.masked {
            Want::MASKED
        } else if self.config.tokens_a_row == 1 {
            Want::TOKEN
        } else {
            // The row also computes the positions of the returned tokens except the last, and these
            // positions need pages.
            let room = (pages * self.config.page_size - end).min(entry.limit - end - 1);
            Want::Tokens(self.config.tokens_a_row.min(1 + room))
        };
        entry.computed = end;
        entry.total += u32::from(want.samples());
        // A row that sat out has computed its last position already, and saved it.
        let fresh = start + u32::from(std::mem::take(&mut entry.repeats));
        if let Some(residence) = entry.residence.as_mut() {
            residence.last_step = flight.step;
            self.places.named(entry.seat, flight.step);
            self.memory.save_rows(&residence.pages, fresh..end, plan);
        }
        self.memory.save_state(entry, plan);
        plan.push_row(Row { slot, start, length, want });
        prompt.into_iter().for_each(|want| plan.want_prompt_logprobs(want));
        flight.push(FlightRow {
            handle,
            start,
            end,
            want,
            prompt,
            sits_out: false,
            drafts: None,
            background: entry.request.background,
        });
        self.images.pass(entry, flight.step);
        if end == goal {
            self.roster.end_prefill(handle, want.samples());
        }
        length
    }
}
