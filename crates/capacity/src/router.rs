//! The choice of a replica for a request: a brain's policies, over the same ledger.

use forebay_balance::{Ask, Balancer, Ledger, Method, PrefixIndex, Work, drifted, move_pays};
use forebay_scheduler::{BlockEvent, BlockHash, Namer, PromptImage, QueuedRequest};

use crate::args::Router;
use crate::traffic::Arrival;

/// A router and its state.
#[derive(Debug)]
pub(crate) struct Routing {
    balancer: Balancer,
    ledger: Ledger,
    /// The blocks that the replicas hold, for policies that look at them.
    index: Option<PrefixIndex<BlockHash>>,
    page_size: u32,
}

impl Routing {
    /// Routes to `replicas` with pages of `page_size` tokens.
    pub(crate) fn new(policy: Router, replicas: u32, page_size: u32) -> Self {
        let method = match policy {
            Router::RoundRobin => Method::RoundRobin,
            Router::LeastLoaded => Method::ShortestQueue,
            Router::PrefixAware => Method::PrefixAware,
        };
        let replicas = replicas as usize;
        Self {
            balancer: Balancer::new(method),
            ledger: Ledger::new(replicas),
            index: (method == Method::PrefixAware).then(|| PrefixIndex::new(replicas)),
            page_size,
        }
    }

    /// The replica for a request, and the known names of its blocks. The request counts at the
    /// replica from now on.
    pub(crate) fn route(&mut self, id: u64, arrival: &Arrival) -> (usize, Vec<BlockHash>) {
        let tokens = u64::from(arrival.input);
        let (mut names, mut cached) = (Vec::new(), Vec::new());
        if let Some(index) = &self.index {
            let (prompt, page_size) = (arrival.prompt(), self.page_size as usize);
            names = PromptImage::chain(&Namer::open(), 0, &prompt, &arrival.images, page_size);
            // One token at least is left to compute.
            let held = |blocks: u64| (blocks * u64::from(self.page_size)).min(tokens - 1);
            cached = index.lookup(&names).into_iter().map(held).collect();
        }
        let ask = Ask { tokens, cached: &cached };
        // All are open, and there is at least one.
        let at = self.balancer.choose(self.ledger.loads(), |_| true, &ask).unwrap_or(0);
        self.ledger.sent(id, at, Work { prefill: ask.uncached(at), decode: 0 });
        (at, names)
    }

    /// The replica with most to compute and the one with least, if requests may move between them.
    pub(crate) fn drifted(&self) -> Option<(usize, usize)> {
        drifted(self.ledger.loads(), |_| true)
    }

    /// Notes the move of a waiting request, if it pays. False: it stays.
    pub(crate) fn moves(&mut self, from: usize, to: usize, request: &QueuedRequest<'_>) -> bool {
        let held = self.index.as_ref().map(|index| index.lookup(request.names));
        let blocks = held.and_then(|held| held.get(to).copied()).unwrap_or(0);
        let cached = blocks * u64::from(self.page_size);
        let uncached = u64::from(request.tokens).saturating_sub(cached).max(1);
        let loads = self.ledger.loads();
        let pays = move_pays(&loads[from], &loads[to], uncached);
        if pays {
            self.ledger.sent(request.id, to, Work { prefill: uncached, decode: 0 });
        }
        pays
    }

    /// The prefix cache of replica `at` has changed.
    pub(crate) fn changed(&mut self, at: usize, events: &mut Vec<BlockEvent>) {
        let Some(index) = &mut self.index else { return };
        for event in events.drain(..) {
            match event {
                BlockEvent::Stored(name, _) => index.stored(at, name),
                BlockEvent::Dropped(name) => index.dropped(at, name),
                BlockEvent::Cleared => index.cleared(at),
            }
        }
    }

    /// A request got its first token.
    pub(crate) fn first_token(&mut self, id: u64) {
        self.ledger.generated(id, 1);
    }

    /// A request ended.
    pub(crate) fn ended(&mut self, id: u64) {
        self.ledger.ended(id);
    }
}
