//! Requests in the waiting queue, and those that have waited too long.

use forebay_scheduler::RequestView;

use crate::config::micros;
use crate::member::Member;
use crate::types::{Arrival, FinishReason, RequestError};

/// The largest number of requests in one list ([`crate::EngineHandle::look`]).
pub const MOST_VIEWS: usize = 1024;

impl Member {
    /// Returns views of the requests in their present states, at most [`MOST_VIEWS`].
    pub(super) fn look(&self) -> Vec<RequestView> {
        let views = self.scheduler.as_ref().map(|scheduler| scheduler.views().take(MOST_VIEWS));
        views.into_iter().flatten().collect()
    }

    /// Records that a request starts waiting for admission.
    pub(super) fn arrived(&mut self, id: u64, arrival: Arrival) {
        self.deadlines.extend(self.deadline(arrival).map(|at| (at, id)));
        self.arrivals.insert(id, arrival);
    }

    /// Removes a request from the records of arrivals. The caller has to release the request's
    /// entry in the waiting queue.
    pub(super) fn forget_arrival(&mut self, id: u64) -> Option<Arrival> {
        let arrival = self.arrivals.remove(&id)?;
        if let Some(at) = self.deadline(arrival) {
            self.deadlines.remove(&(at, id));
        }
        Some(arrival)
    }

    /// Ends requests that have waited too long. The clock is read only if a request has a deadline.
    pub(crate) fn expire(&mut self) {
        while let Some(&(at, id)) = self.deadlines.first() {
            let now = self.shared.clock.now_us();
            if at > now {
                return;
            }
            self.deadlines.pop_first();
            if self.scheduler.as_mut().is_some_and(|scheduler| scheduler.abort(id)) {
                let retry_after = self.shared.queued.retry_after(now);
                let seconds = self.config.queue_timeout.as_secs();
                let late = RequestError::QueueTimeout { seconds, retry_after };
                self.end(id, FinishReason::Error(late));
            }
        }
    }

    /// The time at which the next request will have waited too long; `None`: no request has a
    /// deadline.
    pub(crate) fn first_deadline(&self) -> Option<u64> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    fn deadline(&self, arrival: Arrival) -> Option<u64> {
        let limit = micros(self.config.queue_timeout);
        let limited = limit > 0 && !arrival.place.probe && !arrival.place.background;
        limited.then(|| arrival.at_us.saturating_add(limit))
    }
}
