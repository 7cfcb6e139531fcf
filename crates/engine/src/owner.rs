//! The loop that owns a replica.

mod constrained;
mod handover;
mod pictures;
mod queue;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, Sender};
use forebay_protocol::{Ready, StepPlan, StepResult};
use forebay_scheduler::{
    Event, Finish, HostTier, STEP_WORDS, Scheduler, SchedulerConfig, Sparse, Tower,
};
use tracing::{error, info, warn};

use crate::config::EngineConfig;
use crate::executor::{Executor, Signal};
use crate::handle::{EngineHandle, Order, Shared, positions};
pub(crate) use crate::owner::constrained::Constrained;
use crate::owner::pictures::Pictures;
use crate::payload::Held;
use crate::recovery::{Recovery, Verdict};
use crate::types::{
    Admission, Arrival, BlockObserver, EngineRequest, Facts, FinishReason, HandStats, Output,
    OutputSink, Peers, RequestError, RequestId, SampledToken, Stats, Status,
};

/// Quiet time after which an idle engine checks its books.
const IDLE_CHECK_US: u64 = 100_000;

/// Who hears of outputs, of blocks, and of the hand's death.
type Listeners = (Box<dyn OutputSink>, Option<Box<dyn BlockObserver>>, Option<Box<dyn Peers>>);

pub(crate) struct Owner {
    config: EngineConfig,
    executor: Box<dyn Executor>,
    sink: Box<dyn OutputSink>,
    blocks: Option<Box<dyn BlockObserver>>,
    peers: Option<Box<dyn Peers>>,
    shared: Arc<Shared>,
    lane: Receiver<Order>,
    /// For those who put images where the hand reads them.
    orders: Sender<Order>,
    /// Known with the hand's first facts.
    scheduler: Option<Scheduler>,
    /// The hand takes plans.
    up: bool,
    recovery: Recovery,
    restart_at: Option<u64>,
    /// When the hand last showed life while it was starting.
    loading_us: Option<u64>,
    /// Neither this hand nor another one comes back.
    over: bool,
    plan: StepPlan,
    events: Vec<Event>,
    outputs: Vec<Output>,
    /// Requests that were never admitted.
    arrivals: HashMap<u64, Arrival>,
    /// When they have waited too long, and which; empty where they may wait as long as it takes.
    deadlines: BTreeSet<(u64, u64)>,
    /// Admissions whose first token has not come yet.
    admissions: HashMap<u64, Admission>,
    /// Since when requests wait for blocks to come back.
    arriving: HashMap<u64, u64>,
    /// Since when copies are under way, and none has ended.
    copying_us: Option<u64>,
    /// The hand was given up because of that.
    copies_hang: bool,
    /// Bytes of a page, as the hand says.
    page_bytes: u64,
    /// What requests have in the arena.
    payloads: Held,
    pictures: Pictures,
    /// What restricts their tokens.
    constrained: Constrained,
    /// The last step that was handed over.
    last_step: u64,
    stats: HandStats,
    /// When the hand last showed life while a step was in flight.
    progress_us: u64,
    /// The next step follows a time without work: its gap is not the host's doing.
    rested: bool,
    rested_step: Option<u64>,
    /// Something happened since the books were last checked.
    unchecked: bool,
}

impl Owner {
    pub(crate) fn new(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        (sink, blocks, peers): Listeners,
        handle: EngineHandle,
        lane: Receiver<Order>,
        constrained: Constrained,
    ) -> Self {
        let EngineHandle { shared, orders } = handle;
        let recovery = Recovery::new(config.restart_limit);
        Self {
            constrained,
            config,
            executor,
            sink,
            blocks,
            peers,
            shared,
            lane,
            orders,
            pictures: Pictures::default(),
            scheduler: None,
            up: false,
            recovery,
            restart_at: None,
            loading_us: None,
            over: false,
            plan: StepPlan::default(),
            events: Vec::new(),
            outputs: Vec::new(),
            arrivals: HashMap::new(),
            deadlines: BTreeSet::new(),
            admissions: HashMap::new(),
            arriving: HashMap::new(),
            copying_us: None,
            copies_hang: false,
            page_bytes: 0,
            payloads: Held::default(),
            last_step: 0,
            stats: HandStats::default(),
            progress_us: 0,
            rested: true,
            rested_step: None,
            unchecked: false,
        }
    }

