//! A replica in virtual time: a real scheduler, and a device that only takes time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use forebay_balance::MOST_MOVES;
use forebay_protocol::{ROW_OK, SparseRows, StepPlan, StepResult};
use forebay_scheduler::{
    BlockEvent, BlockHash, Event, HandedRequest, ImageId, LentBlocks, Loan, LoanId, MAX_IN_FLIGHT,
    Namer, Past, Policy, QueuedRequest, Request, STEP_WORDS, Scheduler, SchedulerConfig,
};
use forebay_sim::{Bus, CopyFault, Jitter, Timeline};

use crate::args::Router;
use crate::images::{ImageMeans, Intake};
use crate::router::Route;
use crate::simulate::Setup;
use crate::traffic::Arrival;

/// The number of waiting requests that are considered for a move, as in the engine.
const LATEST: usize = 8;

/// A step that was planned and has not ended.
#[derive(Debug, Clone, Copy, Default)]
struct Flight {
    step: u64,
    sparse_rows: SparseRows,
    rows: usize,
    sampled: usize,
    ends_us: u64,
    device_us: u64,
}

/// A replica.
pub(crate) struct Replica {
    scheduler: Scheduler,
    /// The largest number of plans in flight.
    depth: usize,
    flights: VecDeque<Flight>,
    timeline: Timeline,
    /// Microseconds for which the device has computed.
    pub(crate) busy_us: u64,
    /// The number of requests that have not ended.
    pub(crate) alive: u32,
    /// The largest number of simultaneously waiting requests.
    pub(crate) queue_peak: usize,
    /// The largest number of simultaneously running requests.
    pub(crate) running_peak: usize,
    /// The next generated token. Generated tokens count up from the smallest integer, so that they
    /// differ from all prompt tokens and from each other.
    next_token: i32,
    plan: StepPlan,
    result: StepResult,
    events: Vec<Event>,
    seeing: Option<ImageMeans>,
    intake: Intake,
    /// The largest number of times that a request may move.
    most_moves: u8,
    number: usize,
    page_size: u64,
    /// Returns loans to their lenders, as (lender, loan).
    returned: Sender<(usize, LoanId)>,
}

impl Replica {
    /// Creates replica number `index` of `setup`. Its loans are returned through `returned`.
    pub(crate) fn new(
        setup: &Setup,
        index: u32,
        bus: Bus,
        returned: Sender<(usize, LoanId)>,
    ) -> Self {
        let slots = setup.max_running + setup.max_running.div_ceil(2);
        let scheduler = Scheduler::new(SchedulerConfig {
            places: 0,
            slots,
            max_running: setup.max_running,
            pages: setup.pages,
            page_size: setup.page_size,
            token_budget: setup.token_budget,
            prefix_cache: setup.prefix_cache,
            namer: Namer::open(),
            block_events: setup.prefix_cache
                && (setup.router == Router::PrefixAware || setup.division.is_some()),
            policy: Policy::Fcfs,
            fair: true,
            step_shares: setup.step_shares,
            // Traces do not mark requests as background work.
            background_share: 100,
            decode_gap: setup.decode_gap,
            step_words: STEP_WORDS,
            vector_size: 0,
            tokens_a_row: 1,
            drafts: None,
            host: setup.host,
            sparse: setup.sparse,
            tower: setup.seeing.map(|seeing| seeing.tower),
            states: setup.states,
            windows: None,
        });
        let sigma = setup.timing.model.jitter_sigma;
        let jitter = Jitter::new(sigma, setup.seed.wrapping_add(index.into()));
        Self {
            scheduler,
            depth: (setup.lookahead as usize + 1).min(MAX_IN_FLIGHT),
            flights: VecDeque::new(),
            timeline: Timeline::new(setup.timing, jitter, 0).on(bus),
            busy_us: 0,
            alive: 0,
            queue_peak: 0,
            running_peak: 0,
            next_token: i32::MIN,
            plan: StepPlan::default(),
            result: StepResult::default(),
            events: Vec::new(),
            seeing: setup.seeing,
            intake: Intake::default(),
            most_moves: if setup.moves() { MOST_MOVES } else { 0 },
            number: index as usize,
            page_size: setup.page_size.into(),
            returned,
        }
    }

    /// Submits a request. `loan`: blocks that another replica lends it.
    pub(crate) fn submit(
        &mut self,
        id: u64,
        arrival: &Arrival,
        route: Route,
        loan: Option<Arc<Loan>>,
    ) {
        self.alive += 1;
        self.scheduler.submit(Request {
            id,
            prompt: arrival.prompt().into(),
            names: route.names.into(),
            leaves: route.leaves,
            loan,
            max_tokens: arrival.output,
            images: Arc::clone(&arrival.images),
            client: arrival.client,
            past: Past { moves_left: self.most_moves, ..Past::default() },
            ..Request::default()
        });
    }

