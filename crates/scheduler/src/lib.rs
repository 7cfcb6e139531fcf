//! Plans the next steps of a replica. Pure and synchronous: no I/O, no clock, no threads, and no
//! order that depends on hashing.
//!
//! Three verbs: [`Scheduler::submit`] a request, take the [`Scheduler::next_plan`],
//! [`Scheduler::apply`] its result. Plans may run ahead of results by [`MAX_IN_FLIGHT`]. A decode
//! row's input token is gathered on the device, so a step can be planned before the last one's
//! tokens are known.
//!
//! A request carries `cached <= computed <= total`. `cached` counts positions found in the prefix
//! cache, and `computed` those computed or planned. `total` counts tokens that exist, or will exist
//! when the steps in flight are done. A request can be planned while `computed < total`. A row that
//! reaches `total` samples a token. For a request that wants a vector
//! ([`forebay_protocol::SlotSpec::pooling`]) it is the last row. A sampling row gives one token, or
//! several if the hand can do that ([`SchedulerConfig::tokens_a_row`]).
//!
//! Without pages ([`SchedulerConfig::pages`] is 0) nothing is kept between steps: every prompt is
//! one row, and many share a step.
//!
//! With a host tier ([`SchedulerConfig::host`]) blocks outlive the device's memory. Plans name
//! copies of pages, and results report their ends. A request whose blocks are in host memory is
//! admitted, and has no row until they are back. Others go on meanwhile. A plan may also have only
//! copies, or nothing. Then the hand answers when a copy has ended.
//!
//! With a vision tower ([`SchedulerConfig::tower`]) prompts may have images. Plans compute some
//! layers of an image a step. Rows end before an image that is not computed yet.
//!
//! A request is held while its payload is not yet in the memory of its hand ([`Request::held`]).
//!
//! A masked row whose mask is not ready sits its step out ([`Scheduler::sit_out`]), and its request
//! gets no further token until the mask is there.
//!
//! With sparse decoding ([`SchedulerConfig::sparse`]) a request goes on while most of its pages are
//! in host memory only.
//!
//! Each file has some of these rules:
//!
//! - `queue`: the next request; `share`: the request that has to give way.
//! - `plan`: the rows; `words`: the size of a plan; `prompts`: log-probabilities of prompts.
//! - `transfer`: copies between tiers; `sparse`: pages given up while a request goes on.
//! - `images`: the next image in the tower; `held`: requests that have no turn yet; `waits`:
//!   requests whose mask is not ready.
//! - `retire`: slots and pages, preemption; `apply`: tokens, ends.
//! - `reset`: the hand's death, quarantine; `integrity`: facts that are always true.
//!
//! A request's two tokens, from a device that samples 42 for every request:
//!
//! ```
//! use forebay_protocol::{ROW_OK, StepPlan, StepResult};
//! use forebay_scheduler::{ApplyError, Event, Request, Scheduler};
//! # use forebay_scheduler::{Namer, Policy, STEP_WORDS, SchedulerConfig};
//! # let config = SchedulerConfig {
//! #     slots: 4,
//! #     max_running: 2,
//! #     pages: 16,
//! #     page_size: 4,
//! #     token_budget: 16,
//! #     prefix_cache: true,
//! #     namer: Namer::open(),
//! #     block_events: false,
//! #     policy: Policy::Fcfs,
//! #     fair: true,
//! #     step_words: STEP_WORDS,
//! #     vector_size: 0,
//! #     tokens_a_row: 1,
//! #     host: None,
//! #     sparse: None,
//! #     tower: None,
//! # };
//!
//! let mut scheduler = Scheduler::new(config);
//! let prompt = [11, 12, 13].into();
//! scheduler.submit(Request { id: 7, prompt, max_tokens: 2, ..Request::default() });
//!
//! let (mut plan, mut events) = (StepPlan::default(), Vec::new());
//! while scheduler.next_plan(&mut plan, &mut events) {
//!     let samples = plan.rows().filter(|row| row.want.samples()).count();
//!     let result = StepResult {
//!         step: plan.step(),
//!         tokens: vec![42; samples],
//!         row_errors: vec![ROW_OK; plan.rows().len()],
//!         ..StepResult::default()
//!     };
//!     scheduler.apply(&result, &mut events)?;
//! }
//!
//! let is_token = |event: &&Event| matches!(event, Event::Token { id: 7, token: 42, .. });
//! assert_eq!(events.iter().filter(is_token).count(), 2);
//! # Ok::<(), ApplyError>(())
//! ```

mod apply;
mod config;
mod event;
mod fair;
mod held;
mod images;
mod integrity;
mod plan;
mod prompts;
mod queue;
mod rates;
mod request;
mod reset;
mod retire;
mod share;
mod slab;
mod sparse;
mod transfer;
mod view;
mod waits;
mod words;

use std::collections::{BTreeMap, HashMap, VecDeque};

pub use forebay_kvcache::{BlockEvent, BlockHash, ImageId, Namer, Place};
use forebay_kvcache::{ImageLease, Tiers};
use forebay_protocol::{PromptLogprobsWant, Want};