    pub(crate) fn run(mut self) {
        self.start();
        while self.take_orders() {
            self.restart_if_due();
            self.expire();
            self.feed();
            self.deliver();
            if self.over {
                break;
            }
            match self.executor.wait(self.timeout()) {
                Signal::Woken => {}
                Signal::TimedOut => self.timed_out(),
                Signal::Result(result) => self.apply(&result),
                Signal::Progress(stage) => self.loading(stage),
                Signal::Ready(facts) => self.ready(facts),
                Signal::Died(reason) => self.died(&reason),
            }
        }
        self.executor.stop();
        self.end_all();
        self.deliver();
    }

    fn start(&mut self) {
        self.loading_us = Some(self.shared.clock.now_us());
        self.executor.start();
    }

    /// Takes every waiting order; false after [`Order::Stop`].
    fn take_orders(&mut self) -> bool {
        let mut entered = false;
        while let Ok(order) = self.lane.try_recv() {
            match order {
                Order::Submit { request, arrival } => {
                    self.arrived(request.request.id, arrival);
                    self.enter(*request);
                    entered = true;
                }
                Order::Adopt(orphan) => {
                    self.adopt(*orphan);
                    entered = true;
                }
                Order::HandOver => entered = true,
                Order::Abort(id) => {
                    if self.scheduler.as_mut().is_some_and(|s| s.abort(id.0)) {
                        self.end(id.0, FinishReason::Abort);
                    } else if let Some(peers) = &self.peers {
                        peers.abort(id);
                    }
                }
                Order::Placed { image, placed } => self.placed(image, placed),
                Order::FlushCache(reply) => {
                    reply(self.scheduler.as_mut().is_none_or(Scheduler::flush_cache));
                }
                Order::Run(work) => work(),
                Order::Stop => return false,
            }
            self.unchecked = true;
        }
        if entered && !self.up {
            self.give_away();
        }
        true
    }

    /// Queues a request. Where the hand is gone, it is decided afterwards what becomes of it.
    fn enter(&mut self, entering: EngineRequest) {
        let EngineRequest { mut request, payloads, pictures, constraint, .. } = entering;
        request.masked = constraint.is_some();
        let Some(scheduler) = self.scheduler.as_mut() else {
            let reason = "it is still starting".into();
            let finish = FinishReason::Error(RequestError::HandFailed(reason));
            return self.end(request.id, finish);
        };
        let room = self.shared.room.load(Ordering::Acquire);
        if positions(&request) > u64::from(room) {
            // Another replica, with more memory, was ready when it was checked.
            let reason = format!("of the replicas that are left, none has {room} positions");
            let finish = FinishReason::Error(RequestError::HandFailed(reason));
            return self.end(request.id, finish);
        }
        self.payloads.hold(request.id, payloads);
        self.pictures.hold(request.id, pictures);
        self.constrained.hold(request.id, constraint);
        scheduler.submit(request);
    }

    /// Plans as far ahead as the lookahead allows.
    fn feed(&mut self) {
        let most = self.config.lookahead as usize + 1;
        while let Some(scheduler) = self.scheduler.as_mut().filter(|_| self.up)
            && scheduler.in_flight() < most
        {
            if !scheduler.next_plan(&mut self.plan, &mut self.events) {
                break;
            }
            if scheduler.in_flight() == 1 {
                self.progress_us = self.shared.clock.now_us();
            }
            if self.plan.rows().len() == 0 {
                // A hand that only waits for copies is not kept waiting.
                self.rested = true;
            } else if std::mem::take(&mut self.rested) {
                self.rested_step = Some(self.plan.step());
            }
            self.last_step = self.plan.step();
            self.executor.submit(&self.plan);
            self.note_masked();
            self.send_masks();
        }
        self.rested |= self.scheduler.as_ref().is_some_and(|s| self.up && s.in_flight() == 0);
        self.take_events();
    }

    fn apply(&mut self, result: &StepResult) {
        let Some(scheduler) = self.scheduler.as_mut() else {
            return;
        };
        if let Err(error) = scheduler.apply(result, &mut self.events) {
            self.executor.stop();
            return self.died(&format!("it broke the protocol: {error}"));
        }
        self.recovery.works();
        self.progress_us = self.shared.clock.now_us();
        self.payloads.answered(result.step);
        self.stats.device_us += u64::from(result.device_us);
        if self.rested_step != Some(result.step) && !result.row_errors.is_empty() {
            self.stats.idle_us += u64::from(result.gap_us);
        }
        self.take_events();
        self.send_masks();
        self.watch_copies(!result.copied.is_empty());
    }

