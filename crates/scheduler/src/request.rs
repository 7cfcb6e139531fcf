//! A submitted request, and its position in the order of requests.

use std::sync::Arc;

use forebay_draft::Proposer;
use forebay_kvcache::{BlockHash, Loan};
use forebay_protocol::SlotSpec;

use crate::images::prompt::PromptImage;
use crate::prompts::PromptTail;
use crate::slab::Handle;

/// A validated request. It can still be refused only for lack of capacity.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The id, unique among the live requests.
    pub id: u64,
    /// Prompt token ids, at least one, each below the vocabulary size. For a prompt of embeddings
    /// only the number of ids matters. All choices (`n`) of a prompt share the ids until each gets
    /// its own copy at its admission.
    pub prompt: Arc<[i32]>,
    /// The images of the prompt, in order ([`PromptImage::place`]). The token ids at their
    /// positions are ignored.
    pub images: Arc<[PromptImage]>,
    /// Tokens that another brain or replica has generated. None is a stop id. They count towards
    /// `max_tokens`, and their number has to be below it. The request continues as if they were
    /// generated here. Only new tokens are reported.
    pub generated: Vec<i32>,
    /// Names of the leading full blocks of prompt and generated tokens, as far as they are known
    /// already.
    pub names: Arc<[BlockHash]>,
    /// The largest number of tokens to generate. It is 0 for a pooled prompt, or if only
    /// log-probabilities of the prompt are requested. `prompt.len() + max_tokens` is at most the
    /// context length, and fits into the page pool, if the model has one.
    pub max_tokens: u32,
    /// The parameters of the request on the device.
    pub spec: SlotSpec,
    /// True if masks restrict the request's tokens. Its rows are
    /// [`forebay_protocol::Want::Masked`], and the caller fills the masks.
    pub masked: bool,
    /// The proposer of drafts, which already has the prompt and the generated tokens; `None`: the
    /// request has no drafts.
    pub proposer: Option<Box<dyn Proposer>>,
    /// The request for log-probabilities of the prompt's tokens. It needs a prompt of tokens, not
    /// of embeddings, that is not pooled.
    pub prompt_logprobs: Option<PromptTail>,
    /// The priority; larger goes first, under [`crate::Policy::Priority`].
    pub priority: i32,
    /// The request's client: within a priority, clients take turns.
    pub client: u64,
    /// True for background work. It goes after all other requests under every policy, and gives its
    /// slot and pages to them.
    pub background: bool,
    /// True for a health check of the model. It goes before all other requests, and is accepted
    /// even if the queue is full. It runs even if [`crate::SchedulerConfig::max_running`] requests
    /// run.
    pub probe: bool,
    /// The salt. Requests share cached blocks only with requests of the same salt; 0: no salt was
    /// given.
    pub cache_salt: u64,
    /// The adapter that changes the request's rows, by its id on the hand; `None`: the base model.
    /// The adapter's content has to be part of `cache_salt`.
    pub adapter: Option<u32>,
    /// The time of arrival, in microseconds of the engine's clock; 0: the time at which the engine
    /// received the request. Only for display ([`crate::Scheduler::views`]).
    pub arrived_us: u64,
    /// True if the payload is not yet in the memory of the hand. The request is not scheduled
    /// before [`crate::Scheduler::release`].
    pub held: bool,
    /// True if another scheduler continues the request after its next token
    /// ([`crate::Event::Left`]).
    pub leaves: bool,
    /// Leading blocks in the host tier of another replica. They are borrowed at the next admission,
    /// as far as they are in no tier here.
    pub loan: Option<Arc<Loan>>,
    /// The request's history in another scheduler, if there is one.
    pub past: Past,
}

/// The state that a request keeps from the scheduler that surrendered it
/// ([`crate::Scheduler::surrender`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Past {
    /// True if the other scheduler had admitted the request. Unless it was handed on, its next
    /// admission is a replay.
    pub admitted: bool,
    /// True if another scheduler has handed the request on as planned
    /// ([`crate::Scheduler::hand_on`]), or has computed its prompt for this one. The next admission
    /// is not a replay, and restores lent blocks instead of computing them.
    pub handed: bool,
    /// True if the request was handed on, but no scheduler could take it, or the hand of the
    /// scheduler that took it died before the admission. The request then goes before requests that
    /// were never admitted.
    pub returned: bool,
    /// The number of leading positions that a suspect has to get past, alone in flight, to be
    /// cleared. `None`: the request is not suspected of having killed the other scheduler's hand.
    pub suspect: Option<u32>,
    /// The number of times that the request may still move to another scheduler while it waits.
    pub moves_left: u8,
}

impl Past {
    /// True if the request goes before all requests that were never admitted. A request that was
    /// handed on does not: a steady flow of such requests would starve the others.
    pub(crate) fn goes_first(&self) -> bool {
        self.admitted && (!self.handed || self.returned)
    }
}

/// The rank of background work, after every priority.
pub(crate) const BACKGROUND_RANK: i64 = i64::MAX;

/// A request's position in the order of importance: smaller is more important. It never changes, so
/// a preempted or replayed request is the first to be admitted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The request's rank: smaller is more important. Depends on the priority, unless the policy is
    /// [`crate::Policy::Fcfs`]. Probes and background work have fixed ranks.
    pub(crate) rank: i64,
    /// The arrival number; below 0 if the request goes first ([`Past::goes_first`]).
    pub(crate) arrival: i64,
}

impl Key {
    /// True for background work.
    pub(crate) fn is_background(self) -> bool {
        self.rank == BACKGROUND_RANK
    }
}

/// The fields of a request that decide its turn in the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) key: Key,
    pub(crate) handle: Handle,
    pub(crate) client: u64,
    /// The largest number of tokens that the request may reach.
    pub(crate) cost: u64,
}
