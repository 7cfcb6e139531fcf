//! Which replica a request goes to.

use std::collections::HashMap;

use super::args::Router;
use super::traffic::Arrival;
use crate::dataset::trace::BLOCK_TOKENS;

/// What a router knows of a replica, from what it sent there and what came back.
#[derive(Debug, Default)]
struct View {
    /// Requests that have not ended.
    alive: u32,
    /// Tokens to compute for requests that have no token yet.
    pending: u64,
    /// When each block was sent there last, in blocks sent. The replica holds about the last `capacity` of them.
    sent: HashMap<u32, u64>,
    blocks_sent: u64,
}

impl View {
    /// Tokens of the request that are probably cached there.
    fn cached(&self, arrival: &Arrival, capacity: u64) -> u64 {
        let held = |block: &&u32| {
            self.sent.get(block).is_some_and(|&at| at + capacity >= self.blocks_sent)
        };
        let blocks = arrival.blocks.iter().take_while(held).count() as u64;
        (blocks * u64::from(BLOCK_TOKENS)).min(u64::from(arrival.input))
    }
}

/// A router and what it remembers.
#[derive(Debug)]
pub(crate) struct Routing {
    policy: Router,
    views: Vec<View>,
    /// Blocks that a replica's KV pool holds.
    capacity: u64,
    next: usize,
    /// Where each request in prefill went, and how many tokens it had to compute.
    prefills: HashMap<u64, (usize, u64)>,
}

impl Routing {
    /// Routes to `replicas` with room for `kv_tokens` each.
    pub(crate) fn new(policy: Router, replicas: u32, kv_tokens: u64) -> Self {
        Self {
            policy,
            views: (0..replicas).map(|_| View::default()).collect(),
            capacity: kv_tokens / u64::from(BLOCK_TOKENS),
            next: 0,
            prefills: HashMap::new(),
        }
    }

    /// The replica for a request; from now on it counts there.
    pub(crate) fn route(&mut self, id: u64, arrival: &Arrival) -> usize {
        // Equal ones take turns.
        let count = self.views.len();
        let turns = (0..count).map(|i| (self.next + i) % count);
        let at = match self.policy {
            Router::RoundRobin => self.next,
            Router::LeastLoaded => {
                turns.min_by_key(|&at| self.views[at].alive).unwrap_or(self.next)
            }
            Router::PrefixAware => turns
                .min_by_key(|&at| {
                    let view = &self.views[at];
                    let own = u64::from(arrival.input) - view.cached(arrival, self.capacity);
                    (view.pending + own, view.alive)
                })
                .unwrap_or(self.next),
        };
        self.next = (at + 1) % count;
        self.views[at].alive += 1;
        if self.policy == Router::PrefixAware {
            self.remember(id, at, arrival);
        }
        at
    }

    fn remember(&mut self, id: u64, at: usize, arrival: &Arrival) {
        let view = &mut self.views[at];
        let own = u64::from(arrival.input) - view.cached(arrival, self.capacity);
        view.pending += own;
        self.prefills.insert(id, (at, own));
        for &block in &arrival.blocks {
            view.blocks_sent += 1;
            view.sent.insert(block, view.blocks_sent);
        }
    }

    /// A request got its first token.
    pub(crate) fn first_token(&mut self, id: u64) {
        if let Some((at, own)) = self.prefills.remove(&id) {
            self.views[at].pending -= own;
        }
    }

    /// A request of replica `at` ended.
    pub(crate) fn ended(&mut self, at: usize) {
        self.views[at].alive -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(blocks: &[u32]) -> Arrival {
        let input = blocks.len() as u32 * BLOCK_TOKENS;
        Arrival { at_us: 0, input, output: 1, blocks: blocks.to_vec() }
    }

    #[test]
    fn round_robin_takes_turns() {
        let mut routing = Routing::new(Router::RoundRobin, 3, 1 << 20);
        let went: Vec<usize> = (0..7).map(|id| routing.route(id, &arrival(&[1]))).collect();
        assert_eq!(went, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn the_least_loaded_has_the_fewest_requests() {
        let mut routing = Routing::new(Router::LeastLoaded, 2, 1 << 20);
        let went: Vec<usize> = (0..4).map(|id| routing.route(id, &arrival(&[1]))).collect();
        assert_eq!(went, [0, 1, 0, 1]);
        routing.ended(1);
        routing.ended(1);
        assert_eq!(routing.route(4, &arrival(&[1])), 1);
        assert_eq!(routing.route(5, &arrival(&[1])), 1);
    }

    #[test]
    fn prefixes_find_their_replica_until_it_has_too_much_to_do() {
        let mut routing = Routing::new(Router::PrefixAware, 2, 1 << 20);
        let went =
            [routing.route(0, &arrival(&[1, 2, 3, 4])), routing.route(1, &arrival(&[7, 8, 9]))];
        assert_eq!(went, [0, 1]);
        for id in 0..2 {
            routing.first_token(id);
        }
        assert_eq!(routing.route(2, &arrival(&[7, 8, 10])), 1);
        assert_eq!(routing.route(3, &arrival(&[1, 2, 11])), 0);
        // Nothing of this is cached anywhere, and then what it shares is worth less than the wait for it.
        assert_eq!(routing.route(4, &arrival(&[20, 21, 22, 23, 24, 25])), 1);
        assert_eq!(routing.route(5, &arrival(&[7, 30])), 0);
    }

    #[test]
    fn what_a_pool_cannot_hold_is_not_taken_for_cached() {
        let mut routing = Routing::new(Router::PrefixAware, 1, u64::from(BLOCK_TOKENS) * 3);
        routing.route(0, &arrival(&[1, 2]));
        assert_eq!(routing.views[0].cached(&arrival(&[1, 2, 3]), 3), 1024);
        routing.route(1, &arrival(&[5, 6, 7]));
        assert_eq!(routing.views[0].cached(&arrival(&[1, 2, 3]), 3), 0);
    }
}