    /// Takes the hand for hung when copies are under way and none ends.
    fn watch_copies(&mut self, ended: bool) {
        let outstanding = self.scheduler.as_ref().map_or(0, Scheduler::copies_outstanding);
        if outstanding == 0 {
            self.copying_us = None;
            return;
        }
        let now = self.shared.clock.now_us();
        let since = *self.copying_us.get_or_insert(now);
        if ended {
            self.copying_us = Some(now);
        } else if now.saturating_sub(since) >= self.config.watchdog_us {
            self.executor.stop();
            self.copies_hang = true;
            let silent = now.saturating_sub(since) / 1_000_000;
            self.died(&format!("no copy has ended for {silent} s"));
        }
    }

    /// Turns the scheduler's events into outputs.
    fn take_events(&mut self) {
        let now = if self.arrivals.is_empty() { 0 } else { self.shared.clock.now_us() };
        let mut events = std::mem::take(&mut self.events);
        let mut broken = Vec::new();
        for event in events.drain(..) {
            match event {
                Event::Admitted { id, cached_tokens, replayed, restoring } => {
                    if restoring {
                        self.arriving.insert(id, self.shared.clock.now_us());
                    }
                    self.stats.replayed += u64::from(replayed);
                    if let Some(Arrival { at_us, place }) = self.forget_arrival(id) {
                        self.shared.queued.admitted(place, now);
                        let queue_us = now.saturating_sub(at_us);
                        self.admissions.insert(id, Admission { cached_tokens, queue_us });
                    }
                }
                Event::Token { id, token, logprobs } => {
                    if let Err(why) = self.constrained.accept(id, token) {
                        broken.push((id, why));
                    }
                    let token = Some(SampledToken { id: token, logprobs });
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    // With what the same step brought of the prompt.
                    let first =
                        self.outputs.last_mut().filter(|last| last.id == id && last.is_of_prompt());
                    match first {
                        Some(first) => first.token = token,
                        None => self.outputs.push(Output { admission, token, ..Output::of(id) }),
                    }
                }
                Event::PromptLogprobs { id, logprobs } => {
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    let prompt = Some(logprobs);
                    self.outputs.push(Output { admission, prompt, ..Output::of(id) });
                }
                Event::Pooled { id, vector } => {
                    let pooled = Some(vector);
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    self.outputs.push(Output { admission, pooled, ..Output::of(id) });
                }
                Event::Finished { id, reason } => {
                    let finish = match reason {
                        Finish::Stop { token } => FinishReason::Stop { token },
                        Finish::Length => FinishReason::Length,
                        Finish::NotFinite => FinishReason::Error(RequestError::NotFinite),
                    };
                    self.end(id, finish);
                }
                Event::ImageWanted { id, index, image } => self.place(id, index, image),
                Event::ImageRead { patches } => self.pictures.read(patches),
                Event::Arrived { id } | Event::Preempted { id } => {
                    if let Some(since) = self.arriving.remove(&id) {
                        let now = self.shared.clock.now_us();
                        self.stats.copy_wait_us += now.saturating_sub(since);
                    }
                }
            }
        }
        self.events = events;
        for (id, why) in broken {
            self.break_off(id, why);
        }
        self.forget_unread();
    }

    fn take_admission(&mut self, id: u64) -> Option<Admission> {
        if self.admissions.is_empty() { None } else { self.admissions.remove(&id) }
    }

    /// The terminal output of a request that the scheduler no longer knows.
    fn end(&mut self, id: u64, finish: FinishReason) {
        if let Some(Arrival { place, .. }) = self.forget_arrival(id) {
            self.shared.queued.left(place, self.shared.clock.now_us());
        }
        self.admissions.remove(&id);
        self.arriving.remove(&id);
        let in_flight = self.scheduler.as_ref().is_some_and(|scheduler| scheduler.in_flight() > 0);
        self.payloads.retire(id, in_flight.then_some(self.last_step));
        self.constrained.give(id);
        self.pictures.give(id);
        let id = RequestId(id);
        match self.outputs.last_mut() {
            Some(last) if last.id == id && last.finish.is_none() => last.finish = Some(finish),
            _ => {
                let finish = Some(finish);
                self.outputs.push(Output { finish, ..Output::of(id) });
            }
        }
    }

    /// How requests end while the hand is given up.
    fn failure(&self) -> Option<FinishReason> {
        match &*self.shared.status.lock() {
            Status::Failed(reason) => {
                Some(FinishReason::Error(RequestError::HandFailed(reason.clone())))
            }
            _ => None,
        }
    }

