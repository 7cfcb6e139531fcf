//! Fair shares of the running requests. An admitted request keeps its slot until it ends. So turns
//! in the queue are not enough: a client that comes first with long requests would hold every slot
//! until they end.

use std::collections::HashMap;

use crate::queue::Ticket;
use crate::{Event, Handle, Scheduler};

/// The share of computing again after giving way: of all tokens that steps have room for, at most
/// one in this many.
const YIELD_SHARE: u64 = 4;

/// Each client's share of the running requests.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    /// Residents of each client that has any.
    residents: HashMap<u64, u32>,
    /// The next request to be admitted, for which another gave way.
    promised: Option<Ticket>,
    /// The step before which no request has to give way.
    rested_at: u64,
    /// True if no request had to give way at the last look, and nothing has changed since.
    settled: bool,
}

impl Shares {
    pub(crate) fn promised(&self) -> Option<Ticket> {
        self.promised
    }

    pub(crate) fn changed(&mut self) {
        self.settled = false;
    }

    pub(crate) fn moved_in(&mut self, client: u64, handle: Handle) {
        *self.residents.entry(client).or_default() += 1;
        self.gone(handle);
    }

    pub(crate) fn moved_out(&mut self, client: u64) {
        if let Some(count) = self.residents.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.residents.remove(&client);
            }
        }
        self.settled = false;
    }

    /// A request does not wait any more.
    pub(crate) fn gone(&mut self, handle: Handle) {
        self.promised.take_if(|ticket| ticket.handle == handle);
        self.settled = false;
    }

    pub(crate) fn forget_promise(&mut self) {
        self.promised = None;
        self.settled = false;
    }

    /// Residents that each client has.
    pub(crate) fn counts(&self) -> &HashMap<u64, u32> {
        &self.residents
    }
}

impl Scheduler {
    /// Makes room for the next request if its client has nothing running. A resident gives way: the
    /// least important one of a client with more than an even share, and no more important than the
    /// request. The request is then the next to be admitted.
    ///
    /// This happens once a step at most, and so seldom that repeated computation takes only a part
    /// of all steps. It runs before any request has a row, since the resident that gives way must
    /// have none.
    pub(crate) fn give_way(&mut self, events: &mut Vec<Event>) {
        let shares = &self.shares;
        if !self.config.fair || shares.settled || self.next_step < shares.rested_at {
            return;
        }
        let next = self.next_candidate();
        let lacks =
            |ticket: &Ticket| self.blocked == Some(ticket.key) || !self.may_run(ticket.handle);
        if next.as_ref().is_some_and(|ticket| !lacks(ticket)) {
            return;
        }
        self.shares.settled = true;
        // Those that were admitted before go first, but not for ever before a client that has
        // nothing.
        let promised = self.shares.promised;
        let fresh = || self.queue.first_fresh(next?.key.rank);
        let Some(ticket) = promised.or_else(fresh) else { return };
        let Some(victim) = self.who_gives_way(&ticket) else { return };
        let lost = u64::from(self.requests[victim].computed);
        let steps = (YIELD_SHARE * lost).div_ceil(u64::from(self.config.token_budget.max(1)));
        self.preempt(victim, events);
        self.blocked = None;
        self.shares.promised = Some(ticket);
        self.shares.rested_at = self.next_step + 1 + steps;
    }

    fn who_gives_way(&self, ticket: &Ticket) -> Option<Handle> {
        let counts = &self.shares.residents;
        if counts.contains_key(&ticket.client) || self.requests[ticket.handle].request.past.admitted
        {
            return None;
        }
        let even = (self.residents.len() / (counts.len() + 1)).max(1);
        let least = self.residents.iter().rev();
        least
            .take_while(|(key, _)| key.rank >= ticket.key.rank)
            .map(|(_, &handle)| handle)
            .find(|&handle| counts[&self.requests[handle].request.client] as usize > even)
    }
}
