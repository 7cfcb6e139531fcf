//! Waiting requests, and the order in which they are admitted.
//!
//! Ranks (priorities) are served strictly in order. Within a rank, requests that lost their pages
//! to a preemption or a death go first, by arrival. The others take turns by client
//! ([`FairQueue`]). The cost of a request is its prompt and the tokens that it may generate. When
//! no request of a rank waits, the debts of its clients are forgotten.

use std::collections::BTreeMap;

use super::fair::FairQueue;
use crate::request::{Key, Ticket};

/// The rank before every priority.
pub(crate) const PROBE_RANK: i64 = i64::MIN;

/// All waiting requests but the suspects.
#[derive(Debug)]
pub(crate) struct Queue {
    /// True if clients take turns. Otherwise all requests count as one client's, and go by arrival.
    fair: bool,
    /// The requests that were admitted before.
    returning: BTreeMap<Key, Ticket>,
    /// The requests that were never admitted, by rank. No rank has an empty queue.
    lanes: BTreeMap<i64, FairQueue<Ticket>>,
}

impl Queue {
    pub(crate) fn new(fair: bool) -> Self {
        Self { fair, returning: BTreeMap::new(), lanes: BTreeMap::new() }
    }

    /// Adds a request. `returning`: whether it was admitted before.
    pub(crate) fn insert(&mut self, ticket: Ticket, returning: bool) {
        if returning {
            self.returning.insert(ticket.key, ticket);
        } else {
            let client = self.client(&ticket);
            let lane = self.lanes.entry(ticket.key.rank).or_default();
            lane.insert(client, ticket.key.arrival, ticket.cost, ticket);
        }
    }

    /// The request that is next.
    pub(crate) fn first(&self) -> Option<Ticket> {
        let returning = self.returning.first_key_value().map(|(_, ticket)| ticket);
        let fresh = self.lanes.first_key_value();
        match (returning, fresh) {
            (Some(ticket), Some((&rank, _))) if ticket.key.rank <= rank => Some(*ticket),
            (_, Some((_, lane))) => lane.first().copied(),
            (ticket, None) => ticket.copied(),
        }
    }

    /// Up to `count` requests whose turn comes soon: by rank, then client by client. Requests that
    /// were admitted before go first.
    pub(crate) fn upcoming(&self, count: usize) -> Vec<Ticket> {
        let fresh = self.lanes.values().flat_map(FairQueue::upcoming);
        self.returning.values().chain(fresh).take(count).copied().collect()
    }

    /// The requests that were never admitted, the last in turn first.
    pub(crate) fn latest(&self) -> impl Iterator<Item = &Ticket> {
        self.lanes.values().rev().flat_map(FairQueue::latest)
    }

    /// True if a probe waits, which goes before all other requests.
    pub(crate) fn has_probe(&self) -> bool {
        let ranks =
            [self.returning.keys().next().map(|key| key.rank), self.lanes.keys().next().copied()];
        ranks.contains(&Some(PROBE_RANK))
    }

    /// The next request of a rank among those that were never admitted. Requests that were admitted
    /// before go ahead of it.
    pub(crate) fn first_fresh(&self, rank: i64) -> Option<Ticket> {
        self.lanes.get(&rank)?.first().copied()
    }

    /// Removes a request that is admitted, and charges its cost to its client.
    pub(crate) fn admitted(&mut self, ticket: &Ticket) {
        self.take(ticket, true);
    }

    /// Removes a request without admission, which is not charged to its client.
    pub(crate) fn remove(&mut self, ticket: &Ticket) {
        self.take(ticket, false);
    }