    /// Ends every request: because the hand does not come back, or because the engine stops.
    fn end_all(&mut self) {
        let finish = self.failure().unwrap_or(FinishReason::Abort);
        let Some(scheduler) = self.scheduler.as_mut() else {
            return;
        };
        let ids: Vec<u64> = scheduler.live().collect();
        for id in ids {
            if self.scheduler.as_mut().is_some_and(|s| s.abort(id)) {
                self.end(id, finish.clone());
            }
        }
    }

    fn deliver(&mut self) {
        self.publish();
        self.tell_blocks();
        if !self.outputs.is_empty() {
            let next = Vec::with_capacity(self.outputs.len());
            self.sink.deliver(std::mem::replace(&mut self.outputs, next));
        }
    }

    fn tell_blocks(&mut self) {
        let (Some(observer), Some(scheduler)) = (&mut self.blocks, &mut self.scheduler) else {
            return;
        };
        let mut events = Vec::new();
        scheduler.take_block_events(&mut events);
        if !events.is_empty() {
            observer.changed(events);
        }
    }

    fn publish(&mut self) {
        let Some(scheduler) = &self.scheduler else {
            return;
        };
        let scheduler = scheduler.stats();
        let hand = HandStats {
            saved_bytes: scheduler.host.blocks_saved * self.page_bytes,
            restored_bytes: scheduler.host.blocks_restored * self.page_bytes,
            ..self.stats
        };
        *self.shared.stats.lock() = Stats { scheduler, hand };
    }

    fn timeout(&self) -> Option<u64> {
        let now = self.shared.clock.now_us();
        let in_flight = self.scheduler.as_ref().is_some_and(|s| s.in_flight() > 0);
        let hand = if self.restart_at.is_some() {
            self.restart_at
        } else if let Some(since) = self.loading_us {
            let limit = self.config.load_timeout_us;
            (limit > 0).then(|| since.saturating_add(limit))
        } else if in_flight {
            Some(self.progress_us.saturating_add(self.config.watchdog_us))
        } else {
            (self.unchecked && self.up).then_some(now.saturating_add(IDLE_CHECK_US))
        };
        let queue = self.deadlines.first().map(|&(at, _)| at);
        let next = hand.into_iter().chain(queue).min()?;
        Some(next.saturating_sub(now))
    }

    fn timed_out(&mut self) {
        if let Some(since) = self.loading_us {
            let limit = self.config.load_timeout_us;
            let silent = self.shared.clock.now_us().saturating_sub(since);
            if limit > 0 && silent >= limit {
                self.executor.stop();
                self.died(&format!(
                    "no sign of life for {} s while it started",
                    silent / 1_000_000
                ));
            }
            return;
        }
        let Some(scheduler) = &self.scheduler else {
            return;
        };
        if !self.up {
            return;
        }
        if scheduler.in_flight() == 0 {
            self.unchecked = false;
            if let Err(broken) = scheduler.check_integrity() {
                error!("the books do not balance: {broken}");
                debug_assert!(false, "the books do not balance: {broken}");
            }
            return;
        }
        let silent = self.shared.clock.now_us().saturating_sub(self.progress_us);
        if silent >= self.config.watchdog_us {
            self.executor.stop();
            self.died(&format!("no result for {} s", silent / 1_000_000));
        }
    }

    fn loading(&mut self, stage: String) {
        self.loading_us = Some(self.shared.clock.now_us());
        let mut status = self.shared.status.lock();
        *status = match &*status {
            Status::Recovering(_) => Status::Recovering(stage),
            _ => Status::Starting(stage),
        };
    }

