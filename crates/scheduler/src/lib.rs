//! Decides what a replica computes next. Pure and synchronous: no I/O, no clock, no threads, and no order that depends on hashing.
//!
//! Three verbs: [`Scheduler::submit`] a request, take the [`Scheduler::next_plan`], [`Scheduler::apply`] its result. Plans may run ahead
//! of results by [`MAX_IN_FLIGHT`]: a decode row's input token is gathered on the device, so a step can be planned before the last
//! one's tokens are known.
//!
//! A request carries `cached <= computed <= total`: positions found in the prefix cache, positions computed or planned, tokens that exist or
//! will exist when the steps in flight are done. A request can be planned while `computed < total`, and a row that reaches `total` samples,
//! or ends a request that asks for a vector of its prompt ([`forebay_protocol::SlotSpec::pooling`]). A row that samples gives one token, or
//! several where the hand does that ([`SchedulerConfig::tokens_a_row`]).
//!
//! Without pages ([`SchedulerConfig::pages`] is 0) nothing is kept between steps: every prompt is one row, and many share a step.
//!
//! The rules, by file: `queue` (whose turn it is), `share` (who has to give way), `plan` (who gets a row), `words` (how large a plan may be), `retire` (slots and pages, preemption), `apply` (tokens, ends), `reset` (the hand died,
//! quarantine), `integrity` (what is always true).

mod apply;
mod integrity;
mod plan;
mod queue;
mod request;
mod reset;
mod retire;
mod share;
mod slab;
mod words;

use std::collections::{BTreeMap, HashMap, VecDeque};

use derive_more::AddAssign;
pub use forebay_kvcache::{BlockEvent, BlockHash, Namer};
use forebay_kvcache::{Lease, PagePool};
use forebay_protocol::Want;
use serde::Serialize;
use thiserror::Error;

use crate::queue::{PROBE_RANK, Queue};
use crate::request::{Entry, Key, State};
use crate::share::Shares;
use crate::slab::{Handle, Slab};

pub use crate::request::{Past, Request};
pub use crate::words::{MAX_REQUEST_WORDS, STEP_WORDS, request_words};

/// Most plans whose results are outstanding. A caller may stay below: with one at a time it is the serial loop, and gives the same tokens.
pub const MAX_IN_FLIGHT: usize = 2;

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// By arrival.
    Fcfs,
    /// By priority, larger first, then by arrival.
    Priority,
    /// By priority, smaller first, then by arrival.
    PriorityAscending,
}

/// What the scheduler has to give.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Rows of the device tables. Some more than `max_running`, because a slot is retired for up to [`MAX_IN_FLIGHT`] steps.
    pub slots: u32,
    /// Most requests that have a slot at a time.
    pub max_running: u32,
    /// Pages of the device; 0: the model keeps no keys and values, so that a prompt is computed whole or not at all.
    pub pages: u32,
    /// Positions a page.
    pub page_size: u32,
    /// Tokens a step (the chunked prefill size). Decode rows always all go; prefill gets what they leave, but at least one page.
    pub token_budget: u32,
    /// Whether blocks are shared between requests.
    pub prefix_cache: bool,
    /// Names blocks.
    pub namer: Namer,
    /// Whether somebody takes [`Scheduler::take_block_events`].
    pub block_events: bool,
    /// Who goes first.
    pub policy: Policy,
    /// Within a priority, clients take turns, and one that has nothing running need not wait for those of one that has much. Otherwise all
    /// requests are as one client's.
    pub fair: bool,
    /// Words that a plan may have when another request is admitted to it; [`STEP_WORDS`] but in tests.
    pub step_words: usize,
    /// Numbers of a vector, where the model pools: results have a size too.
    pub vector_size: u32,
    /// Most tokens that a row which samples may give; at least 1.
    pub tokens_a_row: u32,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// One of its stop ids was sampled. It is also the last [`Event::Token`].
    Stop {
        /// The id.
        token: i32,
    },
    /// It has all the tokens it may have, or its vector.
    Length,
    /// Its logits were not finite.
    NotFinite,
}

