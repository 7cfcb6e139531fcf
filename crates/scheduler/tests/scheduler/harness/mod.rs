//! A scheduler together with a device; checks every rule at each step.

mod checks;
mod late;
mod record;
mod requests;
pub(crate) mod states;

use std::collections::{BTreeMap, VecDeque};

use forebay_protocol::{PromptLogprobs, StepPlan, StepResult, Want};
use forebay_scheduler::{
    Event, Finish, MAX_IN_FLIGHT, PageCounts, Policy, Request, Scheduler, SchedulerConfig,
};

use crate::copier::Copier;
use crate::device::{Device, append, read_prompt, vector};
use crate::seeing::{Arena, SlotImages};
use late::MaskedRow;
use record::Record;
use requests::told_alone;
pub(crate) use requests::{alone, config, pooled, request, telling};
use states::{StateCopies, StateFault};

/// The data that a client has received for its request, and the request's position in the order.
pub(crate) struct Client {
    pub(crate) request: Request,
    order: (i64, usize),
    expected: (Vec<i32>, Finish),
    pub(crate) tokens: Vec<i32>,
    pub(crate) vector: Option<Box<[f32]>>,
    /// Log-probabilities of the prompt so far, and the number of events that reported them.
    pub(crate) prompt: PromptLogprobs,
    pub(crate) parts: u32,
    /// How the request ended; `None`: it is live; `Some(None)`: it was aborted or poisoned.
    pub(crate) end: Option<Option<Finish>>,
    pub(crate) resident: bool,
    /// True if the request waits for copies.
    arriving: bool,
    /// True if the request waits for its mask.
    waits: bool,
    pub(crate) admissions: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) preemptions: u32,
    /// The number of the worker's deaths at which the request had a row in flight.
    pub(crate) deaths: u32,
    /// The number of steps without a row since the request became the most important one.
    idle: u32,
    /// Tokens of the requests that were admitted before this one while it was first in the order.
    passed: u64,
}

impl Client {
    /// The largest number of tokens that the request may have in the end.
    fn cost(&self) -> u64 {
        self.request.prompt.len() as u64 + u64::from(self.request.max_tokens)
    }
}

/// A step in flight: its requests, the pages that it names, and the result to come.
struct Flight {
    slots: Vec<u32>,
    named: Vec<(u32, u32)>,
    ids: Vec<u64>,
    /// State pages that the step loads or saves.
    states: Vec<u32>,
    /// Image pages that the step reads or writes.
    images: Vec<u32>,
    masked: Vec<MaskedRow>,
    /// The residents with an image for which the step computes layers of the vision tower.
    waiting: Vec<u64>,
    /// `None`: the step kills the worker.
    result: Option<StepResult>,
}

pub(crate) struct Harness {
    pub(crate) scheduler: Scheduler,
    config: SchedulerConfig,
    pub(crate) device: Device,
    pub(crate) copier: Copier,
    pub(crate) arena: Arena,
    depth: usize,
    pub(crate) clients: BTreeMap<u64, Client>,
    flights: VecDeque<Flight>,
    slot_owner: BTreeMap<u32, u64>,
    /// Accepted and rejected drafts of predicted answers.
    pub(crate) predicted: BTreeMap<u64, (u32, u32)>,
    pub(crate) plan: StepPlan,
    last_step: u64,
    /// True after a reset: requests are then no longer admitted in their order of arrival.
    pub(crate) was_reset: bool,
    record: Option<Record>,
    fault: Option<StateFault>,
}

impl Harness {
    /// Creates a harness with at most `depth` plans in flight.
    pub(crate) fn new(config: SchedulerConfig, depth: usize) -> Self {
        assert!(depth <= MAX_IN_FLIGHT);
        Self {
            scheduler: Scheduler::new(config.clone()),
            device: Device::new(&config),
            copier: Copier::new(&config),
            config,
            arena: Arena::default(),
            depth,
            clients: BTreeMap::new(),
            flights: VecDeque::new(),
            slot_owner: BTreeMap::new(),
            predicted: BTreeMap::new(),
            plan: StepPlan::default(),
            last_step: 0,
            was_reset: false,
            record: None,
            fault: None,
        }
    }