    fn ready(&mut self, facts: Ready) {
        let pages = facts.page_count;
        let host = self.config.host.filter(|_| facts.host_page_count > 0);
        let row_pages = facts.hot_row_tokens.div_ceil(self.config.page_size);
        let sparse = host
            .filter(|_| row_pages > 0)
            .map(|host| Sparse { row_pages, save_rows: host.save_rows });
        // An answer may outgrow the device's pages where it goes on without them.
        let positions = if sparse.is_some() { facts.host_page_count } else { pages };
        let pool = positions.saturating_mul(self.config.page_size);
        let host_pages = facts.host_page_count;
        let hot_rows = facts.hot_row_tokens;
        let graphs = facts.graphs;
        info!(device = %facts.device, pages, host_pages, hot_rows, graphs, seconds = facts.load_seconds, "hand ready");
        self.page_bytes = facts.page_bytes;
        self.constrained.vocabulary = facts.vocab_size;
        if self.scheduler.is_none() {
            let longest = if pages == 0 { u32::MAX } else { pool };
            let context_length = self.config.context_length.min(longest);
            if context_length < self.config.context_length {
                warn!(context_length, "the KV pool is smaller than the context length");
            }
            self.shared.room.store(context_length, Ordering::Release);
            let page_size = self.config.page_size;
            let hot = if pages == 0 { u32::MAX } else { pages.saturating_mul(page_size) };
            // A prompt is computed with all of its pages on the device, and one more for the first token.
            let prompt_length = context_length.min(hot.saturating_sub(u32::from(sparse.is_some())));
            *self.shared.facts.lock() =
                Some(Facts { context_length, prompt_length, page_size, hand: facts.clone() });
            self.scheduler = Some(Scheduler::new(SchedulerConfig {
                slots: self.config.slots,
                max_running: self.config.max_running,
                pages,
                page_size: self.config.page_size,
                token_budget: self.config.token_budget,
                prefix_cache: self.config.prefix_cache,
                namer: self.config.namer.clone(),
                block_events: self.blocks.is_some(),
                policy: self.config.policy,
                fair: self.config.fair,
                step_words: STEP_WORDS,
                vector_size: facts.hidden_size,
                tokens_a_row: facts.tokens_a_row.max(1),
                sparse,
                tower: (facts.tower_layers > 0).then_some(Tower {
                    layers: facts.tower_layers,
                    pages: facts.image_page_count,
                    page_tokens: facts.image_page_tokens.max(1),
                    budget: self.config.image_budget,
                }),
                host: host.map(|host| HostTier {
                    pages: facts.host_page_count,
                    policy: host.policy,
                    copies_a_step: host.copies_a_step,
                    prefetch: host.prefetch,
                    restore_preempted: host.restore_preempted,
                }),
            }));
        }
        self.recovery.ready(self.shared.clock.now_us());
        self.loading_us = None;
        self.up = true;
        self.rested = true;
        // Whoever sees that it is ready may rely on its being in the set.
        if let Some(peers) = &self.peers {
            peers.up(true);
        }
        *self.shared.status.lock() = Status::Ready;
    }

    fn died(&mut self, reason: &str) {
        let was_up = std::mem::take(&mut self.up);
        let copies_hang = std::mem::take(&mut self.copies_hang);
        let computes = self.scheduler.as_ref().is_some_and(Scheduler::computes);
        let computing = was_up && computes && !copies_hang;
        self.loading_us = None;
        self.copying_us = None;
        self.arriving.clear();
        self.stats.deaths += 1;
        self.payloads.hand_died();
        self.forget_masks();
        self.unchecked = true;
        if was_up && let Some(scheduler) = self.scheduler.as_mut() {
            let poisoned = if copies_hang {
                scheduler.reset_for_copies();
                Vec::new()
            } else {
                scheduler.reset()
            };
            for id in poisoned {
                error!(request = id, "a request brought the hand down twice");
                self.end(id, FinishReason::Error(RequestError::Poisoned));
            }
        }
        if let Some(peers) = &self.peers {
            peers.up(false);
        }
        match self.recovery.died(self.shared.clock.now_us(), computing) {
            Verdict::RestartAt(at) => {
                warn!("the hand died ({reason}); it is respawned and requests are replayed");
                *self.shared.status.lock() = Status::Recovering(reason.to_owned());
                self.restart_at = Some(at);
            }
            Verdict::GiveUp { again_at } => {
                error!("the hand cannot start: {reason}");
                *self.shared.status.lock() = Status::Failed(reason.to_owned());
                self.over = self.peers.as_ref().is_none_or(|peers| !peers.others_live());
                self.restart_at = (!self.over).then_some(again_at);
            }
        }
        self.give_away();
    }

    fn restart_if_due(&mut self) {
        if self.restart_at.is_some_and(|at| at <= self.shared.clock.now_us()) {
            self.restart_at = None;
            {
                let mut status = self.shared.status.lock();
                if let Status::Failed(reason) = &*status {
                    let again = format!("another try after: {reason}");
                    *status = match self.scheduler {
                        Some(_) => Status::Recovering(again),
                        None => Status::Starting(again),
                    };
                }
            }
            self.start();
        }
    }
}
