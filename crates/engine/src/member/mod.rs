//! A member: one scheduler of an engine thread, with its requests and observers.

mod adapters;
mod carrying;
mod constrained;
mod events;
mod hand;
mod handover;
mod pause;
mod pausing;
mod pictures;
mod queue;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, Sender};
use forebay_protocol::{StepPlan, StepResult};
use forebay_scheduler::{ApplyError, Event, Scheduler};

use crate::config::{EngineConfig, micros};
use crate::handle::{EngineHandle, Order, Shared, positions};
use crate::journal::{EventKind, Notes, StepNote};
use crate::member::adapters::Adapters;
pub(crate) use crate::member::carrying::{Carrying, PayloadDelivery};
pub(crate) use crate::member::constrained::Constrained;
pub(crate) use crate::member::hand::{Cause, Pool};
use crate::member::pause::Pause;
use crate::member::pictures::Pictures;
pub use crate::member::queue::MOST_VIEWS;
use crate::payload::Held;
use crate::types::{
    Admission, Arrival, BlockObserver, EngineRequest, FinishReason, HandStats, Output, OutputSink,
    Peers, Reload, RequestError, Stats,
};

/// The sink for outputs, the observer of changes of blocks, and the access to the other replicas.
pub(crate) type Listeners =
    (Box<dyn OutputSink>, Option<Box<dyn BlockObserver>>, Option<Box<dyn Peers>>);

/// A summary of the orders that were taken from a member's channel.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TakenOrders {
    /// True if at least one order was taken.
    pub(crate) any: bool,
    /// True if requests arrived that another replica may have to take over.
    pub(crate) entered: bool,
    /// True after [`Order::Stop`]; later orders are still in the channel.
    pub(crate) stopped: bool,
}

/// A replica without its hand: the scheduler, the requests and the callbacks. An ordinary engine
/// thread has one member; the thread of a step group has one for each rank.
pub(crate) struct Member {
    config: EngineConfig,
    sink: Box<dyn OutputSink>,
    blocks: Option<Box<dyn BlockObserver>>,
    pub(crate) peers: Option<Box<dyn Peers>>,
    pub(crate) shared: Arc<Shared>,
    lane: Receiver<Order>,
    /// The sender of orders, for callbacks on other threads.
    orders: Sender<Order>,
    /// Created when the first hand reports its facts.
    pub(crate) scheduler: Option<Scheduler>,
    events: Vec<Event>,
    outputs: Vec<Output>,
    /// Requests that wait for their first admission.
    arrivals: HashMap<u64, Arrival>,
    /// The times at which requests will have waited too long, with their ids. Empty if there is no
    /// limit.
    deadlines: BTreeSet<(u64, u64)>,
    /// Admissions that no output has reported yet.
    admissions: HashMap<u64, Admission>,
    /// The time since which each request waits for its blocks to be restored.
    arriving: HashMap<u64, u64>,
    /// The time since which no copy in flight has finished, for the watchdog; `None`: no copy is in
    /// flight.
    copying_us: Option<u64>,
    /// The sizes of a page and of a state page in bytes, as the hand reports them.
    page_bytes: u64,
    state_bytes: u64,
    /// The payloads of requests in the arena.
    payloads: Held,
    pictures: Pictures,
    carrying: Carrying,
    pub(crate) adapters: Adapters,
    /// The current pause. `None`: there is none.
    pause: Option<Pause>,
    /// Reload orders that the owner has not taken yet.
    pub(crate) reloads: Vec<Reload>,
    /// The constraints of live requests.
    constrained: Constrained,
    /// Requests that are to be handed on to another replica.
    left: Vec<u64>,
    /// The number of the last step that was submitted.
    last_step: u64,
    stats: HandStats,
    notes: Notes,
    /// The time at which the last plan was made or the last result was applied.
    noted_us: u64,
    /// The time that making the last plan took, in microseconds.
    plan_us: u32,
}

impl Member {
    pub(crate) fn new(
        config: EngineConfig,
        (sink, blocks, peers): Listeners,
        handle: EngineHandle,
        lane: Receiver<Order>,
        constrained: Constrained,
        carrying: Carrying,
    ) -> Self {
        let EngineHandle { shared, orders } = handle;
        Self {
            config,
            sink,
            blocks,
            peers,
            shared,
            lane,
            orders,
            scheduler: None,
            events: Vec::new(),
            outputs: Vec::new(),
            arrivals: HashMap::new(),
            deadlines: BTreeSet::new(),
            admissions: HashMap::new(),
            arriving: HashMap::new(),
            copying_us: None,
            page_bytes: 0,
            state_bytes: 0,
            payloads: Held::default(),
            pictures: Pictures::default(),
            carrying,
            adapters: Adapters::default(),
            pause: None,
            reloads: Vec::new(),
            constrained,
            left: Vec::new(),
            last_step: 0,
            stats: HandStats::default(),
            notes: Notes::default(),
            noted_us: 0,
            plan_us: 0,
        }
    }