    /// Removes and returns a waiting request that is to move. Tries at most [`LATEST`] movable
    /// requests, from the end of the queue on, and takes the first for which `pays` holds.
    pub(crate) fn give(&mut self, pays: impl FnMut(&QueuedRequest<'_>) -> bool) -> Option<Request> {
        let id = self.scheduler.movable().take(LATEST).find(pays)?.id;
        self.alive -= 1;
        self.scheduler.withdraw(id)
    }

    /// Accepts a request that another replica has given up.
    pub(crate) fn take(&mut self, request: Request) {
        self.alive += 1;
        self.scheduler.submit(request);
    }

    /// Removes and returns a request that leaves after its prefill, with a loan of its blocks.
    pub(crate) fn hand_on(&mut self, id: u64) -> Option<Request> {
        let HandedRequest { mut request, lent } = self.scheduler.hand_on(id)?;
        self.alive -= 1;
        request.loan = lent.map(|lent| self.loan(lent));
        Some(request)
    }

    /// Lends the leading blocks of `names` that the host tier has; `None`: nothing can be lent.
    pub(crate) fn lend(&mut self, names: &[BlockHash]) -> Option<Arc<Loan>> {
        let lent = self.scheduler.lend(names)?;
        Some(self.loan(lent))
    }

    fn loan(&self, LentBlocks { loan, pages, states }: LentBlocks) -> Arc<Loan> {
        let (number, returned) = (self.number, self.returned.clone());
        let give_back = Box::new(move || {
            // The channel may be closed at the end of the simulation.
            let _ = returned.send((number, loan));
        });
        Arc::new(Loan::new(number as u32, pages, give_back).with_states(states))
    }

    /// Takes back a loan.
    pub(crate) fn take_back(&mut self, loan: LoanId) {
        self.scheduler.take_back(loan);
    }

    /// Stops or resumes the admission of requests that will be handed on.
    pub(crate) fn hold_leaving(&mut self, held: bool) {
        self.scheduler.hold_leaving(held);
    }

    /// The number of tokens for which free or cached pages have room.
    pub(crate) fn room(&self) -> u64 {
        let stats = self.scheduler.stats();
        (stats.pages_free + stats.pages_cached) as u64 * self.page_size
    }

    /// Plans steps as far ahead as the engine does.
    pub(crate) fn feed(&mut self, now_us: u64) {
        while self.flights.len() < self.depth
            && self.scheduler.next_plan(&mut self.plan, &mut self.events)
        {
            let step = self.plan.step();
            if self.plan.rows().len() == 0 && self.plan.images().next().is_none() {
                let span = self.timeline.wait(&self.plan, now_us, || CopyFault::None);
                self.flights.push_back(Flight { step, ends_us: span.end_us, ..Flight::default() });
                continue;
            }
            let (span, sparse_rows) = self.timeline.compute(&self.plan, now_us, || CopyFault::None);
            let (ends_us, device_us) = (span.end_us, span.end_us - span.start_us);
            self.busy_us += device_us;
            let rows = self.plan.rows();
            let flight = Flight {
                step,
                ends_us,
                device_us,
                sparse_rows,
                rows: rows.len(),
                sampled: rows.filter(|row| row.want.samples()).count(),
            };
            self.flights.push_back(flight);
        }
        let stats = self.scheduler.stats();
        self.queue_peak = self.queue_peak.max(stats.waiting);
        self.running_peak = self.running_peak.max(stats.running);
    }

    /// Starts to prepare an image, and returns the time at which it is ready.
    pub(crate) fn prepare(&mut self, image: ImageId, now_us: u64) -> u64 {
        self.seeing.map_or(now_us, |seeing| self.intake.take(image, now_us, &seeing))
    }

    /// Handles the next image that is ready.
    pub(crate) fn image_is_ready(&mut self) {
        if let Some(image) = self.intake.preparing.pop_front() {
            self.scheduler.image_placed(image, 0);
        }
    }

    /// The time at which the oldest step ends, in microseconds; `None`: no step is in flight.
    pub(crate) fn ends_us(&self) -> Option<u64> {
        self.flights.front().map(|flight| flight.ends_us)
    }

    /// Completes the oldest step.
    pub(crate) fn end_step(&mut self) {
        let Some(flight) = self.flights.pop_front() else { return };
        self.result.begin(flight.step);
        self.result.row_errors.resize(flight.rows, ROW_OK);
        self.timeline.report(flight.ends_us, &mut self.result);
        self.result.sparse_rows = Some(flight.sparse_rows);
        self.result.timing.device_us = u32::try_from(flight.device_us).unwrap_or(u32::MAX);
        for _ in 0..flight.sampled {
            self.result.tokens.push(self.next_token);
            self.next_token = self.next_token.wrapping_add(1) | i32::MIN;
        }
        let applied = self.scheduler.apply(&self.result, &mut self.events);
        debug_assert!(applied.is_ok(), "{applied:?}");
    }

    /// Removes and returns the events since the last call.
    pub(crate) fn events(&mut self) -> std::vec::Drain<'_, Event> {
        self.events.drain(..)
    }

    /// Appends the blocks that were added to or dropped from the cache since the last call.
    pub(crate) fn take_block_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.scheduler.take_block_events(into);
    }

    /// The scheduler's counters.
    pub(crate) fn stats(&self) -> forebay_scheduler::Stats {
        self.scheduler.stats()
    }
}
