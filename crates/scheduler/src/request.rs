//! A request in the scheduler: its tokens, its three numbers, and its slot and pages.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_kvcache::{BlockHash, Host, ImageLease, Lease, Namer, Tiers};
use forebay_protocol::{NewSlot, SlotSpec};

use crate::images::PromptImage;
use crate::prompts::PromptTail;
use crate::queue::Ticket;
use crate::slab::Handle;

/// A validated request. Only a lack of capacity can refuse it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The id, unique among the live requests.
    pub id: u64,
    /// Prompt token ids, at least one, each below the vocabulary size. For a prompt of embeddings
    /// only their number counts. The choices of a prompt share them, and each gets its own copy at
    /// its admission.
    pub prompt: Arc<[i32]>,
    /// The images of the prompt, in order ([`PromptImage::place`]). The tokens at their positions
    /// mean nothing.
    pub images: Arc<[PromptImage]>,
    /// Tokens that another brain or replica has generated. None is a stop id. They count towards
    /// `max_tokens` and are fewer. The request goes on after them as if they were generated here.
    /// Only new tokens are reported.
    pub generated: Vec<i32>,
    /// Names of the leading full blocks of prompt and generated tokens, as far as they are known
    /// already.
    pub names: Arc<[BlockHash]>,
    /// The largest number of tokens to generate. It is 0 for a pooled prompt, or if only
    /// log-probabilities of the prompt are wanted. `prompt.len() + max_tokens` is at most the
    /// context length, and fits into the page pool, if the model has one.
    pub max_tokens: u32,
    /// The parameters of the request on the device.
    pub spec: SlotSpec,
    /// True if masks restrict the request's tokens. Its rows are
    /// [`forebay_protocol::Want::Masked`], and the caller fills the masks.
    pub masked: bool,
    /// The demand for log-probabilities of the prompt's tokens. It needs a prompt of tokens, not of
    /// embeddings, that is not pooled.
    pub prompt_logprobs: Option<PromptTail>,
    /// The priority; larger goes first, under [`crate::Policy::Priority`].
    pub priority: i32,
    /// The request's client: within a priority, clients take turns.
    pub client: u64,
    /// True for a check that the model computes. It goes before all others, and a full queue does
    /// not refuse it. It runs even if [`crate::SchedulerConfig::max_running`] requests run.
    pub probe: bool,
    /// The salt. Requests share cached blocks only with requests of the same salt; 0: the request
    /// names none.
    pub cache_salt: u64,
    /// The time of arrival, in microseconds of the engine's clock; 0: the time at which the engine
    /// took it. It is only for display ([`crate::Scheduler::views`]).
    pub arrived_us: u64,
    /// True if the payload is not yet in the memory of the hand. The request has no turn before
    /// [`crate::Scheduler::release`].
    pub held: bool,
    /// The history with another scheduler, if there was one.
    pub past: Past,
}

/// The state that a request brings along from the scheduler that surrendered it
/// ([`crate::Scheduler::surrender`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Past {
    /// True if the other scheduler had admitted the request. It then goes before requests that were
    /// never admitted, and its next admission is a replay.
    pub admitted: bool,
    /// The number of positions up to which a suspect runs alone. A suspect may have killed the hand
    /// of the other scheduler. `None`: it is no suspect.
    pub suspect: Option<u32>,
}

/// The place in the order of importance. A smaller one is more important. It never changes, so a
/// preempted or replayed request comes back first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The negated priority, or 0 for all requests.
    pub(crate) rank: i64,
    /// The arrival number. It is below 0 for requests that another scheduler had admitted.
    pub(crate) arrival: i64,
}

/// Pages of a request.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    /// On the device, by position; `None`: given up, the host's memory has its content.
    pub(crate) hot: Vec<Option<Lease>>,
    /// The pages of the host's tier behind them; empty unless requests can be sparse.
    pub(crate) host: Vec<Lease<Host>>,
    /// The leases for the hot rows of a sparse request; empty: it is not sparse.
    pub(crate) rows: Vec<Lease>,
}

impl Pages {
    pub(crate) fn len(&self) -> usize {
        self.hot.len()
    }

    pub(crate) fn is_sparse(&self) -> bool {
        !self.rows.is_empty()
    }

    /// Leases of the device's pages.
    pub(crate) fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.hot.iter().flatten().chain(&self.rows)
    }

    /// Gives everything back, the deepest page first.
    pub(crate) fn release(&mut self, tiers: &mut Tiers) {
        self.rows.drain(..).for_each(|lease| tiers.release(lease));
        while let Some(hot) = self.hot.pop() {
            hot.into_iter().for_each(|lease| tiers.release(lease));
        }
        while let Some(host) = self.host.pop() {
            tiers.release_host(host);
        }
    }
}

/// The slot and pages of a request while it runs.
#[derive(Debug)]
pub(crate) struct Residence {
    pub(crate) slot: u32,
    pub(crate) pages: Pages,
    /// Leading pages that a sparse request has given up, or never will.
    pub(crate) settled: u32,
    /// Leading blocks that were found in the cache or offered to it.
    pub(crate) named: u32,
    /// Image pages by image; `None`: it is not there yet, or the request is past it.
    pub(crate) images: Vec<Option<ImageLease>>,
    /// Leading images that are behind it.
    pub(crate) passed: usize,
    /// The last step whose plan names the slot or the pages.
    pub(crate) last_step: u64,
}

