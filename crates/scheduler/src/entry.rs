//! A live request in the scheduler: its tokens, its three counters, and its slot and pages.

use std::collections::VecDeque;

use forebay_kvcache::{BlockHash, ImageLease, Namer};
use forebay_protocol::{NewSlot, Want};

use crate::expected::ExpectedDrafts;
use crate::memory::blocks::Blocks;
use crate::memory::pages::Pages;
use crate::request::{Key, Request, Ticket};
use crate::slab::Handle;
use crate::steps::FlightRow;

/// The slot and pages of a request while it runs.
#[derive(Debug)]
pub(crate) struct Residence {
    pub(crate) slot: u32,
    pub(crate) pages: Pages,
    /// Image pages by image; `None`: not on pages yet, or the request is past the image.
    pub(crate) images: Vec<Option<ImageLease>>,
    /// The number of leading images that the request's rows have passed.
    pub(crate) passed: usize,
    /// The last step whose plan names the slot or the pages.
    pub(crate) last_step: u64,
    pub(crate) stage: Stage,
}

/// The stage of a request while it runs.
#[derive(Debug)]
pub(crate) enum Stage {
    /// The request's leading blocks are being restored by these copies. No plan has named its slot
    /// and pages yet.
    Arriving(VecDeque<u32>),
    /// Prefill: the request computes known tokens.
    Prefill,
    /// Decode: one token per step, each from the previous one. `at` is the request's index in the
    /// roster's list.
    Decode { at: usize },
    /// All rows of the request are planned. Its vector, or the last log-probabilities of its
    /// prompt, are in the result of the last step that names it.
    Planned,
}

/// The state of a request's adapter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Seat {
    /// The request has no adapter, is held, or is leaving.
    #[default]
    None,
    /// The request waits for its adapter to get a place, and is not scheduled meanwhile.
    Waits,
    /// The request uses this place.
    Place(u32),
}

/// A live request. Its state follows from the counters `cached <= computed <= total`.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The request as it was submitted. Only `past` is updated. The first admission moves prompt,
    /// generated tokens and names to the fields below, so that queued choices share one prompt.
    pub(crate) request: Request,
    pub(crate) key: Key,
    /// Known prompt and generated tokens; empty before the first admission.
    pub(crate) tokens: Vec<i32>,
    pub(crate) prompt_len: u32,
    /// The largest number of tokens that the request may ever have.
    pub(crate) limit: u32,
    /// Positions whose keys and values were found in a tier at the last admission.
    pub(crate) cached: u32,
    /// Positions that are computed, or will be computed by the steps in flight.
    pub(crate) computed: u32,
    /// Tokens that exist, or certainly will exist after the steps in flight.
    pub(crate) total: u32,
    /// The slot and pages; `None`: the request waits without them.
    pub(crate) residence: Option<Residence>,
    pub(crate) blocks: Blocks,
    /// Positions that were computed when the request lost its pages.
    pub(crate) lost: u32,
    /// Prompt and answer tokens of the requests that were admitted ahead of this one while it was
    /// first in turn.
    pub(crate) passed: u64,
    /// True while the request's mask is not ready. None of its rows samples meanwhile.
    pub(crate) waits: bool,
    /// True if the request's next position was computed by a row that sat out, and has to be
    /// computed again.
    pub(crate) repeats: bool,
    /// The request's drafts.
    pub(crate) expected: ExpectedDrafts,
    pub(crate) seat: Seat,
    /// True while the request waits for its blocks to be saved, before another scheduler continues
    /// the request.
    pub(crate) leaving: bool,
}

/// Spare capacity for tokens at admission, so that the first steps allocate nothing.
const SPARE_TOKENS: usize = 64;

impl Entry {
    pub(crate) fn new(request: Request, key: Key, namer: &Namer) -> Self {
        let prompt_len = request.prompt.len() as u32;
        debug_assert!(request.spec.stop_ids.is_sorted(), "they are searched");
        Self {
            key,
            tokens: Vec::new(),
            prompt_len,
            limit: prompt_len.saturating_add(request.max_tokens),
            cached: 0,
            computed: 0,
            total: prompt_len + request.generated.len() as u32,
            residence: None,
            blocks: Blocks::new(namer.root(request.cache_salt)),
            lost: 0,
            passed: 0,
            waits: false,
            repeats: false,
            expected: ExpectedDrafts::default(),
            seat: Seat::default(),
            leaving: false,
            request,
        }
    }

    /// The request's entry in the queue.
    pub(crate) fn ticket(&self, handle: Handle) -> Ticket {
        Ticket { key: self.key, handle, client: self.request.client, cost: self.limit.into() }
    }

