//! The recent events of an engine: steps, and events of requests (moments). They are kept for
//! display, and contain no prompt or answer text.

use std::collections::VecDeque;

use forebay_scheduler::PlannedStep;
use parking_lot::Mutex;
use serde::Serialize;

use crate::types::FinishReason;

/// The number of steps that are kept.
pub const KEPT_STEPS: usize = 4096;
/// The number of moments that are kept, for all requests together.
pub const KEPT_MOMENTS: usize = 1 << 16;
/// The number of tokens that one [`EventKind::Tokens`] moment reports.
pub(crate) const TOKENS_A_MOMENT: u32 = 64;
/// The largest number of entries that are copied under one lock. It bounds how long the engine
/// thread waits for the lock.
const COPIED: usize = 1024;

/// A step that has ended. Times are in microseconds; `planned_us` and `done_us` are readings of the
/// engine's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepNote {
    /// The number of the step.
    pub step: u64,
    /// The time at which the plan was submitted.
    pub planned_us: u64,
    /// The time at which the result was applied.
    pub done_us: u64,
    /// The time that the device took to compute.
    pub device_us: u32,
    /// The time from the end of the previous step to the start of this one; 0 if there was no work
    /// in between.
    pub gap_us: u32,
    /// Counts of the rows, tokens and images that the step computed.
    pub planned: PlannedStep,
    /// The time that planning took.
    pub plan_us: u32,
    /// The number of steps whose results were outstanding when this step was planned.
    pub in_flight: u32,
}

/// An event of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The id of the request.
    pub id: u64,
    /// The time of the event, in microseconds of the engine's clock.
    pub at_us: u64,
    /// The event.
    pub what: EventKind,
}

/// The kinds of request events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum EventKind {
    /// The HTTP head of the request arrived.
    Received,
    /// The engine queued the request.
    Queued {
        /// The number of prompt tokens.
        prompt: u32,
        /// The largest number of tokens that it may generate.
        max_tokens: u32,
    },
    /// The request got a slot and pages.
    Admitted {
        /// The number of prompt tokens found in the prefix cache.
        cached: u32,
    },
    /// The request was admitted again after it had lost its pages or its hand.
    Replayed,
    /// Prompt tokens were computed.
    Prefill {
        /// The number of tokens.
        tokens: u32,
    },
    /// The first token was sampled.
    FirstToken,
    /// More tokens were sampled after the first token or the last event of this kind.
    Tokens {
        /// The number of tokens.
        count: u32,
    },
    /// The request lost its pages.
    Preempted,
    /// The request ended. This is its last event.
    Finished {
        /// The value of `finish_reason`: `stop`, `length`, `abort` or `error`.
        reason: &'static str,
    },
}

/// The journal entries from an index on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Since<T> {
    /// The entries, oldest first.
    pub entries: Vec<T>,
    /// The number of requested entries that are not kept any more.
    pub lost: u64,
    /// The index after the last entry.
    pub next: u64,
}

impl<T> From<u64> for Since<T> {
    /// Creates an empty list of entries from index `place` on.
    fn from(place: u64) -> Self {
        Self { entries: Vec::new(), lost: 0, next: place }
    }
}

/// A ring buffer of the newest entries. Entries have indices from 0 on.
#[derive(Debug)]
struct Ring<T> {
    kept: VecDeque<T>,
    most: usize,
    /// The index of the next entry.
    next: u64,
}

impl<T: Copy> Ring<T> {
    fn new(most: usize) -> Self {
        Self { kept: VecDeque::new(), most, next: 0 }
    }

    fn extend(&mut self, entries: impl ExactSizeIterator<Item = T>) {
        let over = (self.kept.len() + entries.len()).saturating_sub(self.most);
        self.kept.drain(..over.min(self.kept.len()));
        self.next += entries.len() as u64;
        let skipped = entries.len().saturating_sub(self.most);
        self.kept.extend(entries.skip(skipped));
    }

    /// Looks at the next [`COPIED`] entries from index `into.next` on, and copies those that match
    /// `wanted`. Returns false if there are no more entries.
    fn copy(&self, into: &mut Since<T>, wanted: impl Fn(&T) -> bool) -> bool {
        let oldest = self.next - self.kept.len() as u64;
        let from = into.next.clamp(oldest, self.next);
        into.lost += from.saturating_sub(into.next);
        let first = (from - oldest) as usize;
        let end = self.kept.len().min(first + COPIED);
        into.entries.extend(self.kept.range(first..end).copied().filter(|entry| wanted(entry)));
        into.next = oldest + end as u64;
        into.next < self.next
    }
}

/// The recent entries. The engine thread writes them, and other threads read them.
#[derive(Debug)]
pub struct Journal(Mutex<(Ring<StepNote>, Ring<Moment>)>);

impl Default for Journal {
    fn default() -> Self {
        Self(Mutex::new((Ring::new(KEPT_STEPS), Ring::new(KEPT_MOMENTS))))
    }
}

impl Journal {
    pub(crate) fn steps_since(&self, place: u64) -> Since<StepNote> {
        let mut since = Since::from(place);
        while self.0.lock().0.copy(&mut since, |_| true) {}
        since
    }

