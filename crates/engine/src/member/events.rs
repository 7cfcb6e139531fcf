//! Handles the events of the scheduler, and ends requests.

use forebay_protocol::{PLACE_FAILED_DIGEST, PLACE_FAILED_FILES, PLACE_FAILED_MEMORY};
use forebay_scheduler::{Event, Finish};

use crate::journal::EventKind;
use crate::member::Member;
use crate::types::{
    Admission, Arrival, FinishReason, Output, PredictedTokens, RequestError, RequestId,
    SampledToken, Status,
};

impl Member {
    /// Handles the scheduler's events, and turns them into outputs.
    pub(crate) fn take_events(&mut self) {
        let now = self.noted_us;
        let mut events = std::mem::take(&mut self.events);
        let (mut masked, mut said) = (Vec::new(), Vec::new());
        for event in events.drain(..) {
            match event {
                Event::Admitted { id, cached_tokens, replayed, restoring } => {
                    self.peers.iter().for_each(|peers| peers.admitted(id));
                    if restoring {
                        self.arriving.insert(id, self.shared.clock.now_us());
                    }
                    // The first mask is computed during the prefill.
                    masked.extend(self.has_mask_threads().then_some(id));
                    self.stats.replayed += u64::from(replayed);
                    let admitted = EventKind::Admitted { cached: cached_tokens };
                    let what = if replayed { EventKind::Replayed } else { admitted };
                    self.notes.moment(id, now, what);
                    if let Some(Arrival { at_us, place }) = self.forget_arrival(id) {
                        self.shared.queued.admitted(place, now);
                        let queue_us = now.saturating_sub(at_us);
                        self.admissions.insert(id, Admission { cached_tokens, queue_us });
                    }
                }
                Event::Prefilled { id, tokens } => {
                    self.notes.moment(id, now, EventKind::Prefill { tokens });
                }
                Event::Token { id, nth, token, logprobs } => {
                    self.notes.token(id, nth, now);
                    match self.constrained.say(id, token) {
                        Some(true) => masked.push(id),
                        Some(false) if said.last() != Some(&id) => said.push(id),
                        _ => {}
                    }
                    let token = Some(SampledToken { id: token, logprobs });
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    // The token is added to an earlier output of the same step, if there is one.
                    let first =
                        self.outputs.last_mut().filter(|last| last.id == id && last.lacks_token());
                    match first {
                        Some(first) => first.token = token,
                        None => self.outputs.push(Output { admission, token, ..Output::of(id) }),
                    }
                }
                Event::PromptLogprobs { id, logprobs } => {
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    let prompt = Some(logprobs);
                    self.outputs.push(Output { admission, prompt, ..Output::of(id) });
                }
                Event::Pooled { id, vector } => {
                    let pooled = Some(vector);
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    self.outputs.push(Output { admission, pooled, ..Output::of(id) });
                }
                Event::Predicted { id, accepted, rejected } => {
                    let (admission, id) = (self.take_admission(id), RequestId(id));
                    let predicted = Some(PredictedTokens { accepted, rejected });
                    self.outputs.push(Output { admission, predicted, ..Output::of(id) });
                }
                Event::Finished { id, reason } => {
                    let finish = match reason {
                        Finish::Stop { token } => FinishReason::Stop { token },
                        Finish::Length => FinishReason::Length,
                        Finish::NotFinite => FinishReason::Error(RequestError::NotFinite),
                        Finish::NoAdapter { error } => {
                            FinishReason::Error(RequestError::Adapter(why_not_placed(error)))
                        }
                    };
                    self.end(id, finish);
                }
                Event::ImageWanted { id, index, image } => self.place(id, index, image),
                Event::ImageRead { patches } => self.pictures.read(patches),
                Event::Left { id } => self.left.push(id),
                Event::Arrived { id } | Event::Preempted { id } => {
                    if matches!(event, Event::Preempted { .. }) {
                        self.notes.moment(id, now, EventKind::Preempted);
                    }
                    if let Some(since) = self.arriving.remove(&id) {
                        let now = self.shared.clock.now_us();
                        self.stats.copy_wait_us += now.saturating_sub(since);
                    }
                }
            }
        }
        self.events = events;
        self.expect_masked(&said);
        if !masked.is_empty() {
            self.begin_masks(&masked);
        }
        self.forget_unread();
    }

    pub(super) fn take_admission(&mut self, id: u64) -> Option<Admission> {
        if self.admissions.is_empty() { None } else { self.admissions.remove(&id) }
    }

    /// Queues the last output of a request that the scheduler has dropped.
    pub(super) fn end(&mut self, id: u64, finish: FinishReason) {
        if let Some(Arrival { place, .. }) = self.forget_arrival(id) {
            self.shared.queued.left(place, self.shared.clock.now_us());
        }
        self.notes.finished(id, self.shared.clock.now_us(), &finish);
        self.admissions.remove(&id);
        self.arriving.remove(&id);
        self.payloads.retire(id, (self.in_flight() > 0).then_some(self.last_step));
        self.carrying.forget(id);
        self.pause.iter_mut().for_each(|pause| pause.forget(id));
        self.constrained.forget(id);
        self.pictures.give(id);
        let id = RequestId(id);
        match self.outputs.last_mut() {
            Some(last) if last.id == id && last.finish.is_none() => last.finish = Some(finish),
            _ => {
                let finish = Some(finish);
                self.outputs.push(Output { finish, ..Output::of(id) });
            }
        }
    }

    /// The finish reason of requests if the hand was given up; `None` otherwise.
    pub(super) fn failure(&self) -> Option<FinishReason> {
        match &*self.shared.status.lock() {
            Status::Failed(reason) => {
                Some(FinishReason::Error(RequestError::HandFailed(reason.clone())))
            }
            _ => None,
        }
    }

    /// Ends every request, because the hand will not come back or the engine stops.
    pub(crate) fn end_all(&mut self) {
        let finish = self.failure().unwrap_or(FinishReason::Abort);
        self.end_each(&finish);
    }

    /// Ends every request for the same reason.
    pub(super) fn end_each(&mut self, finish: &FinishReason) {
        let Some(scheduler) = self.scheduler.as_mut() else {
            return;
        };
        let ids: Vec<u64> = scheduler.live().collect();
        for id in ids {
            if self.scheduler.as_mut().is_some_and(|s| s.abort(id)) {
                self.end(id, finish.clone());
            }
        }
    }
}

/// Returns the reason why the hand could not load an adapter.
fn why_not_placed(error: i32) -> String {
    match error {
        PLACE_FAILED_FILES => "its files can't be read any more",
        PLACE_FAILED_DIGEST => "its files have changed since it was loaded: load it again",
        PLACE_FAILED_MEMORY => "there is no memory for it",
        _ => "the model process could not read it",
    }
    .into()
}
