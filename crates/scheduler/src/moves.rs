//! Queued requests that move to another scheduler while the hand of their own scheduler is alive.

use forebay_kvcache::BlockHash;

use crate::Scheduler;
use crate::request::Request;

/// A waiting request that may go to another scheduler.
#[derive(Debug, Clone, Copy)]
pub struct QueuedRequest<'a> {
    /// The id of the request.
    pub id: u64,
    /// The number of the request's known tokens.
    pub tokens: u32,
    /// Names of the request's leading full blocks, as far as they are known.
    pub names: &'a [BlockHash],
}

/// The number of waiting requests that [`Scheduler::movable`] examines. The limit bounds its cost
/// if many queued requests may not move.
const LOOKED_AT: usize = 64;

impl Scheduler {
    /// Requests that may move to another scheduler, among the last `LOOKED_AT` in the queue, the
    /// last one first. They were never admitted, so their only state here is their position in the
    /// queue.
    pub fn movable(&self) -> impl Iterator<Item = QueuedRequest<'_>> {
        let latest = self.turns.queue.latest();
        let entries = latest.take(LOOKED_AT).map(|ticket| &self.roster[ticket.handle]);
        let may = entries.filter(|entry| {
            let Request { past, probe, .. } = &entry.request;
            past.moves_left > 0 && !probe
        });
        may.map(|entry| QueuedRequest {
            id: entry.request.id,
            tokens: entry.known(),
            names: entry.known_names(),
        })
    }

    /// Removes a request that [`Self::movable`] has returned, so that another scheduler can run it.
    /// `None`: it has been admitted or has ended since.
    pub fn withdraw(&mut self, id: u64) -> Option<Request> {
        let handle = self.roster.find(id)?;
        let entry = &self.roster[handle];
        let past = entry.request.past;
        if !entry.is_untouched() {
            return None;
        }
        let ticket = entry.ticket(handle);
        self.turns.leave(&ticket);
        self.places.leave(handle, &mut self.roster[handle]);
        let mut request = self.roster.remove(handle)?.into_request();
        request.past.moves_left = past.moves_left.saturating_sub(1);
        Some(request)
    }
}
