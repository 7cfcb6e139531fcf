//! The loop that owns a replica.

mod carrying;
mod constrained;
mod events;
mod hand;
mod handover;
mod pictures;
mod queue;

pub use queue::MOST_VIEWS;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, Sender};
use forebay_protocol::{StepPlan, StepResult};
use forebay_scheduler::{Event, Scheduler};

use crate::config::EngineConfig;
use crate::executor::{Executor, Signal};
use crate::handle::{EngineHandle, Order, Shared, positions};
use crate::journal::{Notes, StepNote, What};
pub(crate) use crate::owner::carrying::Carried;
use crate::owner::carrying::Carrying;
pub(crate) use crate::owner::constrained::Constrained;
use crate::owner::pictures::Pictures;
use crate::payload::Held;
use crate::recovery::Recovery;
use crate::types::{
    Admission, Arrival, BlockObserver, EngineRequest, FinishReason, HandStats, Output, OutputSink,
    Peers, RequestError, Stats,
};

/// The listeners to outputs, to blocks, and to the hand's death.
type Listeners = (Box<dyn OutputSink>, Option<Box<dyn BlockObserver>>, Option<Box<dyn Peers>>);

pub(crate) struct Owner {
    config: EngineConfig,
    executor: Box<dyn Executor>,
    sink: Box<dyn OutputSink>,
    blocks: Option<Box<dyn BlockObserver>>,
    peers: Option<Box<dyn Peers>>,
    shared: Arc<Shared>,
    lane: Receiver<Order>,
    /// The orders' sender, for threads that put images where the hand reads them.
    orders: Sender<Order>,
    /// Known with the hand's first facts.
    scheduler: Option<Scheduler>,
    /// The hand takes plans.
    up: bool,
    recovery: Recovery,
    restart_at: Option<u64>,
    /// The last time at which the hand showed life while it was starting.
    loading_us: Option<u64>,
    /// Neither this hand nor another one comes back.
    over: bool,
    plan: StepPlan,
    events: Vec<Event>,
    outputs: Vec<Output>,
    /// Requests that were never admitted.
    arrivals: HashMap<u64, Arrival>,
    /// The times at which requests have waited too long, with their ids; empty if they may wait
    /// without a limit.
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
    /// The payloads of requests in the arena.
    payloads: Held,
    pictures: Pictures,
    carrying: Carrying,
    /// The constraints on their tokens.
    constrained: Constrained,
    /// The last step that was handed over.
    last_step: u64,
    stats: HandStats,
    notes: Notes,
    /// The time at which the last plan was made or the last result applied.
    noted_us: u64,
    /// The last time at which the hand showed life while a step was in flight.
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
            carrying: Carrying::default(),
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
            notes: Notes::default(),
            noted_us: 0,
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

    /// Takes every waiting order; false after [`Order::Stop`].
    fn take_orders(&mut self) -> bool {
        let mut entered = false;
        while let Ok(order) = self.lane.try_recv() {
            match order {
                Order::Submit { mut request, arrival } => {
                    let entering = &mut request.request;
                    match entering.arrived_us {
                        0 => entering.arrived_us = arrival.at_us,
                        at_us => self.notes.moment(entering.id, at_us, What::Received),
                    }
                    let (prompt, max_tokens) = (entering.prompt.len() as u32, entering.max_tokens);
                    let queued = What::Queued { prompt, max_tokens };
                    self.notes.moment(entering.id, arrival.at_us, queued);
                    self.arrived(entering.id, arrival);
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
                Order::Carried(carried) => self.carried(carried),
                Order::FlushCache(reply) => {
                    reply(self.scheduler.as_mut().is_none_or(Scheduler::flush_cache));
                }
                Order::Run(work) => work(),
                Order::Look(reply) => reply(self.look()),
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
        let has_to_wait = self.has_to_wait(&payloads);
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
        let id = request.id;
        request.held = has_to_wait;
        self.payloads.hold(id, payloads);
        self.pictures.hold(id, pictures);
        self.constrained.hold(id, constraint);
        scheduler.submit(request);
        if has_to_wait {
            self.carry_for(id);
        }
    }

    /// Plans as far ahead as the lookahead allows.
    fn feed(&mut self) {
        let most = self.config.lookahead as usize + 1;
        while let Some(scheduler) = self.scheduler.as_mut().filter(|_| self.up)
            && scheduler.in_flight() < most
        {
            let began = self.shared.clock.now_us();
            if !scheduler.next_plan(&mut self.plan, &mut self.events) {
                self.noted_us = began;
                break;
            }
            let planned_us = self.shared.clock.now_us();
            self.noted_us = planned_us;
            let in_flight = scheduler.in_flight() as u32 - 1;
            if in_flight == 0 {
                self.progress_us = planned_us;
            }
            self.notes.planned(StepNote {
                step: self.plan.step(),
                planned_us,
                done_us: 0,
                device_us: 0,
                gap_us: 0,
                planned: scheduler.planned(),
                plan_us: u32::try_from(planned_us.saturating_sub(began)).unwrap_or(u32::MAX),
                in_flight,
            });
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
        self.noted_us = self.progress_us;
        self.payloads.answered(result.step);
        self.stats.device_us += u64::from(result.device_us);
        let rested = self.rested_step == Some(result.step) || result.row_errors.is_empty();
        let gap_us = if rested { 0 } else { result.gap_us };
        self.stats.idle_us += u64::from(gap_us);
        self.notes.done(result.step, self.noted_us, result.device_us, gap_us);
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

    fn deliver(&mut self) {
        self.publish();
        self.notes.write(&self.shared.journal);
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
}
