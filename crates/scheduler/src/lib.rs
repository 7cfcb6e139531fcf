//! Plans the next steps of a replica. Pure and synchronous: no I/O, no clock, no threads, and no
//! order that depends on hashing.
//!
//! The loop: [`Scheduler::submit`] requests, take the [`Scheduler::next_plan`],
//! [`Scheduler::apply`] its result. Plans may run ahead of results by [`MAX_IN_FLIGHT`]. A decode
//! row's input token is gathered on the device, so a step can be planned before the last one's
//! tokens are known.
//!
//! Each request has three counters, `cached <= computed <= total`. `cached` counts positions found
//! in the prefix cache, and `computed` those computed or planned. `total` counts tokens that exist,
//! or will exist when the steps in flight are done. A request can be planned while
//! `computed < total`. A row that reaches `total` samples a token, or several if the hand can do
//! that ([`SchedulerConfig::tokens_a_row`]). For a pooled request
//! ([`forebay_protocol::SlotSpec::pooling`]) that row is the last, and returns the vector.
//!
//! Without pages ([`SchedulerConfig::pages`] is 0) there is no KV cache: each prompt is computed in
//! one row, and a step may contain many prompts.
//!
//! With a host tier ([`SchedulerConfig::host`]) blocks are also saved in host memory. Plans contain
//! page copies, and results report the finished ones. A request whose blocks are in host memory is
//! admitted, but has no row until they are restored. Other requests run meanwhile. A plan may
//! contain only copies, or nothing. The hand returns the result of a plan without rows when a copy
//! has finished.
//!
//! With drafts ([`SchedulerConfig::drafts`]) a decode row may have further tokens that its request
//! is expected to generate ([`Request::proposer`]). The hand samples tokens for them as for any
//! other position. The row returns the sampled tokens up to and including the first that differs
//! from its draft.
//!
//! With places for adapters ([`SchedulerConfig::places`]) a request may have an adapter
//! ([`Request::adapter`]). It is scheduled only while its adapter is in a place. Plans start the
//! loading of adapters, and results report the finished loads, as for copies.
//!
//! With a vision tower ([`SchedulerConfig::tower`]) prompts may have images. A plan computes some
//! layers of an image. Rows end before an image that is not computed yet.
//!
//! A request is held while its payload is not yet in the memory of its hand ([`Request::held`]).
//!
//! A masked row whose mask is not ready sits out the step ([`Scheduler::sit_out`]), and its request
//! gets no further token until the mask is ready.
//!
//! A request that [leaves](Request::leaves) generates one token here. When its blocks are saved,
//! another scheduler continues it and borrows them ([`Scheduler::hand_on`]).
//!
//! With recurrent layers ([`SchedulerConfig::states`]) a request can continue from a cached prefix
//! only at a position whose state was kept. Rows end at positions whose state is to be kept.
//!
//! With a window part ([`SchedulerConfig::windows`]) sliding-window layers have a separate page
//! pool. A request frees its pages there when its window has passed them. It can continue from a
//! cached prefix only if that pool also has the prefix's last blocks.
//!
//! With sparse decoding ([`SchedulerConfig::sparse`]) a request can decode while most of its pages
//! are only in host memory.
//!
//! A [`Scheduler`] implements the operations. Five types own its state. None of them can access the
//! scheduler, so a function's signature shows what it changes:
//!
//! - `roster`: the live requests, the slots, and the ordered sets of requests with a slot.
//! - `turns`: which request is admitted next, and which one is preempted.
//! - `memory`: pages, the prefix cache in them, tiers, and sparse decoding.
//! - `images`: images of prompts, and the vision tower.
//! - `places`: the adapters in the hand's memory, the requests that wait for one, and their rules.
//!
//! The other modules contain rules that involve several of these types:
//!
//! - `plan`: the steps and their rows; `passing`: shares of a step's tokens; `admit`: which request
//!   gets a slot.
//! - `drafts`: tokens that requests are expected to generate (`expected`). A row computes them
//!   together with the request's last known token.
//! - `grow`: pages for running requests; `words`: the size of a plan; `prompts`: log-probabilities
//!   of prompts.
//! - `moves`: queued requests that move to another scheduler; `held`: requests whose payload is not
//!   in the hand's memory yet.
//! - `waits`: requests whose mask is not ready; `leave`: running requests that another scheduler
//!   continues.
//! - `preempt`: how requests lose their slot and pages; `retirement`: when those can be reused.
//! - `apply`: results; `reset`: the hand's death, and quarantine.
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
/// flight runs the loop serially, and gets the same tokens.
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
    /// Requests that got a row ahead of their turn in this step (`passing`). Empty between calls.
    passed: Vec<Handle>,
    /// True while a step is planned in which background work gets no rows.
    background_waits: bool,
    /// Requests that wait for their blocks to be saved, and then leave. Some may have ended since.
    leaving: Vec<Handle>,
    /// True while requests that leave are not admitted.
    holds_leaving: bool,
}

impl Scheduler {
    /// Creates a scheduler without requests. The first step is 1.
    ///
    /// # Panics
    /// If `slots`, `max_running`, `page_size` or `tokens_a_row` is 0, `slots` is too large for a
    /// plan, or the pages do not suffice for one sparse request.
    #[must_use]
    pub fn new(mut config: SchedulerConfig) -> Self {
        let numbers = [config.slots, config.max_running, config.page_size, config.tokens_a_row];
        assert!(numbers.iter().all(|&n| n > 0), "nothing can run with {config:?}");
        words::check_slots(&config);
        let memory = Memory::new(&config);
        // A hand that returns several tokens per row makes its own drafts.
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

    /// Changes the page counts to those of a restarted hand. All blocks are forgotten. Call
    /// one of the resets ([`Self::reset`]) first. Each live request has to fit into the pages if it
    /// runs alone.
    pub fn resize(&mut self, counts: PageCounts) {
        debug_assert!(self.in_flight() == 0 && self.roster.residents.is_empty(), "it was reset");
        self.memory.resize(counts);
        self.turns.unblock();
    }

    /// Ends a request without an event; the caller answers its client. Returns false if no live
    /// request has this id.
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

    /// Records that the patches of a wanted image are in the arena. Returns false if no request
    /// needs them any more.
    pub fn image_placed(&mut self, image: ImageId, patches: u32) -> bool {
        self.images.placed(image, patches)
    }

    /// Ends every request that waits for an image, because the image could not be loaded. The
    /// requests end without an event. Returns their ids, each with the index of the image in that
    /// request.
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

    /// The number of plans whose results are outstanding.
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

    /// The number of copies between tiers, and of adapter loads, whose ends are not reported yet.
    #[must_use]
    pub fn copies_outstanding(&self) -> usize {
        self.memory.copies_outstanding() + self.places.coming()
    }

    /// Ids of the live requests, in a deterministic order.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        self.roster.requests.iter().map(|(_, entry)| entry.request.id)
    }

    /// Checks all state for consistency: pages and slots, the counters of each request against its
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
