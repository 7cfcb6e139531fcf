//! Checks of plans, and of the scheduler's counters.

use forebay_protocol::{Frame, HEADER_BYTES, Header, PromptLogprobsWant, StepPlan};

use super::Harness;

impl Harness {
    pub(super) fn check_plan(&mut self, plan: &StepPlan) {
        assert_eq!(plan.step(), self.last_step + 1, "steps are numbered without gaps");
        self.last_step = plan.step();
        let mut slots: Vec<u32> = plan.rows().map(|row| row.slot).collect();
        check_words(plan, self.config.step_words);
        let length: u32 = plan.rows().map(|row| row.length).sum();
        let decodes =
            plan.rows().filter(|row| row.length == 1 && row.want.samples()).count() as u32;
        let budget = self.config.token_budget.max(decodes + self.config.page_size);
        let budget = budget + self.largest_whole_image();
        let alone = self.config.pages == 0 && plan.rows().len() == 1;
        assert!(length <= budget || alone);
        let answer =
            |want: PromptLogprobsWant| PromptLogprobsWant::answer_words(want.count, want.most);
        let words: usize = plan.prompt_logprobs().map(answer).sum();
        let tokens: u32 = plan.prompt_logprobs().map(|want| want.count).sum();
        assert!(words <= self.config.step_words || tokens == 1, "{words} words of an answer");
        for slot in plan.new_slots().map(|new| new.slot) {
            let sees = plan.image_spans().any(|(of, _, _)| of == slot) || self.is_late(slot);
            assert!(slots.contains(&slot) || sees, "slot {slot} is written for nothing");
            let named = self.flights.iter().any(|flight| flight.slots.contains(&slot));
            assert!(!named, "slot {slot} is in flight");
        }
        // With sparse decoding or a window part, prompts get pages one by one. Such a request may
        // get a page but no row, if other requests take the whole budget.
        let by_parts = self.config.sparse.is_some() || self.config.windows.is_some();
        for (slot, index, page) in plan.page_writes() {
            let sees = plan.image_spans().any(|(of, _, _)| of == slot) || self.is_late(slot);
            let used = page.is_none() || by_parts || slots.contains(&slot) || sees;
            assert!(used, "page {index} is given to slot {slot} for nothing");
        }
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), plan.rows().len(), "one row a slot");
    }

    /// The number of positions of the largest image, if a row has to contain an image whole.
    fn largest_whole_image(&self) -> u32 {
        let whole = self.config.tower.is_some_and(|tower| tower.whole);
        let images = self.clients.values().flat_map(|client| client.request.images.iter());
        images.filter(|_| whole).map(|image| image.span.grid.positions()).max().unwrap_or(0)
    }

    /// True if the request in the slot waits for its mask.
    fn is_late(&self, slot: u32) -> bool {
        self.slot_owner.get(&slot).is_some_and(|id| self.clients[id].waits)
    }

    /// Checks that the most important admitted request has a row at least every other step. It may
    /// have none while copies are under way, or while it waits for its mask or its images.
    pub(super) fn check_progress(&mut self) {
        if let Some(id) = self.most_important().filter(|_| !self.was_reset) {
            let copying = self.copier.outstanding() > 0;
            let client = self.clients.get_mut(&id).expect("submitted");
            if !client.resident || copying || client.waits || !client.request.images.is_empty() {
                client.idle = 0;
            }
            assert!(client.idle <= 2 * self.depth as u32, "{id} starves");
        }
    }

    pub(super) fn check(&mut self) {
        let mut unread = vec![];
        self.scheduler.take_unread_patches(&mut unread);
        self.record.iter_mut().for_each(|record| record.note(&unread));
        unread.into_iter().for_each(|patches| self.arena.free(patches));
        if let Some(record) = &mut self.record {
            record.state(&mut self.scheduler);
        }
        self.scheduler.check_integrity().unwrap_or_else(|wrong| panic!("{wrong}"));
        let stats = self.scheduler.stats();
        let pages = stats.pages_free + stats.pages_cached + stats.pages_held;
        assert_eq!(pages, self.config.pages as usize);
        assert_eq!(stats.running + stats.waiting, self.live().count());
        assert_eq!(self.scheduler.live().count(), self.live().count());
        let probes = self.live().filter(|(_, client)| client.request.probe && client.resident);
        assert!(stats.running <= self.config.max_running as usize + probes.count());
    }
}

/// Checks that a plan can be decoded, and has at most `limit` words. With a single new slot, the
/// plan may be larger.
fn check_words(plan: &StepPlan, limit: usize) {
    assert!(plan.words() <= limit || plan.new_slots().count() <= 1, "{} words", plan.words());
    let mut bytes = Vec::new();
    plan.encode(&mut bytes).expect("within the limit");
    let (head, body) = bytes.split_at(HEADER_BYTES);
    let header = Header::decode(head.try_into().expect("a header")).expect("a good one");
    let words = body.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().expect("four")));
    let frame = Frame::new(header, words.collect()).expect("a frame");
    assert_eq!(StepPlan::decode(&frame).as_ref(), Ok(plan));
}
