//! Plans the next steps of a replica. Pure and synchronous: no I/O, no clock, no threads, and no
//! order that depends on hashing.
//!
//! The loop: [`Scheduler::submit`] requests, take the [`Scheduler::next_plan`],
//! [`Scheduler::apply`] its result. Plans may run ahead of results by [`MAX_IN_FLIGHT`]. A decode
//! row's input token is gathered on the device, so a step can be planned before the last one's
//! tokens are known.
//!
//! A request carries `cached <= computed <= total`. `cached` counts positions found in the prefix
//! cache, and `computed` those computed or planned. `total` counts tokens that exist, or will exist
//! when the steps in flight are done. A request can be planned while `computed < total`. A row that
//! reaches `total` samples a token. For a pooled request ([`forebay_protocol::SlotSpec::pooling`])
//! that is its last row. A sampling row gives one token, or several if the hand can do that
//! ([`SchedulerConfig::tokens_a_row`]).
//!
//! Without pages ([`SchedulerConfig::pages`] is 0) nothing is kept between steps: every prompt is
//! one row, and many share a step.
//!
//! With a host tier ([`SchedulerConfig::host`]) blocks outlive the device's memory. Plans name
//! copies of pages, and results report their ends. A request whose blocks are in host memory is
//! admitted, and has no row until they are back. Others go on meanwhile. A plan may also have only
//! copies, or nothing. The hand answers a plan without rows when a copy has ended.
//!
//! With drafts ([`SchedulerConfig::drafts`]) a decode row may have further tokens that its request
//! is expected to generate ([`Request::proposer`]). The hand samples tokens for them as for any
//! other position, and the row gives all tokens up to the first unexpected one, which is included.
//!
//! With places for adapters ([`SchedulerConfig::places`]) a request may have one
//! ([`Request::adapter`]). It has a turn only while its adapter is in a place. Plans bring adapters
//! there, and results report their ends, as for copies.
//!
//! With a vision tower ([`SchedulerConfig::tower`]) prompts may have images. Plans compute some
//! layers of an image a step. Rows end before an image that is not computed yet.
//!
//! A request is held while its payload is not yet in the memory of its hand ([`Request::held`]).
//!
//! A masked row whose mask is not ready sits its step out ([`Scheduler::sit_out`]), and its request
//! gets no further token until the mask is there.
//!
//! A request that [leaves](Request::leaves) gives one token here. When its blocks are saved,
//! another scheduler continues it and borrows them ([`Scheduler::hand_on`]).
//!
//! With recurrent layers ([`SchedulerConfig::states`]) a request goes on from a cached prefix only
//! where a state was kept. Rows end where states are to be kept.
//!
//! With a window part ([`SchedulerConfig::windows`]) layers with a window have pages of their own.
//! A request gives them back when its window has passed them, and goes on from a cached prefix only
//! where that part has the last blocks too.
//!
//! With sparse decoding ([`SchedulerConfig::sparse`]) a request goes on while most of its pages are
//! in host memory only.
//!
//! A [`Scheduler`] has the operations, and four owners of state. None of them has access to the
//! scheduler, so a rule's signature shows what it changes:
//!
//! - `roster`: the live requests, the slots, and the ordered sets of requests with a slot.
//! - `turns`: which request is next, and which one gives way.
//! - `memory`: pages, the prefix cache in them, tiers, and sparse decoding.
//! - `images`: images of prompts, and the vision tower.
//! - `places`: the adapters in the hand's memory, the requests that wait for one, and their rules.
//!
//! The other files hold rules that involve several owners:
//!
//! - `plan`: the steps and their rows; `passing`: shares of a step's tokens; `admit`: which request
//!   gets a slot.
//! - `drafts`: tokens that requests are expected to generate (`expected`), beside their last one.
//! - `grow`: pages for running requests; `words`: the size of a plan; `prompts`: log-probabilities
//!   of prompts.
//! - `moves`: queued requests that move to another scheduler; `held`: requests that have no turn
//!   yet.
//! - `waits`: requests whose mask is not ready; `leave`: running requests that another scheduler
//!   continues.
//! - `preempt`: the ways to lose slot and pages; `retirement`: the wait until they can be reused.
//! - `apply`: tokens, ends; `reset`: the hand's death, quarantine.
//!
//! Example: a request gets two tokens from a device that samples 42 for every request.
//!
//! ```
//! use forebay_protocol::{ROW_OK, StepPlan, StepResult};
//! use forebay_scheduler::{ApplyError, Event, Request, Scheduler};
//! # use forebay_scheduler::{DecodeGap, Namer, Policy, STEP_WORDS, SchedulerConfig};
//! # let config = SchedulerConfig {
//! #     places: 0,
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
//! #     step_shares: true,
//! #     background_share: 100,
//! #     decode_gap: DecodeGap::Auto,
//! #     step_words: STEP_WORDS,
//! #     vector_size: 0,
//! #     tokens_a_row: 1,
//! #     drafts: None,
//! #     host: None,
//! #     sparse: None,
//! #     tower: None,
//! #     states: None,
//! #     windows: None,
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