    pub(crate) fn submit(&mut self, request: Request) {
        let rank = match self.config.policy {
            _ if request.probe => i64::MIN,
            _ if request.background => i64::MAX,
            Policy::Fcfs => 0,
            Policy::Priority => -i64::from(request.priority),
            Policy::PriorityAscending => i64::from(request.priority),
        };
        let client = Client {
            order: (rank, self.clients.len()),
            expected: alone(&request),
            tokens: vec![],
            vector: None,
            prompt: PromptLogprobs::default(),
            parts: 0,
            end: None,
            resident: false,
            arriving: false,
            waits: false,
            admissions: 0,
            cached_tokens: 0,
            preemptions: 0,
            deaths: 0,
            idle: 0,
            passed: 0,
            request: request.clone(),
        };
        assert!(self.clients.insert(request.id, client).is_none());
        self.scheduler.submit(request);
        self.check();
    }

    pub(crate) fn abort(&mut self, id: u64) {
        let client = self.clients.get_mut(&id).expect("submitted");
        assert_eq!(self.scheduler.abort(id), client.end.is_none());
        client.end.get_or_insert(None);
        self.check();
    }

    /// Plans and executes a step; the result stays in flight. False if there was nothing to plan.
    pub(crate) fn plan(&mut self) -> bool {
        if self.flights.len() >= self.depth {
            return false;
        }
        let mut plan = std::mem::take(&mut self.plan);
        let mut events = Vec::new();
        let planned = self.scheduler.next_plan(&mut plan, &mut events);
        if let Some(record) = &mut self.record {
            record.note((planned, &events));
            record.plan(&plan);
        }
        let mut new_slots = plan.new_slots().map(|new| new.slot).collect::<Vec<_>>().into_iter();
        for event in events {
            match event {
                Event::Admitted { id, cached_tokens, replayed, restoring } => {
                    self.admitted(id, cached_tokens, replayed);
                    self.clients.get_mut(&id).expect("submitted").arriving = restoring;
                    if !restoring {
                        let slot = new_slots.next().expect("an admitted request has a slot");
                        self.slot_owner.insert(slot, id);
                    }
                }
                Event::Arrived { id } => {
                    let client = self.clients.get_mut(&id).expect("submitted");
                    assert!(client.resident && std::mem::take(&mut client.arriving), "{id}");
                    client.idle = 0;
                    let slot = new_slots.next().expect("an arrived request has a slot");
                    self.slot_owner.insert(slot, id);
                }
                Event::Preempted { id } => {
                    let first = self.most_important().filter(|_| !self.was_reset);
                    assert_ne!(first, Some(id), "the most important is never preempted");
                    self.preempted(id);
                }
                Event::ImageWanted { id, index, image } => {
                    assert_eq!(self.clients[&id].request.images[index].id, image);
                    self.arena.wanted.push(image);
                }
                other => panic!("a plan does not bring {other:?}"),
            }
        }
        assert_eq!(new_slots.next(), None, "a slot was written for no request");
        if planned {
            let (rows, copies) = (plan.rows().len(), plan.copies().len());
            let computes = rows > 0 || plan.has_images();
            assert_eq!(plan.wait_us() > 0, !computes, "a plan with rows does not wait");
            let placing = !plan.place_writes().is_empty() || self.device.adapters.outstanding() > 0;
            let copying = copies > 0 || self.copier.outstanding() > 0 || placing;
            assert!(computes || copying || plan.writes_tables(), "nothing to do");
            self.check_plan(&plan);
            self.execute(&plan);
        }
        self.plan = plan;
        self.check();
        planned
    }

