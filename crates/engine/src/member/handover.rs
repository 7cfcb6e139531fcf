//! Requests that go to another replica when the hand dies, and those that come from one.

use forebay_scheduler::Request;

use crate::member::Member;
use crate::types::{EngineRequest, Orphan, Preference};

impl Member {
    /// Goes on with a request that another engine has lost.
    pub(super) fn adopt(&mut self, orphan: Orphan) {
        let Orphan { request, queued, admission } = orphan;
        let id = request.request.id;
        if let Some(arrival) = queued {
            self.arrived(id, arrival);
        }
        self.admissions.extend(admission.map(|admission| (id, admission)));
        self.enter(request);
    }

    /// There is no hand: other replicas get all requests, if they can take any. What is left waits
    /// for the first that comes back, or ends if none will: if it is `over`.
    pub(crate) fn give_away(&mut self, over: bool) {
        let others = self.peers.as_ref().is_some_and(|peers| peers.others_up());
        if let Some(scheduler) = self.scheduler.as_mut().filter(|_| others) {
            let taken = scheduler.surrender();
            // What they have said here comes before what they say there.
            self.deliver();
            let orphans = taken.into_iter().map(|request| self.orphan(request)).collect();
            let left = self.peers.as_ref().map_or_else(Vec::new, |peers| peers.adopt(orphans));
            let failure = self.failure();
            for orphan in left {
                let id = orphan.request.request.id;
                self.adopt(orphan);
                // Others could take requests, but not this one: it would wait for a hand that may
                // never come back.
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

    fn orphan(&mut self, request: Request) -> Orphan {
        let id = request.id;
        self.carrying.forget(id);
        Orphan {
            queued: self.forget_arrival(id),
            admission: self.admissions.remove(&id),
            request: EngineRequest {
                request,
                payloads: self.payloads.give(id),
                pictures: self.pictures.give(id),
                constraint: self.constrained.give(id),
                // Whoever adopts it has noted where it wanted to go.
                preference: Preference::default(),
            },
        }
    }
}