mod admit;
mod apply;
mod config;
mod drafting;
mod drafts;
mod entry;
mod event;
mod expected;
mod grow;
mod held;
mod images;
mod leave;
mod mean;
mod memory;
mod moves;
mod passing;
mod places;
mod plan;
mod preempt;
mod prompts;
mod request;
mod reset;
mod retirement;
mod roster;
mod slab;
mod steps;
mod turns;
mod view;
mod waits;
mod words;

pub use forebay_draft::{
    DraftMatch, DraftSource, History, Lookup, Proposer, SharedHistory, SharedText,
};
pub use forebay_kvcache::{BlockEvent, BlockHash, ImageId, Loan, LoanId, Namer, Place};
use forebay_protocol::Want;

use crate::drafting::Drafting;
use crate::entry::Entry;
use crate::images::Images;
use crate::memory::Memory;
use crate::places::Places;
use crate::request::Key;
use crate::roster::Roster;
use crate::slab::Handle;
use crate::steps::Steps;
use crate::turns::Turns;

pub use crate::config::{
    DecodeGap, Drafts, HostTier, PageCounts, Policy, SavePolicy, SchedulerConfig, Sparse,
    StateCache, Tower, WindowPart,
};
pub use crate::drafting::MAX_DRAFTED;
pub use crate::event::{
    ApplyError, DraftCounts, DraftStats, Event, Finish, HostStats, ImageStats, PlaceStats,
    SparseStats, StateStats, Stats, WindowStats,
};
pub use crate::images::prompt::{PromptImage, image_words};
pub use crate::leave::HandedRequest;
pub use crate::memory::loans::LentBlocks;
pub use crate::moves::QueuedRequest;
pub use crate::prompts::PromptTail;
pub use crate::request::{Past, Request};
pub use crate::steps::PlannedStep;
pub use crate::turns::fair::FairQueue;
pub use crate::view::{Phase, RequestView};
pub use crate::words::{MAX_REQUEST_WORDS, STEP_WORDS, request_words};

/// The largest number of plans whose results are outstanding. A caller that keeps only one plan in
/// flight has the serial loop, and gets the same tokens.
pub const MAX_IN_FLIGHT: usize = 2;

/// The state of one replica. See the crate's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    roster: Roster,
    turns: Turns,
    memory: Memory,
    images: Images,
    places: Places,
    steps: Steps,
    drafting: Drafting,
    counters: Stats,
    /// Requests that need a page this step. Empty between calls; kept to reuse its memory.
    needy: Vec<(Key, Handle)>,
    /// Prompts that have passed others in this step. Empty between calls.
    passed: Vec<Handle>,
    /// True while a step is planned in which background work gets no rows.
    background_waits: bool,
    /// Requests that leave when their blocks are saved. Some may have ended.
    leaving: Vec<Handle>,
    /// True while no request that leaves is admitted.
    holds_leaving: bool,
}

