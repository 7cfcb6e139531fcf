//! The policies.

use crate::ledger::Load;

/// The policy that chooses a target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Method {
    /// One after the other.
    RoundRobin,
    /// The fewest requests.
    ShortestQueue,
    /// The least work left, the request's own uncached tokens among it.
    TotalTokens,
    /// The longest cached beginning, as long as it is worth being out of balance for; else the
    /// fewest requests.
    #[default]
    PrefixAware,
}

/// A request, as far as a policy wants to know it.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Tokens of its prompt.
    pub tokens: u64,
    /// The number of the request's tokens that each target has cached; empty if no target has any.
    pub cached: &'a [u64],
}

impl Ask<'_> {
    /// Tokens that a target has cached.
    #[must_use]
    pub fn cached(&self, target: usize) -> u64 {
        self.cached.get(target).copied().unwrap_or(0).min(self.tokens)
    }

    /// Tokens that a target would have to compute.
    #[must_use]
    pub fn uncached(&self, target: usize) -> u64 {
        self.tokens - self.cached(target)
    }
}

/// For a prompt that one target has cached as a whole it may have this many requests more than
/// another, which has none of it ...
const WHOLE_PROMPT: u64 = 16;
/// ... and one more for every so many that the other has: among many requests a few more are not
/// felt.
const CROWD: u64 = 2;

/// A policy, and whose turn it is among equals.
#[derive(Debug, Clone)]
pub struct Balancer {
    method: Method,
    next: usize,
}

impl Balancer {
    /// Begins with target 0.
    #[must_use]
    pub fn new(method: Method) -> Self {
        Self { method, next: 0 }
    }

    /// The policy.
    #[must_use]
    pub fn method(&self) -> Method {
        self.method
    }

    /// The target for a request among those that are `open`; `None`: there is none.
    pub fn choose(
        &mut self,
        loads: &[Load],
        open: impl Fn(usize) -> bool,
        ask: &Ask<'_>,
    ) -> Option<usize> {
        let count = loads.len();
        let next = self.next;
        // Equal ones take turns.
        let turns = || (0..count).map(|i| (next + i) % count).filter(|&at| open(at));
        let shortest = || {
            turns().min_by_key(|&at| (loads[at].requests, loads[at].work.prefill, ask.uncached(at)))
        };
        let chosen = match self.method {
            Method::RoundRobin => turns().next(),
            Method::ShortestQueue => shortest(),
            Method::TotalTokens => turns().min_by_key(|&at| {
                let load = &loads[at];
                (load.work.tokens() + ask.uncached(at), load.requests)
            }),
            Method::PrefixAware => shortest().map(|shortest| {
                let worth = |at| (worth(loads, shortest, at, ask), at);
                let better = turns().map(worth).filter(|&(tokens, _)| tokens > 0);
                // The first of equals, whose turn it is.
                let best = better.reduce(|best, other| if other.0 > best.0 { other } else { best });
                best.map_or(shortest, |(_, at)| at)
            }),
        }?;
        self.next = (chosen + 1) % count;
        Some(chosen)
    }
}

/// The tokens that are saved if the target `at` is chosen in place of the one with the shortest
/// queue. They are the tokens that `at` has cached beyond the other. The prefill that is ahead of
/// the request at `at` is taken off, and a price for each request that `at` has more.
fn worth(loads: &[Load], shortest: usize, at: usize, ask: &Ask<'_>) -> i64 {
    let signed = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
    let (here, there) = (&loads[at], &loads[shortest]);
    let saved = signed(ask.cached(at)) - signed(ask.cached(shortest));
    let ahead = here.work.prefill.saturating_sub(there.work.prefill);
    let more = here.requests - there.requests;
    let price = ask.tokens.div_ceil(WHOLE_PROMPT + there.requests / CROWD);
    saved.saturating_sub(signed(ahead)).saturating_sub(signed(more.saturating_mul(price)))
}
