//! Requests that another scheduler continues while the hand of this scheduler is alive.
//!
//! Such a request computes its prompt here and generates one token. It then gives up its slot and
//! pages at once, and *leaves*: it stays live, but is not scheduled, until its blocks are saved.
//! The tiers own the saves, so the slot and pages need not wait for them. The other scheduler
//! recomputes blocks that could not be saved.

use forebay_kvcache::{BlockHash, LoanId};

use crate::memory::loans::LentBlocks;
use crate::request::Request;
use crate::{Event, Handle, Scheduler};

/// A request that is handed on to another scheduler.
#[derive(Debug)]
pub struct HandedRequest {
    /// The request, with its generated tokens.
    pub request: Request,
    /// The request's leading blocks; `None`: no block can be lent.
    pub lent: Option<LentBlocks>,
}

impl Scheduler {
    /// Makes a request leave after its token, if it was submitted to leave. A suspect stays until
    /// it is cleared.
    pub(crate) fn leave(&mut self, handle: Handle) {
        let entry = &self.roster[handle];
        if !entry.request.leaves || entry.mark().is_some() {
            return;
        }
        self.retire(handle);
        let entry = &mut self.roster[handle];
        self.turns.leave(&entry.ticket(handle));
        // The request computes nothing more here, so another adapter may take the place of its
        // adapter.
        self.places.leave(handle, entry);
        entry.leaving = true;
        self.leaving.push(handle);
    }

    /// Reports the leaving requests whose saves are done.
    pub(crate) fn report_left(&mut self, events: &mut Vec<Event>) {
        let (roster, memory) = (&self.roster, &self.memory);
        self.leaving.retain(|&handle| {
            let Some(entry) = roster.requests.get(handle) else { return false };
            let waits = memory.will_save(&entry.blocks.names);
            if !waits {
                events.push(Event::Left { id: entry.request.id });
            }
            waits
        });
    }

    /// Removes a request that has left, for another scheduler, and lends its saved blocks. `None`:
    /// the request was aborted since, or the hand has died.
    pub fn hand_on(&mut self, id: u64) -> Option<HandedRequest> {
        let handle = self.roster.find(id).filter(|&handle| self.roster[handle].leaving)?;
        let entry = self.roster.remove(handle)?;
        let lent = self.memory.lend(&entry.blocks.names);
        let mut request = entry.into_request();
        request.leaves = false;
        request.past.handed = true;
        Some(HandedRequest { request, lent })
    }

    /// Lends the leading blocks that are in the host tier. `None`: the first block is not there, or
    /// nothing can be lent.
    pub fn lend(&mut self, names: &[BlockHash]) -> Option<LentBlocks> {
        self.memory.lend(names)
    }

    /// True if one of these blocks is being saved to the host tier, or will be.
    #[must_use]
    pub fn will_save(&self, names: &[BlockHash]) -> bool {
        self.memory.will_save(names)
    }

    /// Stops or resumes admission of requests that leave, except probes. Requests that are in the
    /// queue after a request that may not be admitted wait too.
    pub fn hold_leaving(&mut self, held: bool) {
        self.holds_leaving = held;
    }

    /// Ends a loan of blocks. Returns false if it has ended already.
    pub fn take_back(&mut self, loan: LoanId) -> bool {
        self.memory.take_back(loan)
    }
}