use crate::images::Images;
use crate::queue::{PROBE_RANK, Queue};
use crate::rates::Rates;
use crate::request::{Entry, Key, Pages, State};
use crate::share::Shares;
use crate::slab::{Handle, Slab};

pub use crate::config::{HostTier, Policy, SavePolicy, SchedulerConfig, Sparse, Tower};
pub use crate::event::{ApplyError, Event, Finish, HostStats, ImageStats, SparseStats, Stats};
pub use crate::fair::FairQueue;
pub use crate::images::{PromptImage, image_words};
pub use crate::prompts::PromptTail;
pub use crate::request::{Past, Request};
pub use crate::view::{Phase, Planned, RequestView};
pub use crate::words::{MAX_REQUEST_WORDS, STEP_WORDS, request_words};

/// The largest number of plans whose results are outstanding. With one plan at a time the caller
/// has the serial loop, and gets the same tokens.
pub const MAX_IN_FLIGHT: usize = 2;

/// A row of a step in flight.
#[derive(Debug, Clone, Copy)]
struct FlightRow {
    handle: Handle,
    start: u32,
    end: u32,
    want: Want,
    /// The log-probabilities of its prompt that it gives.
    prompt: Option<PromptLogprobsWant>,
    /// True if it was to sample, and gives no token: its last position comes again.
    sits_out: bool,
}

/// Layers for an image, in a step in flight.
#[derive(Debug, Clone, Copy)]
struct FlightImage {
    /// The request that waits for it.
    handle: Handle,
    /// The end of the image's positions in that request.
    end: u32,
}

/// Resources that wait for the last step that names them.
#[derive(Debug, Default)]
struct Retired {
    /// `None`: pages alone, of a request that goes on.
    slot: Option<u32>,
    pages: Pages,
    images: Vec<ImageLease>,
}

/// A planned step.
#[derive(Debug, Default)]
struct Flight {
    step: u64,
    rows: Vec<FlightRow>,
    sampled: usize,
    pooled: usize,
    /// Words of its result for log-probabilities of prompts.
    answer_words: usize,
    retired: Vec<Retired>,
    towers: Vec<FlightImage>,
    /// The places of the patches that it reads.
    read: Vec<u32>,
}

impl Flight {
    /// The requests whose work is in it.
    fn handles(&self) -> impl Iterator<Item = Handle> {
        let rows = self.rows.iter().map(|row| row.handle);
        rows.chain(self.towers.iter().map(|image| image.handle))
    }
}

/// The state of one replica. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    tiers: Tiers,
    free_slots: Vec<u32>,
    requests: Slab<Entry>,
    by_id: HashMap<u64, Handle>,
    next_arrival: i64,
    /// The arrival number for the next request that another scheduler had admitted.
    next_return: i64,

    /// The waiting requests, without the suspects.
    queue: Queue,
    shares: Shares,
    /// The waiting request that did not fit, until pages come back: looking again before is a
    /// waste.
    blocked: Option<Key>,
    /// Suspects of the hand's death, resident or not. While there are any, only the first of them
    /// has rows.
    suspects: BTreeMap<Key, Handle>,
    /// Everybody with a slot.
    residents: BTreeMap<Key, Handle>,
    /// The residents in prefill.
    prefills: BTreeMap<Key, Handle>,
    /// The residents whose blocks come back from the host tier.
    arriving: BTreeMap<Key, Handle>,
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
    planned: Planned,
    rates: Rates,
    /// The images; `None`: the model takes none.
    images: Option<Images>,
    /// Leading blocks of requests that ended before all of these were saved.
    unfinished: Vec<Vec<BlockHash>>,
}