/// What happened to a request. [`Event::Finished`] is the last of each, and comes once; an aborted or poisoned request has none.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It got a slot and pages.
    Admitted {
        /// The request's id.
        id: u64,
        /// Prompt tokens found in the prefix cache, told at the first admission; 0 at later ones.
        cached_tokens: u32,
        /// It was admitted before, and computes again what it lost.
        replayed: bool,
    },
    /// A token was sampled.
    Token {
        /// The request's id.
        id: u64,
        /// The token.
        token: i32,
        /// When asked for: the sampled token first, then the most likely, descending; natural logarithms.
        logprobs: Option<Box<[(i32, f32)]>>,
    },
    /// Its vector was computed.
    Pooled {
        /// The request's id.
        id: u64,
        /// As the model made it, neither cut nor normalised.
        vector: Box<[f32]>,
    },
    /// It ended.
    Finished {
        /// The request's id.
        id: u64,
        /// Why.
        reason: Finish,
    },
    /// It lost its slot and pages to a more important one, or to a suspect that is to be tried, and waits again.
    Preempted {
        /// The request's id.
        id: u64,
    },
}

/// Why a result was not applied. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// A result came without a plan.
    #[error("result of step {step}, but no step is in flight")]
    NothingInFlight {
        /// The result's step.
        step: u64,
    },
    /// Results come in plan order.
    #[error("result of step {got}, but step {expected} is the oldest in flight")]
    WrongStep {
        /// The oldest step in flight.
        expected: u64,
        /// The result's step.
        got: u64,
    },
    /// A column does not fit the plan's rows.
    #[error(
        "result of step {step}: column {column} has {got} entries, the plan asks for {expected}"
    )]
    Column {
        /// The step.
        step: u64,
        /// The column's name in the protocol.
        column: &'static str,
        /// Entries that the plan asks for.
        expected: usize,
        /// Entries it has.
        got: usize,
    },
}

/// Numbers to show. Counters only grow, also across [`Scheduler::reset`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, AddAssign, Serialize)]
pub struct Stats {
    /// Requests with a slot.
    pub running: usize,
    /// Live requests without.
    pub waiting: usize,
    /// Pages leased by requests, or retired and not yet returned.
    pub pages_held: usize,
    /// Unreferenced pages that hold a named block.
    pub pages_cached: usize,
    /// Pages that hold nothing.
    pub pages_free: usize,
    /// Prompt tokens looked up in the prefix cache at first admissions.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Prompt tokens computed, cache hits not counted.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Times a request lost its pages to another.
    pub preemptions: u64,
    /// Results applied.
    pub steps: u64,
}

/// A row of a step in flight.
#[derive(Debug, Clone, Copy)]
struct FlightRow {
    handle: Handle,
    start: u32,
    end: u32,
    want: Want,
}

/// A slot and pages that wait for the last step that names them.
#[derive(Debug)]
struct Retired {
    slot: u32,
    leases: Vec<Lease>,
}

/// A planned step.
#[derive(Debug, Default)]
struct Flight {
    step: u64,
    rows: Vec<FlightRow>,
    sampled: usize,
    pooled: usize,
    retired: Vec<Retired>,
}

/// The state of one replica. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: PagePool,
    free_slots: Vec<u32>,
    requests: Slab<Entry>,
    by_id: HashMap<u64, Handle>,
    next_arrival: i64,
    /// The place of the next one that another scheduler had admitted.
    next_return: i64,

    /// Who waits, without the suspects.
    queue: Queue,
    shares: Shares,
    /// The waiting request that did not fit, until pages come back: looking again before is a waste.
    blocked: Option<Key>,
    /// Suspects of the hand's death, resident or not. While there are any, only the first of them has rows.
    suspects: BTreeMap<Key, Handle>,
    /// Everybody with a slot.
    residents: BTreeMap<Key, Handle>,
    /// The residents in prefill.
    prefills: BTreeMap<Key, Handle>,
    /// The residents in decode, in the order of their rows.
    decodes: Vec<Handle>,

    next_step: u64,
    in_flight: VecDeque<Flight>,
    /// The plan under construction, and emptied ones to use again.
    building: Flight,
    spare: Vec<Flight>,
    /// Requests that need a page this step. Empty between calls, kept for its memory.
    needy: Vec<(Key, Handle)>,
    counters: Stats,
}

