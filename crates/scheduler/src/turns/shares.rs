//! Fair shares of the running requests. An admitted request keeps its slot until it ends, so turns
//! in the queue are not enough: a client that comes first with long requests would hold every slot.

use std::collections::HashMap;

use crate::request::Ticket;
use crate::roster::Roster;
use crate::slab::Handle;

/// Preemption for shares may recompute at most one in `YIELD_SHARE` tokens.
const YIELD_SHARE: u64 = 4;

/// Each client's share of the running requests.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    /// The number of residents of each client that has any.
    pub(super) residents: HashMap<u64, u32>,
    /// The next request to admit, for which a resident was preempted.
    pub(super) promised: Option<Ticket>,
    /// The first step in which a request may be preempted for shares again.
    rested_at: u64,
    /// True if the last search found no request to preempt, and nothing has changed since.
    pub(super) settled: bool,
}

impl Shares {
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

    /// Records that a request no longer waits.
    pub(crate) fn gone(&mut self, handle: Handle) {
        self.promised.take_if(|ticket| ticket.handle == handle);
        self.settled = false;
    }

    pub(crate) fn forget_promise(&mut self) {
        self.promised = None;
        self.settled = false;
    }

    /// True if a search in this step may find a request to preempt.
    pub(crate) fn may_change(&self, step: u64) -> bool {
        !self.settled && step >= self.rested_at
    }

    /// Promises the next admission to a request for which a resident is preempted now. The resident
    /// loses `lost` computed positions.
    pub(crate) fn promise(&mut self, ticket: Ticket, step: u64, lost: u32, token_budget: u32) {
        let steps = (YIELD_SHARE * u64::from(lost)).div_ceil(u64::from(token_budget.max(1)));
        self.promised = Some(ticket);
        self.rested_at = step + 1 + steps;
    }

    /// The resident that is preempted for a request whose client has less than an even share. The
    /// resident is the least important one of a client with more than an even share, and no more
    /// important than the request.
    ///
    /// Afterwards the request's client still has at most an even share, and the other client at
    /// least one. So two requests never preempt each other in turn.
    pub(crate) fn who_gives_way(&self, ticket: &Ticket, roster: &Roster) -> Option<Handle> {
        let counts = &self.residents;
        let own = counts.get(&ticket.client).copied().unwrap_or(0) as usize;
        let clients = counts.len() + usize::from(own == 0);
        let even = (roster.residents.len() / clients).max(1);
        if own >= even || roster[ticket.handle].request.past.goes_first() {
            return None;
        }
        let least = roster.residents.iter().rev();
        least
            .take_while(|(key, _)| key.rank >= ticket.key.rank)
            .map(|(_, &handle)| handle)
            .find(|&handle| counts[&roster[handle].request.client] as usize > even)
    }
}
