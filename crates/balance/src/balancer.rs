//! The policies.

use serde::Serialize;

use crate::ledger::Load;

/// The policy that chooses a target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Each target in turn.
    RoundRobin,
    /// The target with the fewest requests.
    ShortestQueue,
    /// The target with the least work left, including the request's own uncached tokens.
    TotalTokens,
    /// The target whose cached tokens save the most work, if the saved work outweighs the prompts
    /// and requests that are already at that target. Otherwise the target with the fewest requests.
    #[default]
    PrefixAware,
}

/// The data about a request that policies use.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Tokens of the request's prompt.
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

/// The number of requests that a fully cached prompt is worth. A target that has the whole prompt
/// cached may have this many more requests than a target that has none of it.
const WHOLE_PROMPT: u64 = 16;
/// [`WHOLE_PROMPT`] grows by one for every `CROWD` requests at the target with the shortest queue:
/// a few additional requests matter less if there are many already.
const CROWD: u64 = 2;

/// A policy, and the next target in turn, which decides between equal targets.
#[derive(Debug, Clone)]
pub struct Balancer {
    method: Method,
    next: usize,
}

impl Balancer {
    /// Creates a balancer that begins with target 0.
    #[must_use]
    pub fn new(method: Method) -> Self {
        Self { method, next: 0 }
    }

    /// The policy.
    #[must_use]
    pub fn method(&self) -> Method {
        self.method
    }

    /// Chooses a target for a request among the `open` ones; `None`: none is open.
    pub fn choose(
        &mut self,
        loads: &[Load],
        open: impl Fn(usize) -> bool,
        ask: &Ask<'_>,
    ) -> Option<usize> {
        let count = loads.len();
        let next = self.next;
        // Equal targets take turns.
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
                // Among equal targets, take the one whose turn it is.
                let best = better.reduce(|best, other| if other.0 > best.0 { other } else { best });
                best.map_or(shortest, |(_, at)| at)
            }),
        }?;
        self.next = (chosen + 1) % count;
        Some(chosen)
    }
}

/// The tokens saved by choosing target `at` instead of the one with the shortest queue. They are
/// the additional tokens that `at` has cached, minus the prefill ahead of the request at `at`,
/// minus a price for each additional request at `at`.
fn worth(loads: &[Load], shortest: usize, at: usize, ask: &Ask<'_>) -> i64 {
    let signed = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
    let (here, there) = (&loads[at], &loads[shortest]);
    let saved = signed(ask.cached(at)) - signed(ask.cached(shortest));
    let ahead = here.work.prefill.saturating_sub(there.work.prefill);
    let more = here.requests - there.requests;
    let price = ask.tokens.div_ceil(WHOLE_PROMPT + there.requests / CROWD);
    saved.saturating_sub(signed(ahead)).saturating_sub(signed(more.saturating_mul(price)))
}