impl Scheduler {
    /// A scheduler with nothing to do. The first step is 1.
    ///
    /// # Panics
    /// With a number in `config` that is 0 and must not be.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Self {
        let numbers = [config.slots, config.max_running, config.page_size, config.tokens_a_row];
        assert!(numbers.iter().all(|&n| n > 0), "nothing can run with {config:?}");
        words::check_slots(config.slots);
        let mut pool = PagePool::new(config.pages);
        if config.block_events {
            pool.note_events();
        }
        Self {
            pool,
            free_slots: (0..config.slots).rev().collect(),
            requests: Slab::new(),
            by_id: HashMap::new(),
            next_arrival: 0,
            next_return: i64::MIN,
            queue: Queue::new(config.fair),
            shares: Shares::default(),
            blocked: None,
            suspects: BTreeMap::new(),
            residents: BTreeMap::new(),
            prefills: BTreeMap::new(),
            decodes: Vec::new(),
            next_step: 1,
            in_flight: VecDeque::new(),
            building: Flight::default(),
            spare: Vec::new(),
            needy: Vec::new(),
            counters: Stats::default(),
            config,
        }
    }

    /// Queues a request. It was validated before: unique id, at least one prompt token and one token to generate, and alone it fits into
    /// the page pool.
    pub fn submit(&mut self, request: Request) {
        debug_assert!(!request.prompt.is_empty(), "validated");
        let pools = request.spec.pooling.is_some();
        debug_assert!(pools == (request.max_tokens == 0), "validated");
        debug_assert!(
            request.generated.is_empty() || request.generated.len() < request.max_tokens as usize,
            "there is something left to generate"
        );
        debug_assert!(!self.keeps_nothing() || pools, "decoding needs pages");
        debug_assert!(
            self.keeps_nothing()
                || request.prompt.len() as u64 + u64::from(request.max_tokens)
                    <= u64::from(self.config.pages) * u64::from(self.config.page_size),
            "a request alone fits into the pool"
        );
        let rank = match self.config.policy {
            _ if request.probe => PROBE_RANK,
            Policy::Fcfs => 0,
            Policy::Priority => -i64::from(request.priority),
            Policy::PriorityAscending => i64::from(request.priority),
        };
        let counter =
            if request.past.admitted { &mut self.next_return } else { &mut self.next_arrival };
        let key = Key { rank, arrival: *counter };
        *counter += 1;
        let (id, suspect) = (request.id, request.past.suspect.is_some());
        let handle = self.requests.insert(Entry::new(request, key, &self.config.namer));
        let previous = self.by_id.insert(id, handle);
        debug_assert!(previous.is_none(), "two live requests with id {id}");
        if suspect {
            self.suspects.insert(key, handle);
        } else {
            self.enqueue(handle);
        }
    }

    /// Puts a request into the queue that is not there.
    fn enqueue(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        self.queue.insert(entry.ticket(handle), entry.request.past.admitted);
        self.shares.changed();
    }

    /// Ends a request without an event: the caller tells its client. False: there is no such request (any more).
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(&handle) = self.by_id.get(&id) else {
            return false;
        };
        self.remove(handle);
        true
    }

    /// Forgets every cached block that no request uses. True: the cache is empty now; false: blocks of running requests stay.
    pub fn flush_cache(&mut self) -> bool {
        self.pool.flush();
        self.pool.blocks() == 0
    }

    /// Appends which blocks entered and left the prefix cache since the last time.
    pub fn take_block_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.pool.take_events(into);
    }

    /// The numbers of this moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let pages = self.pool.counts();
        Stats {
            running: self.residents.len(),
            waiting: self.requests.len() - self.residents.len(),
            pages_held: pages.held as usize,
            pages_cached: pages.cached as usize,
            pages_free: pages.free as usize,
            ..self.counters
        }
    }

    /// Plans whose results are outstanding.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Ids of the live requests, the same order in every run.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        self.requests.iter().map(|(_, entry)| entry.request.id)
    }

    /// Whether the model has no keys and values, and so no pages.
    fn keeps_nothing(&self) -> bool {
        self.config.pages == 0
    }

    /// Takes a request out of everything.
    fn remove(&mut self, handle: Handle) {
        self.vacate(handle);
        let Some(entry) = self.requests.remove(handle) else {
            return;
        };
        self.by_id.remove(&entry.request.id);
        self.queue.remove(&entry.ticket(handle));
        self.shares.gone(handle);
        self.suspects.remove(&entry.key);
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // After a panic the state may be half changed, and a second panic would hide the first.
        if !std::thread::panicking() {
            self.release_everything();
        }
    }
}