    /// Applies the oldest result in flight; a step that kills the worker leads to a reset. False if
    /// no step is in flight.
    pub(crate) fn apply(&mut self) -> bool {
        match self.flights.front().map(|flight| flight.result.is_some()) {
            None => return false,
            Some(false) => {
                self.reset();
                return true;
            }
            Some(true) => {}
        }
        let mut result = self.flights.pop_front().and_then(|f| f.result).expect("just looked");
        self.copier.report(&mut result, &mut self.device);
        self.device.adapters.report(&mut result);
        let (mut events, mut got) = (Vec::new(), Vec::new());
        self.scheduler.apply(&result, &mut events).expect("the result fits the plan");
        self.record.iter_mut().for_each(|record| record.note(&events));
        for event in events {
            if let Event::ImageRead { patches } = event {
                self.arena.free(patches);
                continue;
            }
            if let Event::Prefilled { id, tokens } = event {
                assert!(tokens > 0 && self.clients[&id].end.is_none());
                continue;
            }
            if let Event::Preempted { id } = event {
                // A copy of one of the request's blocks has failed.
                assert!(self.clients[&id].arriving && self.clients[&id].end.is_none());
                self.lost_its_place(id);
                continue;
            }
            if let Event::Predicted { id, accepted, rejected } = event {
                let told = self.predicted.entry(id).or_default();
                *told = (told.0 + accepted, told.1 + rejected);
                continue;
            }
            let (Event::Token { id, .. }
            | Event::PromptLogprobs { id, .. }
            | Event::Pooled { id, .. }
            | Event::Finished { id, .. }) = event
            else {
                panic!("a result does not bring {event:?}")
            };
            let client = self.clients.get_mut(&id).expect("submitted");
            assert_eq!(client.end, None, "{id} has ended, but {event:?}");
            match event {
                Event::Token { token, nth, .. } => {
                    assert_eq!(
                        client.prompt,
                        told_alone(&client.request),
                        "{id}: all of it by now"
                    );
                    got.push(id);
                    let at = client.tokens.len();
                    assert_eq!(client.expected.0.get(at), Some(&token), "token {at} of {id}");
                    client.tokens.push(token);
                    assert_eq!(nth as usize, client.request.generated.len() + client.tokens.len());
                }
                Event::Pooled { vector, .. } => {
                    assert_eq!(client.vector.replace(vector), None, "a second vector of {id}");
                }
                Event::PromptLogprobs { logprobs, .. } => {
                    assert!(!logprobs.ranks.is_empty(), "{id} is told nothing");
                    append(&mut client.prompt, logprobs);
                    client.parts += 1;
                }
                // The request ends without a finish reason, as an aborted one does.
                Event::Finished { reason: Finish::NoAdapter { error }, .. } => {
                    assert!(error > 0 && client.request.adapter.is_some());
                    client.end = Some(None);
                }
                Event::Finished { reason, .. } => client.end = Some(Some(reason)),
                Event::Admitted { .. }
                | Event::Left { .. }
                | Event::Arrived { .. }
                | Event::Prefilled { .. }
                | Event::Preempted { .. }
                | Event::ImageWanted { .. }
                | Event::Predicted { .. }
                | Event::ImageRead { .. } => {}
            }
        }
        self.expect_masked(&got);
        self.check();
        true
    }

    /// Puts the patches of a wanted image into the arena, or reports that this failed.
    pub(crate) fn place(&mut self, at: usize, fine: bool) {
        if self.arena.wanted.is_empty() {
            return;
        }
        let image = self.arena.wanted.swap_remove(at % self.arena.wanted.len());
        if fine {
            let offset = self.arena.put(image);
            if !self.scheduler.image_placed(image, offset) {
                self.arena.free(offset);
            }
        } else {
            let failed = self.scheduler.image_failed(image);
            self.record.iter_mut().for_each(|record| record.note(&failed));
            for (id, index) in failed {
                let client = self.clients.get_mut(&id).expect("submitted");
                assert_eq!(client.request.images[index].id, image);
                assert_eq!(client.end.replace(None), None);
            }
        }
        self.check();
    }

    /// Kills the worker. Returns the poisoned requests.
    pub(crate) fn reset(&mut self) -> Vec<u64> {
        self.was_reset = true;
        let (mut blamed, mut waiting) = (vec![], vec![]);
        for flight in self.flights.drain(..) {
            blamed.extend(flight.ids);
            waiting.extend(flight.waiting);
        }
        blamed.sort_unstable();
        blamed.dedup();
        waiting.extend(&blamed);
        waiting.sort_unstable();
        waiting.dedup();
        for &id in &waiting {
            self.clients.get_mut(&id).expect("submitted").deaths += 1;
        }
        let poisoned = self.scheduler.reset();
        self.record.iter_mut().for_each(|record| record.note(&poisoned));
        for &id in &poisoned {
            let client = self.clients.get_mut(&id).expect("submitted");
            assert_eq!(client.end, None);
            let alone = blamed.iter().all(|&other| other == id) && waiting.contains(&id);
            assert!(alone, "a poisoned request was alone in flight");
            assert!(
                client.deaths >= 2,
                "a request is poisoned at its second death at the earliest"
            );
            client.end = Some(None);
        }
        for client in self.clients.values_mut() {
            (client.resident, client.arriving) = (false, false);
        }
        self.copier.device_died();
        self.device = Device::new(&self.config);
        self.slot_owner.clear();
        assert_eq!(self.scheduler.in_flight(), 0);
        assert_eq!(self.scheduler.stats().pages_free, self.config.pages as usize);
        self.check();
        poisoned
    }

