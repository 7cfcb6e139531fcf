//! Fair queueing of clients by cost.
//!
//! Turns are start-time fair queueing (Goyal, Vin and Cheng 1996). The next item of a client starts
//! at the end of its last one in virtual time, and the earliest start goes first. Each item taken
//! advances virtual time by an even share of its cost. So a stream of new clients cannot keep an
//! older one waiting for ever.

use std::collections::{BTreeMap, HashMap};

/// Units of virtual time per unit of cost, fine enough that an even share of a small cost is not 0.
pub(crate) const UNITS: u64 = 256;
/// The number of idle clients that are remembered before those without debts are forgotten. At most
/// twice as many are ever remembered.
pub(crate) const REMEMBERED: usize = 1 << 14;

/// Waiting items of clients, which take turns by cost. Items of one client go by arrival, or by
/// another key `K` that is unique among waiting items.
#[derive(Debug)]
pub struct FairQueue<T, K = i64> {
    /// Virtual time, in units.
    now: u64,
    /// The clients with waiting items, sorted by the virtual start of the client's first item, then
    /// by the item's arrival.
    turns: BTreeMap<(u64, K), u64>,
    clients: HashMap<u64, Account<T, K>>,
    /// The number of remembered clients at which those without debts are removed.
    sweep_at: usize,
}

/// The items of a client.
#[derive(Debug)]
struct Account<T, K> {
    /// The virtual start of the client's first waiting item. If no item waits: the virtual end of
    /// the last item that had its turn.
    start: u64,
    /// The waiting items and their costs, by arrival.
    waiting: BTreeMap<K, (u64, T)>,
}

impl<T, K: Copy + Ord> Default for FairQueue<T, K> {
    fn default() -> Self {
        Self { now: 0, turns: BTreeMap::new(), clients: HashMap::new(), sweep_at: 0 }
    }
}

impl<T, K: Copy + Ord> Default for Account<T, K> {
    fn default() -> Self {
        Self { start: 0, waiting: BTreeMap::new() }
    }
}

impl<T, K: Copy + Ord> Account<T, K> {
    /// The client's position among the clients that wait.
    fn turn(&self) -> Option<(u64, K)> {
        self.waiting.first_key_value().map(|(&arrival, _)| (self.start, arrival))
    }
}

impl<T, K: Copy + Ord> FairQueue<T, K> {
    /// Adds an item of `client`. `arrival` is unique among waiting items.
    pub fn insert(&mut self, client: u64, arrival: K, cost: u64, item: T) {
        let account = self.clients.entry(client).or_default();
        match account.turn() {
            Some(turn) if turn.1 > arrival => _ = self.turns.remove(&turn),
            Some(_) => {}
            None => account.start = account.start.max(self.now),
        }
        account.waiting.insert(arrival, (cost, item));
        self.turns.extend(account.turn().map(|turn| (turn, client)));
    }

    /// True if no item waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// The item that is next.
    #[must_use]
    pub fn first(&self) -> Option<&T> {
        self.upcoming().next()
    }

    /// All items, client by client, in the order of the clients' turns.
    pub fn upcoming(&self) -> impl Iterator<Item = &T> {
        let clients = self.turns.values().map(|client| &self.clients[client]);
        clients.flat_map(|account| account.waiting.values().map(|(_, item)| item))
    }

    /// All items, client by client, in the reverse order of [`Self::upcoming`].
    pub(crate) fn latest(&self) -> impl Iterator<Item = &T> {
        let clients = self.turns.values().rev().map(|client| &self.clients[client]);
        clients.flat_map(|account| account.waiting.values().rev().map(|(_, item)| item))
    }

    /// The item of `client` with this arrival, if it waits.
    #[must_use]
    pub fn get(&self, client: u64, arrival: K) -> Option<&T> {
        self.clients.get(&client)?.waiting.get(&arrival).map(|(_, item)| item)
    }

    /// Removes the first item in turn whose client satisfies `may`. Returns the client and the
    /// item.
    pub fn pop(&mut self, may: impl Fn(u64) -> bool) -> Option<(u64, T)> {
        let mut turns = self.turns.iter();
        let (&(_, arrival), &client) = turns.find(|&(_, &client)| may(client))?;
        Some((client, self.take(client, arrival, true)?))
    }

    /// Removes an item, if it waits. With `charged` its client pays the item's cost; otherwise the
    /// client pays nothing.
    pub fn take(&mut self, client: u64, arrival: K, charged: bool) -> Option<T> {
        let active = self.turns.len() as u64;
        let account = self.clients.get_mut(&client)?;
        if let Some(turn) = account.turn() {
            self.turns.remove(&turn);
        }
        let taken = account.waiting.remove(&arrival);
        if let (Some((cost, _)), true) = (&taken, charged) {
            let cost = cost.saturating_mul(UNITS).max(1);
            // Divide by one more than the waiting clients: a new client should come before clients
            // that have just had their turn.
            let share = cost.div_ceil(active + 1);
            self.now = self.now.max(account.start).saturating_add(share);
            account.start = account.start.saturating_add(cost);
        }
        match account.turn() {
            Some(turn) => _ = self.turns.insert(turn, client),
            None if account.start <= self.now => _ = self.clients.remove(&client),
            None => self.sweep(),
        }
        taken.map(|(_, item)| item)
    }

    /// Charges a client for work in addition to its items.
    pub fn charge(&mut self, client: u64, cost: u64) {
        let account = self.clients.entry(client).or_default();
        match account.turn() {
            Some(turn) => _ = self.turns.remove(&turn),
            None => account.start = account.start.max(self.now),
        }
        account.start = account.start.saturating_add(cost.saturating_mul(UNITS));
        match account.turn() {
            Some(turn) => _ = self.turns.insert(turn, client),
            None => self.sweep(),
        }
    }

    /// The virtual time at which the next item of a client starts.
    pub(crate) fn start_of(&self, client: u64) -> u64 {
        self.clients.get(&client).map_or(self.now, |account| account.start.max(self.now))
    }

    /// The virtual time at which the first waiting item starts.
    pub(crate) fn first_start(&self) -> Option<u64> {
        self.turns.first_key_value().map(|(&(start, _), _)| start)
    }

    /// Advances virtual time to `to`, unless it is later already.
    pub(crate) fn advance(&mut self, to: u64) {
        self.now = self.now.max(to);
    }

    /// From time to time, forgets clients without debts. Also forgets every client without items
    /// once there are too many.
    fn sweep(&mut self) {
        let idle = self.clients.len() - self.turns.len();
        if idle <= self.sweep_at.max(64) {
            return;
        }
        let now = self.now;
        self.clients.retain(|_, account| !account.waiting.is_empty() || account.start > now);
        let left = self.clients.len() - self.turns.len();
        if left > REMEMBERED {
            self.clients.retain(|_, account| !account.waiting.is_empty());
        }
        self.sweep_at = (2 * left).min(2 * REMEMBERED);
    }

    /// The number of clients that are remembered.
    #[cfg(test)]
    pub(crate) fn known(&self) -> usize {
        self.clients.len()
    }
}