impl Scheduler {
    /// A scheduler without requests. The first step is 1.
    ///
    /// # Panics
    /// A number in `config` is 0 although it must not be.
    #[must_use]
    pub fn new(mut config: SchedulerConfig) -> Self {
        let numbers = [config.slots, config.max_running, config.page_size, config.tokens_a_row];
        assert!(numbers.iter().all(|&n| n > 0), "nothing can run with {config:?}");
        words::check_slots(&config);
        let memory = Memory::new(&config);
        // A hand that gives several tokens a row makes its own drafts.
        config.drafts = config.drafts.filter(|_| config.tokens_a_row == 1 && memory.takes_drafts());
        Self {
            roster: Roster::new(&config),
            turns: Turns::new(&config),
            memory,
            images: Images::new(config.tower),
            places: Places::new(config.places),
            steps: Steps::default(),
            drafting: Drafting::default(),
            counters: Stats::default(),
            needy: Vec::new(),
            passed: Vec::new(),
            background_waits: false,
            leaving: Vec::new(),
            holds_leaving: false,
            config,
        }
    }

    /// Queues a validated request. The caller guarantees that its id is unique, and that it has at
    /// least one prompt token and something to compute. It must fit into the page pool if it runs
    /// alone.
    pub fn submit(&mut self, request: Request) {
        self.check_request(&request);
        let (rank, held) = (self.turns.rank(&request), request.held);
        let handle = self.roster.add(request, rank, self.memory.namer());
        if !held {
            self.line_up(handle);
        }
    }

    /// Debug builds assert that the caller has validated a request.
    fn check_request(&self, request: &Request) {
        debug_assert!(!request.prompt.is_empty(), "validated");
        let pools = request.spec.pooling.is_some();
        let tail = request.prompt_logprobs.map_or(u32::MAX, |tail| tail.first);
        let tells = (tail as usize) < request.prompt.len();
        debug_assert!(tail > 0 && !(tells && (pools || request.spec.embeds.is_some())));
        debug_assert!((pools || tells) || request.max_tokens > 0, "there is something to do");
        debug_assert!(!pools || request.max_tokens == 0, "validated");
        debug_assert!(request.adapter.is_none() || self.config.places > 0, "validated");
        debug_assert!(request.images.is_empty() || self.config.tower.is_some(), "validated");
        debug_assert!(
            request.generated.is_empty() || request.generated.len() < request.max_tokens as usize,
            "there is something left to generate"
        );
        debug_assert!(self.config.pages > 0 || pools, "decoding needs pages");
        let positions = request.prompt.len() as u64 + u64::from(request.max_tokens);
        debug_assert!(self.memory.fits(positions), "a request alone fits into the pool");
    }

    /// Forgets all blocks of all tiers, because the next hand computes different keys and values
    /// for the same tokens. Call one of the resets ([`Self::reset`]) first.
    pub fn forget_blocks(&mut self) {
        debug_assert!(self.in_flight() == 0 && self.roster.residents.is_empty(), "it was reset");
        self.memory.forget();
        self.turns.unblock();
    }

    /// Changes the numbers of pages to those of a restarted hand. All blocks are forgotten. Call
    /// one of the resets ([`Self::reset`]) first. Each live request has to fit into the pages if it
    /// runs alone.
    pub fn resize(&mut self, counts: PageCounts) {
        debug_assert!(self.in_flight() == 0 && self.roster.residents.is_empty(), "it was reset");
        self.memory.resize(counts);
        self.turns.unblock();
    }

    /// Ends a request without an event; the caller answers its client. False: no live request has
    /// this id.
    pub fn abort(&mut self, id: u64) -> bool {
        let Some(handle) = self.roster.find(id) else { return false };
        self.remove(handle);
        true
    }