    /// Gives up the worker because copies are under way and none ends. No request is suspected.
    pub(crate) fn copies_hang(&mut self) {
        self.flights.clear();
        self.scheduler.reset_for_copies();
        self.was_reset = true;
        self.copier.device_died();
        self.device = Device::new(&self.config);
        self.slot_owner.clear();
        for client in self.clients.values_mut() {
            (client.resident, client.arriving) = (false, false);
        }
        self.check();
        let others = self.scheduler.stats();
        assert_eq!(others.pages_held, 0);
    }

    /// Lets memory run out: no request is suspected, and the next worker has these page counts.
    pub(crate) fn memory_runs_out(&mut self, pages: u32, host_pages: u32) {
        self.flights.clear();
        self.scheduler.reset_without_blame();
        let states = self.config.states;
        self.scheduler.resize(PageCounts {
            pages,
            host_pages,
            state_pages: states.map_or(0, |states| states.pages),
            host_state_pages: states.map_or(0, |states| states.host_pages),
            window_pages: self.config.windows.map_or(0, |part| part.pages),
        });
        self.was_reset = true;
        self.config.pages = pages;
        if let Some(host) = &mut self.config.host {
            host.pages = host_pages;
        }
        let fault = self.copier.fault;
        self.copier = Copier::new(&self.config);
        self.copier.fault = fault;
        self.device = Device::new(&self.config);
        self.slot_owner.clear();
        for client in self.clients.values_mut() {
            (client.resident, client.arriving) = (false, false);
        }
        self.check();
        let stats = self.scheduler.stats();
        let all = stats.pages_held + stats.pages_cached + stats.pages_free;
        assert_eq!((all, stats.pages_free), (pages as usize, pages as usize));
    }

    /// Lets memory run out; the next worker has as many pages as the last.
    pub(crate) fn starve(&mut self) {
        let host_pages = self.config.host.map_or(0, |host| host.pages);
        self.memory_runs_out(self.config.pages, host_pages);
    }

    /// Moves all live requests to the harness `other`, because the worker died.
    pub(crate) fn move_to(&mut self, other: &mut Self) {
        other.was_reset = true;
        for request in self.scheduler.surrender() {
            self.hand_to(other, request);
        }
        assert_eq!(self.live().count(), 0);
        self.check();
        other.check();
    }

    /// Moves one of the waiting requests to the harness `other`, if one may move.
    pub(crate) fn give_one(&mut self, other: &mut Self, at: usize) {
        let movable: Vec<u64> = self.scheduler.movable().map(|request| request.id).collect();
        let Some(&id) = movable.get(at % movable.len().max(1)) else { return };
        let left = self.clients[&id].request.past.moves_left;
        let request = self.scheduler.withdraw(id).expect("the request may move");
        assert_eq!(
            self.scheduler.withdraw(id).map(|request| request.id),
            None,
            "the request was withdrawn twice"
        );
        assert_eq!(request.past.moves_left, left - 1);
        (self.was_reset, other.was_reset) = (true, true);
        self.clients.get_mut(&id).expect("submitted").request.past.moves_left -= 1;
        self.hand_to(other, request);
        self.check();
        other.check();
    }

    fn hand_to(&mut self, other: &mut Self, request: Request) {
        self.record.iter_mut().for_each(|record| record.note(&request));
        let mut client = self.clients.remove(&request.id).expect("submitted");
        client.waits = false;
        assert_eq!(client.end, None);
        let so_far = [client.request.generated.as_slice(), &client.tokens].concat();
        assert_eq!(request.generated, so_far, "{}", request.id);
        assert_eq!(request.past.admitted, client.admissions > 0);
        other.clients.insert(request.id, client);
        other.scheduler.submit(request);
    }

