//! Pauses: no plans are made, and requests wait.
//!
//! The modes are those of vLLM's `/pause` and of SGLang's `/pause_generation`.

use crate::member::Member;
use crate::member::pause::Pause;
use crate::types::{FinishReason, PauseMode, PauseReply};

impl Member {
    pub(super) fn begin_pause(&mut self, mode: PauseMode, reply: PauseReply) {
        if mode == PauseMode::Abort {
            self.end_each(&FinishReason::Abort);
        }
        let (mut replies, kept_back) = match self.pause.take() {
            Some(last) => (last.replies, last.kept_back),
            None => Default::default(),
        };
        replies.push(reply);
        self.pause = Some(Pause { mode, has_begun: false, replies, kept_back });
    }

    pub(super) fn end_pause(&mut self) {
        let Some(pause) = self.pause.take() else { return };
        for id in pause.kept_back {
            if !self.carrying.brings(id)
                && let Some(scheduler) = &mut self.scheduler
            {
                scheduler.release(id);
            }
        }
    }

    /// True if no plan may be made.
    pub(crate) fn is_paused(&self) -> bool {
        self.pause.as_ref().is_some_and(|pause| pause.has_begun || pause.mode != PauseMode::Wait)
    }

    /// Begins the requested pause if no step is in flight. In the mode `Wait`, earlier requests
    /// have to be finished too.
    pub(crate) fn settle_pause(&mut self) {
        let in_flight = self.in_flight();
        let Some(pause) = self.pause.as_mut().filter(|pause| !pause.has_begun) else { return };
        let live = self.scheduler.as_ref().map_or(0, |scheduler| scheduler.live().count());
        let finishes = pause.mode == PauseMode::Wait && live > pause.kept_back.len();
        if in_flight > 0 || finishes {
            return;
        }
        pause.has_begun = true;
        let replies = std::mem::take(&mut pause.replies);
        if pause.mode == PauseMode::Retract
            && let Some(scheduler) = &mut self.scheduler
        {
            scheduler.preempt_all(&mut self.events);
            self.take_events();
            self.publish();
        }
        replies.into_iter().for_each(|reply| reply(live));
    }
}
