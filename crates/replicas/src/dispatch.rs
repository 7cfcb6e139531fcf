//! Chooses replicas for requests, and keeps the records that the choice needs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use forebay_balance::{
    Ask, Balancer, Budget, Ledger, Method, Pressure, Role, RoleRule, Work, drifted, move_pays,
    preferred,
};
use forebay_engine::{BlockHash, Preference};

use crate::roles::LocalCounts;

/// The newest answer has a weight of 1/32 in the running mean of answer lengths.
const NEWEST: u64 = 32;

/// The properties of a request that the choice of a replica depends on.
pub(crate) struct RequestProfile<'a> {
    pub(crate) id: u64,
    pub(crate) preference: &'a Preference,
    /// The number of tokens to compute before the next one can be sampled, if nothing is cached.
    pub(crate) tokens: u64,
    /// The largest number of tokens that the request may still generate.
    pub(crate) room: u64,
    /// The number of tokens that each replica has cached; empty: none.
    pub(crate) cached: Vec<u64>,
    /// The leading blocks of the request. The index counts them as expected until the request has
    /// computed them.
    pub(crate) names: Arc<[BlockHash]>,
    /// True if the request may borrow blocks that its replica lacks.
    pub(crate) borrows: bool,
}

impl RequestProfile<'_> {
    /// Returns the properties that a policy needs.
    pub(crate) fn ask(&self) -> Ask<'_> {
        Ask { tokens: self.tokens, cached: &self.cached }
    }

    /// Returns the number of tokens that a replica has to compute for the request.
    fn uncached(&self, at: usize) -> u64 {
        let most = if self.borrows { self.cached.iter().copied().max() } else { None };
        self.ask().uncached(at).min(self.tokens - most.unwrap_or(0))
    }
}

/// Blocks that a request will add to its replica's cache.
pub(crate) struct ExpectedBlocks {
    pub(crate) target: usize,
    pub(crate) names: Arc<[BlockHash]>,
}

/// All data under the dispatch lock.
pub(crate) struct Dispatch {
    pub(crate) ledger: Ledger,
    balancer: Balancer,
    /// Loads that are only polled, for comparison with exact loads. `None`: loads are exact.
    polled: Option<PolledReplica>,
    /// For each replica, true if its hand takes plans.
    pub(crate) up: Vec<bool>,
    /// For each replica, true if it gets no new requests even while it is up.
    pub(crate) drained: Vec<bool>,
    /// Expected blocks of requests that have not generated a token yet, by request id.
    coming: HashMap<u64, ExpectedBlocks>,
    lengths: Lengths,
    /// For each replica: the number of requests that it serves alone although there are roles, by
    /// reason.
    pub(crate) local: Vec<LocalCounts>,
    /// The roles of the replicas.
    pub(crate) roles: Vec<Role>,
    /// Requests that wait for a loan before they go to their replica. True: the request was aborted
    /// while it waited.
    pub(crate) borrowing: HashMap<u64, bool>,
    pub(crate) pressure: Pressure,
    /// The number of times that each replica began to hold prompts back.
    pub(crate) holds: Vec<u64>,
}

struct PolledReplica {
    budget: Budget,
    interval_us: u64,
    due_us: u64,
}

/// The mean length of answers, for policies that estimate work.
#[derive(Default)]
struct Lengths {
    generated: HashMap<u64, u64>,
    mean: Option<u64>,
}

impl Dispatch {
    pub(crate) fn new(roles: Vec<Role>, method: Method, watch_interval: Duration) -> Self {
        let replicas = roles.len();
        let interval_us = u64::try_from(watch_interval.as_micros()).unwrap_or(u64::MAX);
        let polled = || PolledReplica { budget: Budget::default(), interval_us, due_us: 0 };
        Self {
            ledger: Ledger::new(replicas),
            balancer: Balancer::new(method),
            polled: (interval_us > 0).then(polled),
            up: vec![false; replicas],
            drained: vec![false; replicas],
            coming: HashMap::new(),
            lengths: Lengths::default(),
            local: vec![LocalCounts::default(); replicas],
            roles,
            borrowing: HashMap::new(),
            pressure: Pressure::new(replicas),
            holds: vec![0; replicas],
        }
    }

