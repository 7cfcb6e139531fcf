//! The recent events of an engine: steps, and moments of requests. They are kept for display, and
//! contain no text.

use std::collections::VecDeque;

use forebay_scheduler::PlannedStep;
use parking_lot::Mutex;
use serde::Serialize;

use crate::types::FinishReason;

/// The number of kept steps.
pub const KEPT_STEPS: usize = 4096;
/// The number of moments that are kept, for all requests together.
pub const KEPT_MOMENTS: usize = 1 << 16;
/// Tokens of a request between two moments that report tokens.
pub(crate) const TOKENS_A_MOMENT: u32 = 64;
/// The largest number of entries that are copied at a time, which bounds how long the engine thread
/// waits.
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
    /// The time for which the device computed.
    pub device_us: u32,
    /// The time from the end of the step before to the start of this one, if there was work.
    pub gap_us: u32,
    /// The work of the step.
    pub planned: PlannedStep,
    /// The time that planning took.
    pub plan_us: u32,
    /// Steps whose results were outstanding when this one was planned.
    pub in_flight: u32,
}

/// An event in a request's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The request's name.
    pub id: u64,
    /// The time of the event, in microseconds of the engine's clock.
    pub at_us: u64,
    /// The event.
    pub what: EventKind,
}

/// The kinds of events in a request's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum EventKind {
    /// The head of the request had arrived.
    Received,
    /// The engine took the request.
    Queued {
        /// Tokens of its prompt.
        prompt: u32,
        /// The largest number of tokens that it may generate.
        max_tokens: u32,
    },
    /// The request got a slot and pages.
    Admitted {
        /// Prompt tokens that were in the prefix cache.
        cached: u32,
    },
    /// The request came back after it had lost its pages or its hand.
    Replayed,
    /// Positions of its prompt were computed.
    Prefill {
        /// The number of tokens.
        tokens: u32,
    },
    /// The first token was sampled.
    FirstToken,
    /// More tokens were sampled since the last moment of this kind.
    Tokens {
        /// The number of tokens.
        count: u32,
    },
    /// The request lost its pages.
    Preempted,
    /// The request ended, and no moment follows.
    Finished {
        /// The reason, as `finish_reason` has it: `stop`, `length`, `abort` or `error`.
        reason: &'static str,
    },
}

/// The entries from a place on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Since<T> {
    /// Oldest first.
    pub entries: Vec<T>,
    /// The number of requested entries that are no longer kept.
    pub lost: u64,
    /// The place after the last entry.
    pub next: u64,
}

impl<T> From<u64> for Since<T> {
    /// Makes an empty copy, from a place on.
    fn from(place: u64) -> Self {
        Self { entries: Vec::new(), lost: 0, next: place }
    }
}

/// The newest entries. Each has an index, from 0 on.
#[derive(Debug)]
struct Ring<T> {
    kept: VecDeque<T>,
    most: usize,
    /// The place of the next one.
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

    /// Copies entries that match `wanted`, among the next [`COPIED`] from `into.next` on. False:
    /// there are no more.
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

/// The entries that the engine thread writes and others read.
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

/// The engine thread's buffer of entries that are not in the journal yet.
#[derive(Debug, Default)]
pub struct Notes {
    /// Steps in flight, oldest first.
    planned: VecDeque<StepNote>,
    steps: Vec<StepNote>,
    moments: Vec<Moment>,
    /// The request of the last token, and the token's number.
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

    /// Notes the `nth` token of a request. Most tokens make no moment.
    pub fn token(&mut self, id: u64, nth: u32, at_us: u64) {
        self.last = (id, nth);
        if nth == 1 {
            self.moment(id, at_us, EventKind::FirstToken);
        } else if nth.is_multiple_of(TOKENS_A_MOMENT) {
            // The first had a moment of its own.
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
