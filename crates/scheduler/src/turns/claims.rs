//! The order in which prompts pass other prompts in a step ([`crate::passing`]).
//!
//! The order is by rank, then by client: the one that has received the fewest tokens of steps goes
//! first, with its prompt that has the least remaining work. The count of a client that begins to
//! wait starts at the smallest of all clients with requests, like virtual time in fair queueing.
//! What a client received or missed earlier does not matter.

use std::collections::{BTreeMap, HashMap};

use super::fair::FairQueue;
use crate::request::{Key, Ticket};

/// Waiting prompts of a rank. Those of one client go by remaining work, then by arrival.
type Lane = FairQueue<Ticket, (u32, i64)>;

/// The waiting prompts in the order in which they pass others, and the tokens that clients have
/// received.
#[derive(Debug)]
pub(crate) struct Claims {
    /// True if clients take turns. Otherwise all prompts count as one client's.
    fair: bool,
    lanes: BTreeMap<i64, Lane>,
    /// The remaining tokens by which each waiting prompt is sorted.
    works: HashMap<Key, u32>,
    /// The number of lanes at which lanes without debts are removed.
    sweep_at: usize,
}

/// The position of a prompt in the order in which prompts get a step's tokens: smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Claim {
    rank: i64,
    received: u64,
    work: u32,
    arrival: i64,
}

impl Claims {
    pub(crate) fn new(fair: bool) -> Self {
        Self { fair, lanes: BTreeMap::new(), works: HashMap::new(), sweep_at: 0 }
    }

    /// Adds a waiting prompt that has `work` tokens left to compute.
    pub(crate) fn insert(&mut self, ticket: Ticket, work: u32) {
        let Key { rank, arrival } = ticket.key;
        let client = self.client(ticket.client);
        self.lanes.entry(rank).or_default().insert(client, (work, arrival), 0, ticket);
        self.works.insert(ticket.key, work);
    }

    /// Removes a prompt that does not wait any more.
    pub(crate) fn remove(&mut self, ticket: &Ticket) {
        let Key { rank, arrival } = ticket.key;
        let client = self.client(ticket.client);
        if let (Some(work), Some(lane)) =
            (self.works.remove(&ticket.key), self.lanes.get_mut(&rank))
        {
            lane.take(client, (work, arrival), false);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.lanes.clear();
        self.works.clear();
    }

    /// The waiting prompt that passes others first.
    pub(crate) fn first(&self) -> Option<Ticket> {
        self.lanes.values().find_map(Lane::first).copied()
    }

    /// The position of a prompt in the order of passing. `work` is the remaining work of a
    /// resident. For a waiting prompt, the recorded value is used instead.
    pub(crate) fn place(&self, key: Key, client: u64, work: u32) -> Claim {
        let lane = self.lanes.get(&key.rank);
        let received = lane.map_or(0, |lane| lane.start_of(self.client(client)));
        let work = self.works.get(&key).copied().unwrap_or(work);
        Claim { rank: key.rank, received, work, arrival: key.arrival }
    }

    /// Notes that a client has received tokens for a prompt of a rank.
    pub(crate) fn receive(&mut self, rank: i64, client: u64, tokens: u32) {
        let client = self.client(client);
        self.lanes.entry(rank).or_default().charge(client, tokens.into());
    }

    /// Advances a rank's virtual time to that of the client that has received the least. Only
    /// clients that wait or are in `computing` count. If there are no such clients, all debts of
    /// the rank are forgotten.
    pub(crate) fn advance(&mut self, rank: i64, computing: impl Iterator<Item = u64>) {
        let fair = self.fair;
        let Some(lane) = self.lanes.get_mut(&rank) else { return };
        let computing = computing.map(|client| lane.start_of(if fair { client } else { 0 })).min();
        match computing.into_iter().chain(lane.first_start()).min() {
            Some(poorest) => lane.advance(poorest),
            None => _ = self.lanes.remove(&rank),
        }
    }

    /// From time to time, forgets the debts of ranks in which no prompt waits and for which
    /// `computes` is false.
    pub(crate) fn sweep(&mut self, computes: impl Fn(i64) -> bool) {
        if self.lanes.len() > self.sweep_at.max(16) {
            self.lanes.retain(|&rank, lane| !lane.is_empty() || computes(rank));
            self.sweep_at = 2 * self.lanes.len();
        }
    }

    /// True if this prompt waits.
    pub(crate) fn contains(&self, key: Key) -> bool {
        self.works.contains_key(&key)
    }

    fn client(&self, client: u64) -> u64 {
        if self.fair { client } else { 0 }
    }
}