    /// True if a request can be sent to a replica now.
    pub(crate) fn open(&self, at: usize) -> bool {
        self.up[at] && !self.drained[at]
    }

    /// Returns the rule that divides requests by roles.
    pub(crate) fn rule(&self, local_tokens: u32) -> RoleRule<'_> {
        RoleRule { roles: &self.roles, local_tokens: local_tokens.into() }
    }

    /// True if prefill replicas should not admit further prompts that are to be handed on.
    pub(crate) fn is_pressed(&self) -> bool {
        self.pressure.exceeds(|at| self.roles[at].decodes() && self.open(at))
    }

    /// True if the policy counts tokens of requests, so that each token has to be recorded.
    fn counts_tokens(&self) -> bool {
        self.balancer.method() == Method::TotalTokens
    }

    /// Chooses one of the `open` replicas and records that the request was sent there. `None`: no
    /// replica is open. `poll` returns the loads that the replicas report.
    pub(crate) fn send(
        &mut self,
        asked: &RequestProfile<'_>,
        open: impl Fn(usize) -> bool,
        now_us: u64,
        poll: impl FnOnce() -> Vec<u64>,
    ) -> Option<usize> {
        let &RequestProfile { id, preference, room, ref names, .. } = asked;
        let replicas = self.up.len();
        let named =
            preference.replica.map(|at| at as usize).filter(|&at| at < replicas && open(at));
        let sticky = || preferred(preference.key.as_ref()?, replicas, &open);
        let target = match (named.or_else(sticky), &mut self.polled) {
            (Some(target), _) => target,
            (None, Some(polled)) => {
                if now_us >= polled.due_us {
                    polled.due_us = now_us + polled.interval_us;
                    polled.budget.reported(&poll());
                }
                polled.budget.take(replicas, &open)?
            }
            (None, None) => self.balancer.choose(self.ledger.loads(), &open, &asked.ask())?,
        };
        let decode = self.lengths.mean.map_or(room, |mean| mean.min(room));
        self.ledger.sent(id, target, Work { prefill: asked.uncached(target), decode });
        if self.counts_tokens() {
            self.lengths.generated.insert(id, 0);
        }
        if !names.is_empty() {
            self.coming.insert(id, ExpectedBlocks { target, names: Arc::clone(names) });
        }
        Some(target)
    }

    /// Returns the replica with the most work and the one with the least, if their loads differ so
    /// much that requests should move.
    pub(crate) fn drifted(&self) -> Option<(usize, usize)> {
        drifted(self.ledger.loads(), |at| self.open(at))
    }

    /// True if a request with this many uncached tokens would get its first token sooner after a
    /// move.
    pub(crate) fn move_pays(&self, from: usize, to: usize, uncached: u64) -> bool {
        let loads = self.ledger.loads();
        self.open(to) && move_pays(&loads[from], &loads[to], uncached)
    }

    /// Records a generated token of a request. Returns the request's expected blocks if its replica
    /// has reported the actual ones by now.
    pub(crate) fn token(&mut self, at: usize, id: u64) -> Option<ExpectedBlocks> {
        if self.counts_tokens()
            && let Some(generated) = self.lengths.generated.get_mut(&id)
        {
            *generated += 1;
        } else if self.ledger.loads()[at].in_prefill == 0 {
            return None;
        }
        if self.ledger.generated(id, 1) { self.coming.remove(&id) } else { None }
    }

    /// Records that a request leaves its replica. Returns the expected blocks that the request will
    /// no longer add to that replica's cache.
    pub(crate) fn moved(&mut self, id: u64) -> Option<ExpectedBlocks> {
        self.pressure.gone(id);
        self.coming.remove(&id)
    }

    /// Records that a request has ended. Returns its expected blocks, if any are left.
    pub(crate) fn ended(&mut self, id: u64) -> Option<ExpectedBlocks> {
        self.pressure.gone(id);
        self.ledger.ended(id);
        if let Some(generated) = self.lengths.generated.remove(&id).filter(|&tokens| tokens > 0) {
            let mean = self.lengths.mean.get_or_insert(generated);
            *mean = (*mean * (NEWEST - 1) + generated).div_ceil(NEWEST);
        }
        self.coming.remove(&id)
    }
}
