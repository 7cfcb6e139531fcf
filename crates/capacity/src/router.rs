//! Chooses a replica for a request, with the same policies and ledger as the brain.

use forebay_balance::{
    Ask, Balancer, Ledger, Method, PrefixIndex, Role, RoleRule, Work, drifted, lender, move_pays,
};
use forebay_scheduler::{BlockEvent, BlockHash, Namer, PromptImage, QueuedRequest, Request};

use crate::args::Router;
use crate::pd::Division;
use crate::traffic::Arrival;

/// The policy of a simulated router, and its state.
#[derive(Debug)]
pub(crate) struct Routing {
    balancer: Balancer,
    ledger: Ledger,
    /// The cached blocks of the replicas, for policies that use them.
    index: Option<PrefixIndex<BlockHash>>,
    page_size: u32,
    /// The role of each replica; empty without disaggregated prefill.
    roles: Vec<Role>,
    local_tokens: u64,
}

/// The chosen replica for a request.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) at: usize,
    /// The names of the prompt's blocks; empty if the policy does not use them.
    pub(crate) names: Vec<BlockHash>,
    /// True if another replica continues the request after its first token.
    pub(crate) leaves: bool,
    /// The replica that lends blocks to the request, and the index of the first lent block.
    pub(crate) lender: Option<(usize, usize)>,
}

impl Routing {
    /// Creates a router for `replicas` replicas with pages of `page_size` tokens.
    pub(crate) fn new(
        policy: Router,
        replicas: u32,
        page_size: u32,
        division: Option<Division>,
    ) -> Self {
        let method = match policy {
            Router::RoundRobin => Method::RoundRobin,
            Router::LeastLoaded => Method::ShortestQueue,
            Router::PrefixAware => Method::PrefixAware,
        };
        let replicas = replicas as usize;
        Self {
            balancer: Balancer::new(method),
            ledger: Ledger::new(replicas),
            index: (method == Method::PrefixAware || division.is_some())
                .then(|| PrefixIndex::new(replicas)),
            page_size,
            roles: division.map_or_else(Vec::new, |Division { prefill, .. }| {
                let prefills = |at| at < prefill as usize;
                let role = |at| if prefills(at) { Role::Prefill } else { Role::Decode };
                (0..replicas).map(role).collect()
            }),
            local_tokens: division.map_or(0, |division| division.local_tokens.into()),
        }
    }

    /// Chooses the replica for a request, and adds the request to that replica's load.
    pub(crate) fn route(&mut self, id: u64, arrival: &Arrival) -> Route {
        let tokens = u64::from(arrival.input);
        let (mut names, mut cached) = (Vec::new(), Vec::new());
        if let Some(index) = &self.index {
            let (prompt, page_size) = (arrival.prompt(), self.page_size as usize);
            names = PromptImage::chain(&Namer::open(), 0, &prompt, &arrival.images, page_size);
            // At least one token is always computed.
            let held = |blocks: u64| (blocks * u64::from(self.page_size)).min(tokens - 1);
            cached = index.lookup(&names).into_iter().map(held).collect();
        }
        let ask = Ask { tokens, cached: &cached };
        let mut open = vec![true; self.ledger.loads().len()];
        let rule = RoleRule { roles: &self.roles, local_tokens: self.local_tokens };
        let apart = !self.roles.is_empty();
        let reason = if apart { rule.narrow(&ask, true, &mut open) } else { None };
        // At least one replica is allowed.
        let at = self.balancer.choose(self.ledger.loads(), |at| open[at], &ask).unwrap_or(0);
        let leaves = apart && rule.stays(at, reason).is_none();
        let lender = if apart { lender(&ask, at) } else { None };
        let prefill = lender.map_or(ask.uncached(at), |lender| ask.uncached(lender));
        self.ledger.sent(id, at, Work { prefill, decode: 0 });
        let first = (ask.cached(at) / u64::from(self.page_size)) as usize;
        Route { at, names, leaves, lender: lender.map(|lender| (lender, first)) }
    }

    /// Chooses the decode replica for a request that has left its prefill replica, and adds the
    /// request to that replica's load.
    pub(crate) fn route_on(&mut self, request: &Request) -> usize {
        let tokens = (request.prompt.len() + request.generated.len()) as u64;
        let lent = request.loan.as_ref().map_or(0, |loan| {
            request.names.iter().take_while(|&&name| loan.page(name).is_some()).count()
        });
        let held = self.index.as_ref().map(|index| index.lookup(&request.names));
        let cached: Vec<u64> = (held.into_iter().flatten())
            .map(|blocks| (blocks.max(lent as u64) * u64::from(self.page_size)).min(tokens - 1))
            .collect();
        let (ask, roles) = (Ask { tokens, cached: &cached }, &self.roles);
        let open = |at: usize| roles[at].decodes();
        // There is at least one decode replica, and decode replicas come last.
        let at = self.balancer.choose(self.ledger.loads(), open, &ask).unwrap_or(roles.len() - 1);
        self.ledger.sent(request.id, at, Work { prefill: ask.uncached(at), decode: 0 });
        at
    }

    /// The replicas with the most and the least to compute, as (from, to); `None`: their loads do
    /// not differ enough to move requests.
    pub(crate) fn drifted(&self) -> Option<(usize, usize)> {
        drifted(self.ledger.loads(), |_| true)
    }

    /// Decides whether the move of a waiting request pays off, and if so, records the move. Returns
    /// false if the request is to stay.
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

    /// Updates the index with the changes of the prefix cache of replica `at`.
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

    /// Records that a replica has generated a request's first token.
    pub(crate) fn first_token(&mut self, id: u64) {
        self.ledger.generated(id, 1);
    }

    /// Records that a request has ended.
    pub(crate) fn ended(&mut self, id: u64) {
        self.ledger.ended(id);
    }
}