    /// Forgets every cached block that no request uses, in all tiers. True if the cache is empty
    /// now; blocks of running requests stay.
    pub fn flush_cache(&mut self) -> bool {
        self.images.flush();
        self.memory.flush()
    }

    /// Appends the blocks that entered or left the prefix cache since the last call.
    pub fn take_block_events(&mut self, into: &mut Vec<BlockEvent>) {
        self.memory.take_events(into);
    }

    /// Records that the patches of a wanted image are in the arena. False: no request needs them
    /// any more.
    pub fn image_placed(&mut self, image: ImageId, patches: u32) -> bool {
        self.images.placed(image, patches)
    }

    /// Ends every request that waits for an image, because the image could not be loaded. The
    /// requests end without an event. Returns the ids of the requests, and the number of the image
    /// among each request's.
    pub fn image_failed(&mut self, image: ImageId) -> Vec<(u64, usize)> {
        let waiting = self.images.who_wants(image, &self.roster);
        let ended = waiting.into_iter().map(|(handle, index)| {
            let id = self.roster[handle].request.id;
            self.remove(handle);
            (id, index)
        });
        ended.collect()
    }

    /// Appends the arena offsets of patches that no plan will read any more, and for which
    /// [`Event::ImageRead`] never comes.
    pub fn take_unread_patches(&mut self, into: &mut Vec<u32>) {
        self.images.take_unread(into);
    }

    /// The current counters and gauges.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let residents = &self.roster.residents;
        let mut stats = Stats {
            running: residents.len(),
            waiting: self.roster.requests.len() - residents.len(),
            images: self.images.stats(),
            places: self.places.stats(),
            ..self.counters
        };
        self.memory.count(&self.roster, &mut stats);
        stats
    }

    /// Plans whose results are outstanding.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.steps.in_flight.len()
    }

    /// The requests of the masked rows of the newest plan, in row order.
    pub fn masked(&self) -> impl Iterator<Item = u64> {
        let rows = self.steps.in_flight.back().map_or(&[][..], |flight| &flight.rows);
        let masked = rows.iter().filter(|row| matches!(row.want, Want::Masked(_)));
        masked.map(|row| self.roster[row.handle].request.id)
    }

    /// True if a step in flight computes anything.
    #[must_use]
    pub fn computes(&self) -> bool {
        self.steps.work().next().is_some()
    }

    /// Copies between tiers, and writes into places, whose ends are not reported yet.
    #[must_use]
    pub fn copies_outstanding(&self) -> usize {
        self.memory.copies_outstanding() + self.places.coming()
    }

    /// Ids of the live requests, in a deterministic order.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        self.roster.requests.iter().map(|(_, entry)| entry.request.id)
    }

    /// Checks all state for consistency: pages and slots, the numbers of each request against its
    /// tokens, pages and steps in flight, and the members of each queue. The time is proportional
    /// to the state, so this is for idle moments and tests.
    ///
    /// # Errors
    /// A description of the fault.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.memory.check(&self.roster)?;
        self.images.check(&self.roster)?;
        self.roster.check()?;
        self.turns.check(&self.roster)?;
        self.places.check(self.roster.requests.iter())?;
        for (handle, entry) in self.roster.requests.iter() {
            self.memory.check_pages(entry)?;
            entry.check(self.steps.rows_of(handle)).map_err(|wrong| {
                let Entry { cached, computed, total, .. } = entry;
                let id = entry.request.id;
                format!(
                    "request {id}: {cached} cached, {computed} computed, {total} total, {wrong}"
                )
            })?;
        }
        Ok(())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // After a panic the state may be half changed, and a second panic here would hide the
        // first.
        if !std::thread::panicking() {
            self.free_everything();
            self.memory.hand_died(false);
            self.memory.end_loans();
        }
    }
}