/// The state of a request.
#[derive(Debug)]
pub(crate) enum State {
    /// The request is in a queue, and owns nothing.
    Waiting,
    /// The leading blocks of the request come back from the host tier by these copies. No plan has
    /// named its slot and pages yet.
    Arriving { residence: Residence, pending: VecDeque<u32> },
    /// Computing tokens that it knows.
    Prefill(Residence),
    /// One token a step, each from the one before. `at` is its index in the scheduler's list.
    Decode { residence: Residence, at: usize },
    /// All that it needs is planned: its vector, or the last log-probabilities of its prompt, will
    /// come with the last step that names it.
    Planned(Residence),
}

impl State {
    pub(crate) fn residence(&self) -> Option<&Residence> {
        match self {
            Self::Waiting => None,
            Self::Arriving { residence, .. }
            | Self::Prefill(residence)
            | Self::Decode { residence, .. }
            | Self::Planned(residence) => Some(residence),
        }
    }

    pub(crate) fn residence_mut(&mut self) -> Option<&mut Residence> {
        match self {
            Self::Waiting => None,
            Self::Arriving { residence, .. }
            | Self::Prefill(residence)
            | Self::Decode { residence, .. }
            | Self::Planned(residence) => Some(residence),
        }
    }
}

/// A live request. `cached <= computed <= total`, everything else follows.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The request as it was submitted. `past` is kept as it is now. Prompt, generated tokens and
    /// names move to the fields below at its first admission: until then a thousand choices in the
    /// queue have one prompt.
    pub(crate) request: Request,
    pub(crate) key: Key,
    /// Known prompt and generated tokens; empty before the first admission.
    pub(crate) tokens: Vec<i32>,
    pub(crate) prompt_len: u32,
    /// The largest number of tokens it may ever have.
    pub(crate) limit: u32,
    /// Positions whose keys and values were found in a tier at the last admission.
    pub(crate) cached: u32,
    /// Positions that are computed, or will be when the steps in flight are done.
    pub(crate) computed: u32,
    /// Tokens that exist, or will at least when the steps in flight are done.
    pub(crate) total: u32,
    pub(crate) state: State,
    /// The parent of the first block.
    root: BlockHash,
    /// Known names of its leading full blocks; empty before the first admission.
    pub(crate) names: Vec<BlockHash>,
    /// True if the request's blocks were brought back from the host tier before its turn, once.
    pub(crate) prefetched: bool,
    /// Positions that were computed when it lost its pages.
    pub(crate) lost: u32,
    /// True if the request was sparse when it ran last.
    pub(crate) was_sparse: bool,
    /// True while its mask is not ready: it has no row that samples.
    pub(crate) waits: bool,
    /// True if its next position was computed by a row that sat out.
    pub(crate) repeats: bool,
}

/// Tokens that an admitted request has room for beyond those it knows, so that its first steps
/// allocate nothing.
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
            state: State::Waiting,
            root: namer.root(request.cache_salt),
            names: Vec::new(),
            prefetched: false,
            lost: 0,
            was_sparse: false,
            waits: false,
            repeats: false,
            request,
        }
    }

    /// The request's place in the queue.
    pub(crate) fn ticket(&self, handle: Handle) -> Ticket {
        Ticket { key: self.key, handle, client: self.request.client, cost: self.limit.into() }
    }

    /// The part of it that a plan writes into a slot.
    pub(crate) fn slot(&self, slot: u32) -> NewSlot<'_> {
        let spec = &self.request.spec;
        NewSlot { slot, tokens: &self.tokens, prompt_len: self.prompt_len, spec }
    }

    /// The request that another scheduler can go on with.
    pub(crate) fn surrender(mut self) -> Request {
        if !self.tokens.is_empty() {
            self.request.generated = self.tokens.split_off(self.prompt_len as usize);
            self.request.prompt = self.tokens.into();
            self.request.names = self.names.into();
        }
        self.request
    }

    /// True if the request becomes a vector, and generates nothing.
    pub(crate) fn pools(&self) -> bool {
        self.request.spec.pooling.is_some()
    }

    /// Set while the request is suspected of having killed the hand: the number of positions it
    /// must get past to be cleared.
    pub(crate) fn mark(&self) -> Option<u32> {
        self.request.past.suspect
    }

    /// Tokens that are known; at most `total`, and less while sampled ones are in flight.
    pub(crate) fn known(&self) -> u32 {
        let shared = self.request.prompt.len() + self.request.generated.len();
        (shared + self.tokens.len()) as u32
    }

    /// Copies its shared data, before its admission.
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
        self.names = std::mem::take(&mut self.request.names).to_vec();
    }

    /// True if there is a position to compute now that is not planned yet. The last token that the
    /// request may have needs no compute.
    pub(crate) fn plannable(&self) -> bool {
        self.computed < self.total - u32::from(self.waits) && self.computed + 1 < self.limit
    }

    /// Leading positions that are computed and do not come again: the last one does if the row that
    /// samples after it sits out.
    pub(crate) fn certain(&self) -> u32 {
        let unsure = self.request.masked && self.known() < self.total;
        self.computed.min(self.known()).saturating_sub(unsure.into())
    }

    /// Names its leading blocks up to number `blocks`, whose tokens must be known.
    pub(crate) fn name_blocks(
        &mut self,
        blocks: usize,
        page_size: usize,
        namer: &Namer,
    ) -> &[BlockHash] {
        while self.names.len() < blocks {
            let at = self.names.len() * page_size;
            let parent = self.names.last().copied().unwrap_or(self.root);
            let images = PromptImage::within(&self.request.images, at as u32, page_size as u32);
            self.names.push(namer.child_with(parent, &self.tokens[at..at + page_size], images));
        }
        &self.names[..blocks]
    }
}