    pub(crate) fn moments_since(&self, place: u64) -> Since<Moment> {
        let mut since = Since::from(place);
        while self.0.lock().1.copy(&mut since, |_| true) {}
        since
    }

    pub(crate) fn moments_of(&self, id: u64) -> Vec<Moment> {
        let mut since = Since::from(0);
        while self.0.lock().1.copy(&mut since, |moment| moment.id == id) {}
        since.entries
    }
}

/// The engine thread's buffer of entries that it has not written to the journal yet.
#[derive(Debug, Default)]
pub struct Notes {
    /// Steps in flight, oldest first.
    planned: VecDeque<StepNote>,
    steps: Vec<StepNote>,
    moments: Vec<Moment>,
    /// The id of the request whose token was noted last, and the number of that token within the
    /// request, from 1 on.
    last: (u64, u32),
}

impl Notes {
    /// Notes a submitted plan, unless it computes nothing.
    pub fn planned(&mut self, step: StepNote) {
        if step.planned.computes() {
            self.planned.push_back(step);
        }
    }

    /// Notes a result, unless its step computed nothing.
    pub fn done(&mut self, step: u64, done_us: u64, device_us: u32, gap_us: u32) {
        if self.planned.front().is_some_and(|planned| planned.step == step)
            && let Some(planned) = self.planned.pop_front()
        {
            self.steps.push(StepNote { done_us, device_us, gap_us, ..planned });
        }
    }

    /// Forgets the steps in flight, because they will have no results.
    pub fn hand_died(&mut self) {
        self.planned.clear();
    }

    /// Notes an event of a request.
    pub fn moment(&mut self, id: u64, at_us: u64, what: EventKind) {
        self.moments.push(Moment { id, at_us, what });
    }

    /// Notes the `nth` token of a request. Most tokens create no moment.
    pub fn token(&mut self, id: u64, nth: u32, at_us: u64) {
        self.last = (id, nth);
        if nth == 1 {
            self.moment(id, at_us, EventKind::FirstToken);
        } else if nth.is_multiple_of(TOKENS_A_MOMENT) {
            // The first token was reported by `FirstToken`.
            let first = u32::from(nth == TOKENS_A_MOMENT);
            self.moment(id, at_us, EventKind::Tokens { count: TOKENS_A_MOMENT - first });
        }
    }

    /// Notes the end of a request.
    pub fn finished(&mut self, id: u64, at_us: u64, finish: &FinishReason) {
        if let (of, nth) = self.last
            && of == id
        {
            let alone = u32::from(nth < TOKENS_A_MOMENT);
            let count = (nth % TOKENS_A_MOMENT).saturating_sub(alone);
            if count > 0 {
                self.moment(id, at_us, EventKind::Tokens { count });
            }
        }
        let reason = match finish {
            FinishReason::Stop { .. } => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error(_) => "error",
        };
        self.moment(id, at_us, EventKind::Finished { reason });
    }

    /// Writes the new entries into the journal.
    pub fn write(&mut self, journal: &Journal) {
        if self.steps.is_empty() && self.moments.is_empty() {
            return;
        }
        let mut rings = journal.0.lock();
        rings.0.extend(self.steps.drain(..));
        rings.1.extend(self.moments.drain(..));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_keeps_the_newest_and_says_how_many_are_lost() {
        let mut ring = Ring::new(3);
        ring.extend([1, 2].into_iter());
        let since = |ring: &Ring<i32>, place| {
            let mut since = Since::from(place);
            while ring.copy(&mut since, |_| true) {}
            (since.entries, since.lost, since.next)
        };
        assert_eq!(since(&ring, 0), (vec![1, 2], 0, 2));
        ring.extend([3, 4, 5].into_iter());
        assert_eq!(since(&ring, 1), (vec![3, 4, 5], 1, 5));
        assert_eq!(since(&ring, 5), (vec![], 0, 5));
        ring.extend([6, 7, 8, 9, 10].into_iter());
        assert_eq!(since(&ring, 5).1, 2, "more than fit at once");
    }

    #[test]
    fn a_reader_copies_in_parts_and_misses_nothing() {
        let mut ring = Ring::new(5000);
        ring.extend((0..5000).collect::<Vec<_>>().into_iter());
        let mut since = Since::from(0);
        assert!(ring.copy(&mut since, |_| true));
        assert_eq!((since.entries.len(), since.next), (COPIED, COPIED as u64));
        while ring.copy(&mut since, |_| true) {}
        assert_eq!(since.entries, (0..5000).collect::<Vec<_>>());
    }

    #[test]
    fn tokens_are_counted_once() {
        for total in [1, 2, 63, 64, 65, 128, 200] {
            let mut notes = Notes::default();
            (1..=total).for_each(|nth| notes.token(7, nth, u64::from(nth)));
            notes.finished(7, 999, &FinishReason::Length);
            let counted = notes.moments.iter().map(|moment| match moment.what {
                EventKind::FirstToken => 1,
                EventKind::Tokens { count } => count,
                _ => 0,
            });
            assert_eq!(counted.sum::<u32>(), total);
            let last = notes.moments.last().unwrap();
            assert_eq!(last.what, EventKind::Finished { reason: "length" });
        }
    }
}