    /// Charges a request's client for work in addition to its tokens, while others of its rank
    /// wait.
    pub(crate) fn charge(&mut self, ticket: &Ticket, tokens: u64) {
        let client = self.client(ticket);
        if let Some(lane) = self.lanes.get_mut(&ticket.key.rank) {
            lane.charge(client, tokens);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.returning.clear();
        self.lanes.clear();
    }

    /// True if this request waits.
    pub(crate) fn contains(&self, ticket: &Ticket) -> bool {
        let Ticket { key, handle, .. } = ticket;
        let waiting = || self.lanes.get(&key.rank)?.get(self.client(ticket), key.arrival);
        self.returning.get(key).or_else(waiting).is_some_and(|found| found.handle == *handle)
    }

    fn client(&self, ticket: &Ticket) -> u64 {
        if self.fair { ticket.client } else { 0 }
    }

    fn take(&mut self, ticket: &Ticket, admitted: bool) {
        if self.returning.remove(&ticket.key).is_some() {
            return;
        }
        let (client, rank) = (self.client(ticket), ticket.key.rank);
        if let Some(lane) = self.lanes.get_mut(&rank) {
            lane.take(client, ticket.key.arrival, admitted);
            if lane.is_empty() {
                self.lanes.remove(&rank);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::slab::{Handle, Slab};
    use crate::turns::fair::{REMEMBERED, UNITS};

    /// The reference: a naive version of the algorithm, which searches everything each time. It
    /// forgets no client while any request of the rank waits.
    #[derive(Default)]
    struct Naive {
        returning: Vec<Ticket>,
        waiting: Vec<Ticket>,
        now: HashMap<i64, u64>,
        /// The virtual start of the next request, by rank and client.
        start: HashMap<(i64, u64), u64>,
    }

    impl Naive {
        fn insert(&mut self, ticket: Ticket, returning: bool) {
            if returning {
                return self.returning.push(ticket);
            }
            let account = (ticket.key.rank, ticket.client);
            let waits = self.waiting.iter().any(|t| (t.key.rank, t.client) == account);
            let start = self.start.entry(account).or_default();
            if !waits {
                *start = (*start).max(*self.now.entry(ticket.key.rank).or_default());
            }
            self.waiting.push(ticket);
        }

        fn first(&self) -> Option<Ticket> {
            let returning = self.returning.iter().min_by_key(|ticket| ticket.key);
            let fresh = self.waiting.iter().min_by_key(|ticket| {
                let rank = ticket.key.rank;
                (rank, self.start[&(rank, ticket.client)], ticket.key.arrival)
            });
            match (returning, fresh) {
                (Some(one), Some(other)) if one.key.rank > other.key.rank => Some(*other),
                (one, other) => one.or(other).copied(),
            }
        }

        fn take(&mut self, ticket: &Ticket, admitted: bool) {
            let rank = ticket.key.rank;
            let fresh = self.waiting.iter().any(|t| t.key == ticket.key);
            if fresh && admitted {
                let of_rank = self.waiting.iter().filter(|t| t.key.rank == rank);
                let clients: std::collections::HashSet<u64> = of_rank.map(|t| t.client).collect();
                let start = self.start.get_mut(&(rank, ticket.client)).expect("the client waits");
                let cost = (ticket.cost * UNITS).max(1);
                let now = self.now.get_mut(&rank).expect("the rank has waiting requests");
                *now = (*now).max(*start) + cost.div_ceil(clients.len() as u64 + 1);
                *start += cost;
            }
            self.waiting.retain(|t| t.key != ticket.key);
            self.returning.retain(|t| t.key != ticket.key);
            if !self.waiting.iter().any(|t| t.key.rank == rank) {
                self.now.remove(&rank);
                self.start.retain(|(of, _), _| *of != rank);
            }
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert { client: u64, rank: i64, cost: u64, returning: bool },
        Admit,
        Remove(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let insert = (0..5_u64, -1..2_i64, 0..40_u64, prop::bool::weighted(0.1)).prop_map(
            |(client, rank, cost, returning)| Op::Insert { client, rank, cost, returning },
        );
        prop_oneof![5 => insert, 4 => Just(Op::Admit), 1 => any::<usize>().prop_map(Op::Remove)]
    }

    fn handles(count: usize) -> Vec<Handle> {
        let mut slab = Slab::new();
        (0..count).map(|_| slab.insert(())).collect()
    }

    fn ticket(handle: Handle, arrival: i64, client: u64, cost: u64) -> Ticket {
        Ticket { key: Key { rank: 0, arrival }, handle, client, cost }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn turns_are_those_of_a_naive_fair_queue(ops in prop::collection::vec(op(), 1..200)) {
            let (mut queue, mut naive) = (Queue::new(true), Naive::default());
            let mut waiting: Vec<Ticket> = Vec::new();
            for ((at, op), handle) in (0..).zip(ops).zip(handles(200)) {
                match op {
                    Op::Insert { client, rank, cost, returning } => {
                        let arrival = if returning { at - 1000 } else { at };
                        let ticket = Ticket { key: Key { rank, arrival }, handle, client, cost };
                        queue.insert(ticket, returning);
                        naive.insert(ticket, returning);
                        waiting.push(ticket);
                    }
                    Op::Admit => {
                        let first = queue.first();
                        prop_assert_eq!(first.map(|t| t.key), naive.first().map(|t| t.key));
                        if let Some(ticket) = first {
                            queue.admitted(&ticket);
                            naive.take(&ticket, true);
                            waiting.retain(|t| t.key != ticket.key);
                        }
                    }
                    Op::Remove(_) if waiting.is_empty() => {}
                    Op::Remove(at) => {
                        let ticket = waiting.swap_remove(at % waiting.len());
                        prop_assert!(queue.contains(&ticket));
                        queue.remove(&ticket);
                        naive.take(&ticket, false);
                        prop_assert!(!queue.contains(&ticket));
                    }
                }
            }
        }

        /// For two clients that always have waiting requests, the admitted work differs at most by
        /// the two largest requests.
        #[test]
        fn two_busy_clients_get_the_same(costs in prop::collection::vec((1..50_u64, 1..500_u64), 40)) {
            let mut queue = Queue::new(true);
            let handles = handles(2 * costs.len());
            for (at, (small, large)) in costs.iter().enumerate() {
                queue.insert(ticket(handles[2 * at], 2 * at as i64, 0, *small), false);
                queue.insert(ticket(handles[2 * at + 1], 2 * at as i64 + 1, 1, *large), false);
            }
            let mut admitted = [0_u64; 2];
            let mut left = [costs.len(); 2];
            while left.iter().all(|&left| left > 0) {
                let first = queue.first().expect("both wait");
                queue.admitted(&first);
                admitted[first.client as usize] += first.cost;
                left[first.client as usize] -= 1;
                prop_assert!(admitted[0].abs_diff(admitted[1]) <= 550, "{admitted:?}");
            }
        }

        /// A charged client gets its turn once the other client has used the same amount.
        #[test]
        fn a_charge_counts_like_an_admitted_request(cost in 1..50_u64, charged in 1..20_u64, idle in any::<bool>()) {
            let mut queue = Queue::new(true);
            let handles = handles(81);
            let [fined, other] = [ticket(handles[80], 80, 0, cost), ticket(handles[0], 0, 1, cost)];
            queue.charge(&fined, 1000);
            prop_assert_eq!(queue.first().map(|t| t.client), None, "no client waits or owes");
            queue.insert(other, false);
            for (at, &handle) in (1..40).zip(&handles[1..]) {
                queue.insert(ticket(handle, at, 1, cost), false);
            }
            if idle {
                queue.charge(&fined, charged * cost);
            }
            for (at, &handle) in (40..80).zip(&handles[40..]) {
                queue.insert(ticket(handle, at, 0, cost), false);
            }
            if !idle {
                queue.charge(&fined, charged * cost);
            }
            let mut before = 0;
            while let Some(first) = queue.first().filter(|first| first.client == 1) {
                queue.admitted(&first);
                before += 1;
            }
            prop_assert!((charged..=charged + 1).contains(&before), "{} of {}", before, charged);
        }

        /// Without shares, requests go in the order of arrival, whatever they cost.
        #[test]
        fn one_client_s_requests_go_by_arrival(
            costs in prop::collection::vec(0..5000_u64, 1..60), fair in any::<bool>(),
            several in any::<bool>(),
        ) {
            let mut queue = Queue::new(fair);
            for ((at, &cost), handle) in (0..).zip(&costs).zip(handles(costs.len())) {
                let client = if several && !fair { at as u64 % 3 } else { 7 };
                queue.insert(ticket(handle, at, client, cost), false);
                if at % 5 == 4 {
                    let first = queue.first().expect("some wait");
                    prop_assert_eq!(first.key.arrival, at / 5);
                    queue.admitted(&first);
                }
            }
        }
    }

    #[test]
    fn a_stream_of_new_clients_does_not_keep_an_old_one_waiting() {
        let mut queue = Queue::new(true);
        let handles = handles(1000);
        queue.insert(ticket(handles[0], 0, 0, 100), false);
        queue.insert(ticket(handles[1], 1, 0, 100), false);
        let mut admitted = Vec::new();
        for (arrival, &handle) in (2_i64..).zip(&handles[2..]) {
            queue.insert(ticket(handle, arrival, arrival as u64, 10), false);
            let first = queue.first().expect("some wait");
            queue.admitted(&first);
            admitted.push(first.key.arrival);
        }
        let second = admitted
            .iter()
            .position(|&arrival| arrival == 1)
            .expect("the second request had its turn");
        assert!(second < 100, "admitted after {second} others");
    }

    #[test]
    fn clients_that_owe_nothing_are_forgotten() {
        let mut queue = Queue::new(true);
        let handle = handles(1)[0];
        queue.insert(ticket(handle, -1, u64::MAX, u64::MAX), false);
        queue.insert(ticket(handle, 0, u64::MAX, 1), false);
        for at in 1..200_000 {
            queue.insert(ticket(handle, at, at as u64, 1 + at as u64 % 1000), false);
            let first = queue.first().expect("some wait");
            queue.admitted(&first);
            let known = queue.lanes[&0].known();
            assert!(known <= 2 * REMEMBERED + 2, "{known} clients are known");
        }
        while let Some(ticket) = queue.first() {
            queue.admitted(&ticket);
        }
        assert!(queue.lanes.is_empty());
    }
}