    /// Runs until all requests have ended, and checks each end and its tokens.
    pub(crate) fn drain(&mut self) {
        let work: usize = self
            .clients
            .values()
            .map(|c| c.request.prompt.len() + c.expected.0.len())
            .sum::<usize>()
            + self.clients.values().map(|c| c.request.generated.len()).sum::<usize>();
        let mut rounds = 30 * work * self.clients.len().max(1) + 300;
        while self.scheduler.live().next().is_some()
            || self.scheduler.in_flight() > 0
            || self.scheduler.stats().host.copies_outstanding > 0
        {
            self.mask_ready(None);
            let idle = self.scheduler.in_flight() == 0;
            let planned = self.plan();
            let waits = !self.arena.wanted.is_empty();
            assert!(planned || !idle || waits, "nothing is in flight, and nothing is planned");
            while self.plan() {}
            self.check_progress();
            // End one copy per step, so that others stay under way.
            self.copier.end(rounds, !rounds.is_multiple_of(7));
            self.device.adapters.end(rounds, true);
            self.place(rounds, true);
            self.apply();
            if rounds.is_multiple_of(5) {
                self.sit_out(0b101);
            }
            rounds -= 1;
            assert!(rounds > 0, "no end in sight: {:?}", self.scheduler.stats());
        }
        for (id, client) in &self.clients {
            let end = client.end.unwrap_or_else(|| panic!("request {id} did not end"));
            if let Some(reason) = end {
                assert_eq!((&client.tokens, reason), (&client.expected.0, client.expected.1));
                if reason != Finish::NotFinite {
                    assert_eq!(client.prompt, told_alone(&client.request), "{id}");
                }
                let pooling = client.request.spec.pooling.filter(|_| reason == Finish::Length);
                let prompt = read_prompt(&client.request.prompt, client.request.spec.embeds, &[]);
                let expected =
                    pooling.and_then(|p| vector(client.request.adapter, &prompt, p.segment));
                assert_eq!(client.vector.as_deref(), expected.as_ref().map(|v| &v[..]));
            }
        }
        let stats = self.scheduler.stats();
        assert_eq!((stats.running, stats.waiting, stats.pages_held), (0, 0, 0));
        assert!(self.scheduler.flush_cache());
        assert_eq!(self.scheduler.stats().pages_free, self.config.pages as usize);
        self.check();
        let states = self.scheduler.stats().states;
        assert_eq!(
            (states.pages_held, states.pages_cached),
            (0, 0),
            "states are held or cached after a flush"
        );
        let windows = self.scheduler.stats().windows;
        assert_eq!(
            (windows.pages_held, windows.pages_cached),
            (0, 0),
            "window pages are held or cached after a flush"
        );
        let images = self.scheduler.stats().images;
        assert_eq!((images.pages_held, images.pages_cached, images.waiting), (0, 0, 0));
        assert!(self.arena.is_empty(), "patches of ended requests are still there");
    }

    /// Tokens and end of a request.
    pub(crate) fn ended(&self, id: u64) -> (&[i32], Option<Option<Finish>>) {
        let client = &self.clients[&id];
        (&client.tokens, client.end)
    }

    fn live(&self) -> impl Iterator<Item = (&u64, &Client)> {
        self.clients.iter().filter(|(_, client)| client.end.is_none())
    }

    fn most_important(&self) -> Option<u64> {
        self.live().min_by_key(|(_, client)| client.order).map(|(&id, _)| id)
    }

    fn admitted(&mut self, id: u64, cached_tokens: u32, replayed: bool) {
        // A request that waits for an adapter's place is not scheduled, and the harness cannot
        // determine which request waits.
        let placed = self.live().all(|(_, c)| c.resident || c.request.adapter.is_none());
        if placed && !self.was_reset && !self.config.fair {
            let cost = self.clients[&id].cost();
            let waiting = self.clients.values_mut().filter(|c| c.end.is_none() && !c.resident);
            // Requests that were admitted before go first.
            let turn =
                |client: &&mut Client| (client.order.0, client.admissions == 0, client.order.1);
            let first = waiting.min_by_key(turn).expect("the request waits");
            if first.request.id != id {
                first.passed += cost;
                let may = self.config.step_shares && first.passed <= first.cost();
                assert!(may, "{id} overtakes after {} tokens that did", first.passed);
            }
        }
        let client = self.clients.get_mut(&id).expect("submitted");
        assert_eq!(client.end, None);
        assert!(!std::mem::replace(&mut client.resident, true), "{id} is admitted twice");
        assert_eq!(replayed, client.admissions > 0);
        assert!(!replayed || cached_tokens == 0);
        let prompt = client.request.prompt.len();
        let resumed = !client.request.generated.is_empty();
        assert!((cached_tokens as usize) < prompt || (resumed && cached_tokens as usize == prompt));
        assert!(cached_tokens.is_multiple_of(self.config.page_size) || resumed);
        assert!(
            cached_tokens == 0 || client.request.spec.embeds.is_none(),
            "{id} has embeddings, so no block names to look up"
        );
        client.cached_tokens += cached_tokens;
        client.passed = 0;
        client.admissions += 1;
        client.idle = 0;
    }

    fn preempted(&mut self, id: u64) {
        self.lost_its_place(id);
        self.clients.get_mut(&id).expect("submitted").preemptions += 1;
    }

