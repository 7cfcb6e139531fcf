//! Requests that move between replicas: because a hand has died, because another replica has less
//! to do, or because they are handed on after the first token.

use std::sync::Arc;

use forebay_scheduler::{HandedRequest, LentBlocks, Loan, QueuedRequest, Request};

use crate::handle::EngineHandle;
use crate::member::Member;
use crate::types::{EngineRequest, Orphan, Preference};

/// The largest number of waiting requests that are considered for a move.
const LATEST: usize = 8;

impl Member {
    /// Continues a request that another engine has lost.
    pub(super) fn adopt(&mut self, orphan: Orphan) {
        let Orphan { request, queued, admission } = orphan;
        let id = request.request.id;
        if let Some(arrival) = queued {
            self.arrived(id, arrival);
        }
        self.admissions.extend(admission.map(|admission| (id, admission)));
        self.enter(request);
    }

    /// Without a hand, offers all requests to other replicas. The remaining requests wait for the
    /// first replica that comes back. If no replica will come back (`over`), the requests end.
    pub(crate) fn give_away(&mut self, over: bool) {
        let others = self.peers.as_ref().is_some_and(|peers| peers.others_up());
        if let Some(scheduler) = self.scheduler.as_mut().filter(|_| others) {
            let taken = scheduler.surrender();
            // This replica's outputs have to be delivered before those of the other replica.
            self.deliver();
            let orphans = taken.into_iter().map(|request| self.orphan(request)).collect();
            let left = self.peers.as_ref().map_or_else(Vec::new, |peers| peers.adopt(orphans));
            let failure = self.failure();
            for orphan in left {
                let id = orphan.request.request.id;
                self.adopt(orphan);
                // This engine's hand was given up, so a request that no other replica took would
                // wait for a hand that may never come back.
                if let Some(finish) = &failure
                    && self.scheduler.as_mut().is_some_and(|scheduler| scheduler.abort(id))
                {
                    self.end(id, finish.clone());
                }
            }
        }
        if over {
            self.end_all();
        }
    }

    /// Moves one waiting request to replica `to`, which has less to do. Goes through the queue from
    /// its end, and moves the first request that would get its first token sooner there.
    pub(super) fn spare(&mut self, to: usize) {
        let (Some(peers), Some(scheduler)) = (&self.peers, &mut self.scheduler) else { return };
        let pays = |request: &QueuedRequest<'_>| peers.move_pays(to, request);
        let chosen = scheduler.movable().take(LATEST).find(pays).map(|request| request.id);
        let Some(request) = chosen.and_then(|id| scheduler.withdraw(id)) else { return };
        let orphan = self.orphan(request);
        let left = self.peers.as_ref().and_then(|peers| peers.take(to, orphan));
        left.into_iter().for_each(|orphan| self.adopt(orphan));
    }

    /// Hands on the requests that have left this scheduler. A request that no replica takes
    /// continues here.
    pub(super) fn hand_on(&mut self) {
        for id in std::mem::take(&mut self.left) {
            let handed = self.scheduler.as_mut().and_then(|scheduler| scheduler.hand_on(id));
            let Some(HandedRequest { mut request, lent }) = handed else { continue };
            request.loan = lent.map(|lent| Arc::new(self.loan(lent)));
            let orphan = self.orphan(request);
            let left = match &self.peers {
                Some(peers) => peers.hand_on(orphan),
                None => Some(orphan),
            };
            if let Some(mut orphan) = left {
                // No loan is needed, because the blocks are in this member's own tiers.
                orphan.request.request.loan = None;
                orphan.request.request.past.returned = true;
                self.adopt(orphan);
            } else {
                self.stats.handed += 1;
            }
        }
    }

    /// Wraps lent blocks as a [`Loan`]. When its last reference is dropped, on any thread, an order
    /// to the engine ends the loan.
    pub(super) fn loan(&self, lent: LentBlocks) -> Loan {
        let handle = EngineHandle { shared: Arc::clone(&self.shared), orders: self.orders.clone() };
        let lender = self.peers.as_ref().map_or(0, |peers| peers.replica());
        let LentBlocks { loan, pages, states } = lent;
        Loan::new(lender, pages, Box::new(move || handle.take_back(loan))).with_states(states)
    }

    fn orphan(&mut self, request: Request) -> Orphan {
        let id = request.id;
        self.carrying.forget(id);
        self.pause.iter_mut().for_each(|pause| pause.forget(id));
        Orphan {
            queued: self.forget_arrival(id),
            admission: self.admissions.remove(&id),
            request: EngineRequest {
                request,
                payloads: self.payloads.give(id),
                pictures: self.pictures.give(id),
                constraint: self.constrained.give(id),
                // A preference matters only when a replica is chosen for a new request.
                preference: Preference::default(),
            },
        }
    }
}
