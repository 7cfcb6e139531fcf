//! Requests that go to another replica when the hand dies, and those that come from one.

use forebay_scheduler::Request;

use crate::owner::Owner;
use crate::payload::Embeds;
use crate::types::{EngineRequest, FinishReason, Orphan, RequestError, RequestId, Route, Status};

impl Owner {
    /// Goes on with a request that another engine has lost.
    pub(super) fn adopt(&mut self, orphan: Orphan) {
        let Orphan { request, past, queued_since, admission } = orphan;
        let id = request.id.0;
        self.arrivals.extend(queued_since.map(|at| (id, at)));
        self.admissions.extend(admission.map(|admission| (id, admission)));
        self.enter(request, past);
    }

    /// There is no hand: other replicas get all requests, if they can take any. What is left waits for the respawn, or ends if there
    /// will be none.
    pub(super) fn give_away(&mut self) {
        let others = self.peers.as_ref().is_some_and(|peers| peers.others_up());
        if let Some(scheduler) = self.scheduler.as_mut().filter(|_| others) {
            let taken = scheduler.surrender();
            // What they have said here comes before what they say there.
            self.deliver();
            let orphans = taken.into_iter().map(|request| self.orphan(request)).collect();
            let left = self.peers.as_ref().map_or_else(Vec::new, |peers| peers.adopt(orphans));
            for orphan in left {
                self.adopt(orphan);
            }
        }
        let failed = match &*self.shared.status.lock() {
            Status::Failed(reason) => Some(reason.clone()),
            _ => None,
        };
        if let Some(reason) = failed {
            self.end_all(|| FinishReason::Error(RequestError::HandFailed(reason.clone())));
        }
    }

    fn orphan(&mut self, request: Request) -> Orphan {
        let id = request.id;
        let embeds = request.embeds.zip(self.payloads.give(id));
        Orphan {
            past: request.past,
            queued_since: self.arrivals.remove(&id),
            admission: self.admissions.remove(&id),
            request: EngineRequest {
                id: RequestId(id),
                prompt: request.prompt,
                generated: request.generated,
                names: request.names,
                max_tokens: request.max_tokens,
                pooling: request.pooling,
                stop_ids: request.stop_ids,
                sampling: request.sampling,
                priority: request.priority,
                salt: request.cache_salt,
                embeds: embeds.map(|(offset, payload)| Embeds { payload, offset }),
                // Whoever adopts it has noted where it wanted to go.
                route: Route::default(),
            },
        }
    }
}