    fn lost_its_place(&mut self, id: u64) {
        let client = self.clients.get_mut(&id).expect("submitted");
        assert!(std::mem::take(&mut client.resident), "{id} was preempted but not admitted");
        client.arriving = false;
    }

    fn execute(&mut self, plan: &StepPlan) {
        self.device.write_tables(plan, |slot| {
            let images = &self.clients[&self.slot_owner[&slot]].request.images;
            SlotImages::new(images)
        });
        let mut written: Vec<(u32, u32)> = Vec::new();
        let mut flight = Flight {
            slots: vec![],
            named: vec![],
            ids: vec![],
            states: self.check_states(plan),
            images: vec![],
            masked: vec![],
            waiting: vec![],
            result: None,
        };
        // Only the request that is first now can be idle. The others have to wait for it.
        let first = self.most_important();
        for (&id, client) in &mut self.clients {
            client.idle = if first == Some(id) { client.idle + 1 } else { 0 };
        }
        let (mut masked, mut samples) = (Vec::new(), 0);
        for (number, row) in plan.rows().enumerate() {
            let id = self.slot_owner[&row.slot];
            let client = self.clients.get_mut(&id).expect("submitted");
            client.idle = 0;
            assert!(client.end.is_none() && client.resident, "{id} has a row but does not run");
            let last = client.request.prompt.len() as u32 + client.request.max_tokens;
            let computed = row.start + row.length - u32::from(row.want == Want::Vector);
            assert!(computed < last, "{id} computes its last token");
            let pools = client.request.spec.pooling.is_some();
            match row.want {
                Want::Nothing => {}
                Want::Vector => assert!(pools),
                Want::Masked(most) => {
                    assert!(!pools && client.request.masked && !client.waits, "{id}");
                    let drafts = self.config.drafts.map_or(0, |drafts| drafts.most);
                    assert!((1..=1 + drafts).contains(&most));
                    assert!(row.start + row.length + most <= last, "{id} may get too many tokens");
                    masked.push(id);
                    let (slot, sample) = (row.slot, samples);
                    let of_prompt = plan.prompt_logprobs().any(|want| want.slot == slot);
                    let row = Some(number).filter(|_| !of_prompt);
                    flight.masked.push(MaskedRow { id, slot, sample, row });
                }
                Want::Tokens(most) => {
                    assert!(!client.request.masked, "its tokens have no mask");
                    let drafts = self.config.drafts.map_or(0, |drafts| drafts.most);
                    let several = self.config.tokens_a_row.max(1 + drafts);
                    assert!(!pools && (1..=several).contains(&most));
                    assert!(row.start + row.length + most <= last, "{id} may get too many tokens");
                }
            }
            samples += usize::from(row.want.samples());
            flight.slots.push(row.slot);
            flight.ids.push(id);
            flight.images.extend(self.device.image_pages(&row));
            flight.named.extend(self.device.pages_named(&row).into_iter().map(|p| (p, row.slot)));
            written.extend(self.device.pages_of_its_own(&row).into_iter().map(|p| (p, row.slot)));
        }
        assert_eq!(self.scheduler.masked().collect::<Vec<_>>(), masked);
        for (page, slot) in written {
            let mut named = flight.named.iter().chain(self.flights.iter().flat_map(|f| &f.named));
            let other = named.find(|&&(other, owner)| other == page && owner != slot);
            assert_eq!(other, None, "slot {slot} writes to page {page}, which another names");
        }
        for image in self.device.images_in(plan, &self.arena) {
            let waits = |(_, client): &(&u64, &Client)| {
                client.resident && client.request.images.iter().any(|own| own.id == image)
            };
            flight.waiting.extend(self.live().filter(waits).map(|(&id, _)| id));
        }
        for (_, pages) in plan.images() {
            for page in pages.iter().map(|page| page.cast_unsigned()) {
                let named = self.flights.iter().any(|flight| flight.images.contains(&page));
                assert!(!named, "image page {page} is in flight");
                flight.images.push(page);
            }
        }
        // After a step that kills the worker, the steps in flight compute nothing.
        if self.flights.iter().all(|flight| flight.result.is_some()) {
            let mut states = StateCopies::of(plan);
            self.fault.iter_mut().for_each(|fault| fault.spoil(&mut states));
            self.copier.start_early(plan, &mut self.device);
            flight.result = self.device.compute(plan, &states, &self.copier, &self.arena).ok();
            if flight.result.is_some() {
                self.copier.start(plan, &mut self.device);
            }
        }
        self.flights.push_back(flight);
    }
}