impl Scheduler {
    /// A scheduler without requests. The first step is 1.
    ///
    /// # Panics
    /// A number in `config` is 0 although it must not be.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Self {
        let numbers = [config.slots, config.max_running, config.page_size, config.tokens_a_row];
        assert!(numbers.iter().all(|&n| n > 0), "nothing can run with {config:?}");
        words::check_slots(config.slots);
        let of_use = config.pages > 0 && config.prefix_cache;
        let host = config.host.filter(|_| of_use);
        let sparse = config.sparse.filter(|_| host.is_some());
        let config = SchedulerConfig { host: host.map(|host| host.with(sparse)), sparse, ..config };
        let mut tiers = empty_tiers(&config);
        if config.block_events {
            tiers.note_events();
        }
        Self {
            tiers,
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
            arriving: BTreeMap::new(),
            decodes: Vec::new(),
            next_step: 1,
            in_flight: VecDeque::new(),
            building: Flight::default(),
            spare: Vec::new(),
            needy: Vec::new(),
            counters: Stats::default(),
            planned: Planned::default(),
            rates: Rates::default(),
            unfinished: Vec::new(),
            images: config.tower.map(Images::new),
            config,
        }
    }

    /// Queues a validated request. Its id is unique. It has at least one prompt token and one token
    /// to generate. It fits into the page pool if it runs alone.
    pub fn submit(&mut self, request: Request) {
        debug_assert!(!request.prompt.is_empty(), "validated");
        let pools = request.spec.pooling.is_some();
        let tail = request.prompt_logprobs.map_or(u32::MAX, |tail| tail.first);
        let tells = (tail as usize) < request.prompt.len();
        debug_assert!(tail > 0 && !(tells && (pools || request.spec.embeds.is_some())));
        debug_assert!((pools || tells) || request.max_tokens > 0, "there is something to do");
        debug_assert!(!pools || request.max_tokens == 0, "validated");
        debug_assert!(request.images.is_empty() || self.images.is_some(), "validated");
        debug_assert!(
            request.generated.is_empty() || request.generated.len() < request.max_tokens as usize,
            "there is something left to generate"
        );
        debug_assert!(!self.keeps_nothing() || pools, "decoding needs pages");
        debug_assert!(
            self.keeps_nothing()
                || request.prompt.len() as u64 + u64::from(request.max_tokens)
                    <= u64::from(self.config.most_positions()),
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
        let (id, suspect, held) = (request.id, request.past.suspect.is_some(), request.held);
        let handle = self.requests.insert(Entry::new(request, key, &self.config.namer));
        let previous = self.by_id.insert(id, handle);
        debug_assert!(previous.is_none(), "two live requests with id {id}");
        if held {
            return;
        }
        if suspect {
            self.suspects.insert(key, handle);
        } else {
            self.enqueue(handle);
        }
    }

    /// Goes on with another number of pages in each tier, because the hand came back with so many.
    /// All blocks are forgotten. The caller has called [`Self::reset`] or its like. Each live
    /// request has to fit into the pages if it runs alone.
    pub fn resize(&mut self, pages: u32, host_pages: u32) {
        debug_assert!(self.in_flight.is_empty() && self.residents.is_empty(), "it was reset");
        self.config.pages = pages;
        if let Some(host) = &mut self.config.host {
            host.pages = host_pages;
        }
        let mut tiers = empty_tiers(&self.config);
        tiers.go_on_from(&self.tiers);
        self.tiers = tiers;
        self.blocked = None;
    }

    /// Puts a request into the queue that is not there.
    fn enqueue(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        self.queue.insert(entry.ticket(handle), entry.request.past.admitted);
        self.shares.changed();
    }

    /// Ends a request without an event; the caller tells its client. False: there is no such
    /// request, or no more.
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(&handle) = self.by_id.get(&id) else {
            return false;
        };
        self.remove(handle);
        true
    }

    /// Forgets every cached block that no request uses, in all tiers. True: the cache is empty now.
    /// False: blocks of running requests stay.
    pub fn flush_cache(&mut self) -> bool {
        self.images.iter_mut().for_each(Images::flush);
        self.tiers.flush()
    }

    /// Appends the blocks that entered or left the prefix cache since the last call.
    pub fn take_block_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.tiers.take_events(into);
    }

    /// The numbers of this moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let pages = self.tiers.hot().counts();
        Stats {
            running: self.residents.len(),
            waiting: self.requests.len() - self.residents.len(),
            pages_held: pages.held as usize,
            pages_cached: pages.cached as usize,
            pages_free: pages.free as usize,
            host: self.host_stats(),
            sparse: self.sparse_stats(),
            images: self.image_stats(),
            ..self.counters
        }
    }

    /// Plans whose results are outstanding.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The requests of the masked rows of the newest plan, in row order.
    pub fn masked(&self) -> impl Iterator<Item = u64> {
        let rows = self.in_flight.back().map_or(&[][..], |flight| &flight.rows);
        let masked = rows.iter().filter(|row| row.want == Want::Masked);
        masked.map(|row| self.requests[row.handle].request.id)
    }

    /// True if a step in flight computes anything.
    #[must_use]
    pub fn computes(&self) -> bool {
        self.in_flight.iter().any(|flight| flight.handles().next().is_some())
    }

    /// Copies between tiers whose ends are not reported yet.
    #[must_use]
    pub fn copies_outstanding(&self) -> usize {
        self.tiers.outstanding()
    }

    /// Ids of the live requests, in an order that is the same in every run.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        self.requests.iter().map(|(_, entry)| entry.request.id)
    }

    /// True if the model has no keys and values, and so no pages.
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

/// Tiers without blocks, as large as the configuration says.
fn empty_tiers(config: &SchedulerConfig) -> Tiers {
    let host_pages = config.host.map_or(0, |host| host.pages);
    let Some(sparse) = config.sparse else { return Tiers::new(config.pages, host_pages) };
    let least = sparse.least_pages();
    assert!(config.pages >= least, "{} pages, but {least} are needed", config.pages);
    Tiers::backed(config.pages, host_pages, config.page_size)
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // After a panic the state may be half changed, and a second panic would hide the first.
        if !std::thread::panicking() {
            self.release_everything();
            self.tiers.hand_died(false);
        }
    }
}