    /// Takes every waiting order, up to [`Order::Stop`].
    pub(crate) fn take_orders(&mut self) -> TakenOrders {
        let mut taken = TakenOrders::default();
        self.collect_masks();
        while let Ok(order) = self.lane.try_recv() {
            match order {
                Order::Submit { mut request, arrival } => {
                    let entering = &mut request.request;
                    match entering.arrived_us {
                        0 => entering.arrived_us = arrival.at_us,
                        at_us => self.notes.moment(entering.id, at_us, EventKind::Received),
                    }
                    let (prompt, max_tokens) = (entering.prompt.len() as u32, entering.max_tokens);
                    let queued = EventKind::Queued { prompt, max_tokens };
                    self.notes.moment(entering.id, arrival.at_us, queued);
                    self.arrived(entering.id, arrival);
                    self.enter(*request);
                    taken.entered = true;
                }
                Order::Adopt(orphan) => {
                    self.adopt(*orphan);
                    taken.entered = true;
                }
                Order::HandOver => taken.entered = true,
                Order::Spare(to) => self.spare(to),
                Order::Abort(id) => {
                    if self.scheduler.as_mut().is_some_and(|s| s.abort(id.0)) {
                        self.end(id.0, FinishReason::Abort);
                    } else if let Some(peers) = &self.peers {
                        peers.abort(id);
                    }
                }
                Order::Placed { image, placed } => self.placed(image, placed),
                Order::Carried(carried) => self.carried(carried),
                Order::Adapter(order) => self.adapters.follow(order),
                Order::Lend(names, reply) => {
                    let lent = self.scheduler.as_mut().and_then(|it| it.lend(&names));
                    reply.answer(lent.map(|lent| Arc::new(self.loan(lent))));
                }
                Order::TakeBack(loan) => {
                    self.scheduler.iter_mut().for_each(|it| _ = it.take_back(loan));
                }
                Order::WillSave(names, reply) => {
                    reply(self.scheduler.as_ref().is_some_and(|it| it.will_save(&names)));
                }
                Order::FlushCache(reply) => {
                    reply(self.scheduler.as_mut().is_none_or(Scheduler::flush_cache));
                }
                Order::Pause(mode, reply) => self.begin_pause(mode, reply),
                Order::Resume => self.end_pause(),
                Order::Reload(reload) => self.reloads.push(reload),
                Order::Run(work) => work(),
                Order::Look(reply) => reply(self.look()),
                Order::Stop => {
                    taken.stopped = true;
                    return taken;
                }
            }
            taken.any = true;
        }
        taken
    }

    /// Queues a request. If there is no hand, the caller decides afterwards what to do with the
    /// request.
    fn enter(&mut self, entering: EngineRequest) {
        let EngineRequest { mut request, payloads, pictures, constraint, .. } = entering;
        request.masked = constraint.is_some();
        let is_carried = self.has_to_wait(&payloads);
        let is_kept_back = self.pause.as_mut().is_some_and(|pause| pause.keeps_back(request.id));
        if self.scheduler.is_none() {
            let reason = "it is still starting".into();
            let finish = FinishReason::Error(RequestError::HandFailed(reason));
            return self.end(request.id, finish);
        }
        let room = self.shared.room.load(Ordering::Acquire);
        if positions(&request) > u64::from(room) {
            // When the request was checked, another replica had enough memory for it.
            let reason = format!(
                "no replica that is left has memory for this request: {room} positions fit"
            );
            let finish = FinishReason::Error(RequestError::HandFailed(reason));
            return self.end(request.id, finish);
        }
        if !self.adapters.knows(request.adapter) {
            let reason = "it was unloaded before the request came".into();
            return self.end(request.id, FinishReason::Error(RequestError::Adapter(reason)));
        }
        let Some(scheduler) = self.scheduler.as_mut() else { return };
        let (id, client) = (request.id, request.client);
        request.held = is_carried || is_kept_back;
        self.payloads.hold(id, payloads);
        self.pictures.hold(id, pictures);
        self.constrained.hold(id, client, constraint);
        scheduler.submit(request);
        if is_carried {
            self.carry_for(id);
        }
    }

