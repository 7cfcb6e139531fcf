//! Requests whose payloads are still on their way to the hand.
//!
//! A hand on another machine reads payloads from its own memory, and a plan may name a payload only
//! after it was copied there. Until then its request is *held*. It is live and keeps its position
//! in the order, but is not scheduled. No other request waits for a held one, not even while
//! suspects are replayed one at a time.

use crate::Scheduler;

impl Scheduler {
    /// Removes a waiting request from the queue until it is released. The request must have no slot
    /// and no page: it was just submitted, or the hand has died ([`Self::reset`]) and nothing was
    /// planned since.
    pub fn hold(&mut self, id: u64) {
        let Some(handle) = self.roster.find(id) else { return };
        let entry = &mut self.roster[handle];
        debug_assert!(entry.residence.is_none(), "{id} has been admitted");
        entry.request.held = true;
        self.places.leave(handle, entry);
        self.turns.leave(&entry.ticket(handle));
    }

    /// Puts a held request back into its position in the queue. Returns false if no held request
    /// has this id.
    pub fn release(&mut self, id: u64) -> bool {
        let Some(handle) = self.roster.find(id) else { return false };
        let entry = &mut self.roster[handle];
        let held = std::mem::take(&mut entry.request.held);
        if held {
            self.line_up(handle);
        }
        held
    }

    /// Ids of the held requests, in a deterministic order.
    pub fn held(&self) -> impl Iterator<Item = u64> {
        let held = self.roster.requests.iter().filter(|(_, entry)| entry.request.held);
        held.map(|(_, entry)| entry.request.id)
    }
}