    /// The fields that a plan writes into a slot.
    pub(crate) fn slot(&self, slot: u32) -> NewSlot<'_> {
        let spec = &self.request.spec;
        let place = if let Seat::Place(at) = self.seat { Some(at) } else { None };
        NewSlot { slot, tokens: &self.tokens, prompt_len: self.prompt_len, spec, place }
    }

    /// True if the request is not scheduled: it waits for its payload or for the place of its
    /// adapter, or another scheduler takes it over.
    pub(crate) fn has_no_turn(&self) -> bool {
        self.request.held || self.leaving || self.seat == Seat::Waits
    }

    /// The stage of a resident.
    pub(crate) fn stage(&self) -> Option<&Stage> {
        self.residence.as_ref().map(|residence| &residence.stage)
    }

    /// True if the request waited for copies, and all have ended.
    pub(crate) fn has_arrived(&self) -> bool {
        matches!(self.stage(), Some(Stage::Arriving(pending)) if pending.is_empty())
    }

    /// True if a resident gets its pages one by one in prefill too.
    pub(crate) fn grows_in_prefill(&self) -> bool {
        self.residence.as_ref().is_some_and(|residence| residence.pages.grow_in_prefill())
    }

    /// The request, in the form that another scheduler can continue.
    pub(crate) fn into_request(mut self) -> Request {
        if !self.tokens.is_empty() {
            self.request.generated = self.tokens.split_off(self.prompt_len as usize);
            self.request.prompt = self.tokens.into();
            self.request.names = self.blocks.names.into();
        }
        self.request
    }

    /// True if the request is pooled into a vector, and generates nothing.
    pub(crate) fn pools(&self) -> bool {
        self.request.spec.pooling.is_some()
    }

    /// The number of positions that a suspect of the hand's death must get past to be cleared.
    /// `None`: the request is no suspect.
    pub(crate) fn mark(&self) -> Option<u32> {
        self.request.past.suspect
    }

    /// The number of known tokens; at most `total`, and less while sampled tokens are in flight.
    pub(crate) fn known(&self) -> u32 {
        let shared = self.request.prompt.len() + self.request.generated.len();
        (shared + self.tokens.len()) as u32
    }

    /// True if the request was never admitted and is no suspect of a hand's death. So it has no
    /// state but its position in the queue.
    pub(crate) fn is_untouched(&self) -> bool {
        let past = self.request.past;
        self.residence.is_none() && !past.admitted && past.suspect.is_none()
    }

    /// Copies the data that the request shares with others, before its admission.
    pub(crate) fn settle(&mut self) {
        if !self.tokens.is_empty() {
            return;
        }
        let prompt = std::mem::take(&mut self.request.prompt);
        let generated = std::mem::take(&mut self.request.generated);
        let known = prompt.len() + generated.len();
        let left = (self.limit as usize).saturating_sub(known);
        self.tokens = Vec::with_capacity(known + left.min(SPARE_TOKENS));
        self.tokens.extend_from_slice(&prompt);
        self.tokens.extend_from_slice(&generated);
        self.blocks.names = std::mem::take(&mut self.request.names).to_vec();
    }

    /// Names of the request's leading full blocks, as far as they are known.
    pub(crate) fn known_names(&self) -> &[BlockHash] {
        if self.tokens.is_empty() { &self.request.names } else { &self.blocks.names }
    }

    /// True if there is a position to compute now that is not planned yet. The last token that the
    /// request may have is never computed. A request that leaves computes nothing after its next
    /// token.
    pub(crate) fn plannable(&self) -> bool {
        let leaves = self.request.leaves && self.known() < self.total;
        !leaves
            && self.computed < self.total - u32::from(self.waits)
            && self.computed + 1 < self.limit
    }

    /// Leading positions that are certainly computed. The last one does not count while its masked
    /// row may still sit out, and be computed again.
    pub(crate) fn certain(&self) -> u32 {
        let unsure = self.request.masked && self.known() < self.total;
        self.computed.min(self.known()).saturating_sub(unsure.into())
    }

    /// Names the request's first `blocks` blocks, whose tokens must be known. Returns the names.
    pub(crate) fn name_blocks(
        &mut self,
        blocks: usize,
        page_size: usize,
        namer: &Namer,
    ) -> &[BlockHash] {
        self.blocks.extend(blocks, page_size, namer, &self.tokens, &self.request.images);
        &self.blocks.names[..blocks]
    }

    /// True if another replica has lent this block to the request.
    pub(crate) fn is_lent(&self, name: BlockHash) -> bool {
        self.request.loan.as_ref().is_some_and(|loan| loan.page(name).is_some())
    }

    /// Checks that the counters agree with the request's rows in flight.
    pub(crate) fn check<'a>(
        &self,
        rows: impl Iterator<Item = &'a FlightRow> + Clone,
    ) -> Result<(), String> {
        let Self { cached, computed, total, .. } = *self;
        let ensure = |fine: bool, wrong: &str| if fine { Ok(()) } else { Err(wrong.to_owned()) };
        ensure(cached <= computed && computed <= total && total <= self.limit, "in no order")?;
        let pending = rows.clone().filter(|row| row.want.samples()).count() as u32;
        let told = format!("{} known, {pending} in flight", self.known());
        ensure(self.known() + pending == total, &told)?;
        let Some(Residence { stage, last_step, .. }) = &self.residence else {
            return ensure(computed == 0, "but it owns no page");
        };
        match stage {
            Stage::Prefill => Ok(()),
            Stage::Decode { .. } => ensure(computed + 1 == total, "but it decodes"),
            Stage::Planned => {
                let last = |row: &&FlightRow| row.want == Want::Vector || row.prompt.is_some();
                let ends = rows.filter(last).any(|row| row.end == computed);
                ensure(computed == self.goal() && ends, "but all is planned")
            }
            // Rows from before a preemption may still be in flight.
            Stage::Arriving(_) => ensure(*last_step == 0 && computed == cached, "but it arrives"),
        }
    }
}