    /// The number of plans in flight; the same for all members of a group.
    pub(crate) fn in_flight(&self) -> usize {
        self.scheduler.as_ref().map_or(0, Scheduler::in_flight)
    }

    /// True if a step in flight computes rows of this member.
    pub(crate) fn computes(&self) -> bool {
        self.scheduler.as_ref().is_some_and(Scheduler::computes)
    }

    /// True if one of the member's requests is suspected of having killed the hand.
    pub(crate) fn is_suspected(&self) -> bool {
        self.scheduler.as_ref().is_some_and(Scheduler::is_suspected)
    }

    /// Plans the next step. Returns false if there is nothing to do.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan) -> bool {
        let began = self.shared.clock.now_us();
        if self.is_paused() {
            return false;
        }
        let held = self.peers.as_ref().is_some_and(|peers| peers.holds_prompts());
        let planned = self.scheduler.as_mut().is_some_and(|scheduler| {
            scheduler.hold_leaving(held);
            scheduler.next_plan(plan, &mut self.events)
        });
        self.noted_us = if planned { self.shared.clock.now_us() } else { began };
        self.plan_us = u32::try_from(self.noted_us.saturating_sub(began)).unwrap_or(u32::MAX);
        planned
    }

    /// Makes a plan without work, with which the member takes part in the next step.
    pub(crate) fn idle(&mut self, plan: &mut StepPlan) {
        if let Some(scheduler) = self.scheduler.as_mut() {
            scheduler.idle_plan(plan);
        }
    }

    /// Records that the plan was submitted.
    pub(crate) fn note_planned(&mut self, plan: &StepPlan) {
        let Some(scheduler) = &self.scheduler else { return };
        self.last_step = plan.step();
        self.notes.planned(StepNote {
            step: plan.step(),
            planned_us: self.noted_us,
            done_us: 0,
            device_us: 0,
            gap_us: 0,
            planned: scheduler.planned(),
            plan_us: self.plan_us,
            in_flight: scheduler.in_flight() as u32 - 1,
        });
        self.note_masked(plan);
    }

    /// Applies the result of the oldest step. `rested` is true if the device's idle time before the
    /// step was not the host's fault; the idle time is then not counted.
    pub(crate) fn apply(&mut self, result: &StepResult, rested: bool) -> Result<(), ApplyError> {
        let Some(scheduler) = self.scheduler.as_mut() else {
            return Ok(());
        };
        scheduler.apply(result, &mut self.events)?;
        self.noted_us = self.shared.clock.now_us();
        self.payloads.answered(result.step);
        self.stats.device_us += u64::from(result.timing.device_us);
        if !result.row_errors.is_empty() {
            self.constrained.stepped(result.timing.device_us);
        }
        let gap_us = if rested || result.row_errors.is_empty() { 0 } else { result.timing.gap_us };
        self.stats.gap_us += u64::from(gap_us);
        self.notes.done(result.step, self.noted_us, result.timing.device_us, gap_us);
        self.take_events();
        Ok(())
    }

    /// Watches the copies in flight; `ended`: true if a copy has just finished. If no copy has
    /// finished within the watchdog's time limit, returns for how many seconds none has.
    pub(crate) fn watch_copies(&mut self, ended: bool) -> Option<u64> {
        let outstanding = self.scheduler.as_ref().map_or(0, Scheduler::copies_outstanding);
        if outstanding == 0 {
            self.copying_us = None;
            return None;
        }
        let now = self.shared.clock.now_us();
        let since = *self.copying_us.get_or_insert(now);
        if ended {
            self.copying_us = Some(now);
            return None;
        }
        let silent = now.saturating_sub(since);
        (silent >= micros(self.config.watchdog_timeout)).then_some(silent / 1_000_000)
    }

    pub(crate) fn deliver(&mut self) {
        self.publish();
        self.notes.write(&self.shared.journal);
        self.tell_blocks();
        if !self.outputs.is_empty() {
            let next = Vec::with_capacity(self.outputs.len());
            self.sink.deliver(std::mem::replace(&mut self.outputs, next));
        }
        // This replica's outputs have to be delivered before those of the other replica.
        self.hand_on();
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
        let bytes = |blocks, states| blocks * self.page_bytes + states * self.state_bytes;
        let (host, states) = (&scheduler.host, &scheduler.states);
        let hand = HandStats {
            saved_bytes: bytes(host.blocks_saved, states.copied),
            restored_bytes: bytes(host.blocks_restored, states.restored),
            ..self.stats
        };
        *self.shared.stats.lock() = Stats { scheduler, hand };
    }
}
