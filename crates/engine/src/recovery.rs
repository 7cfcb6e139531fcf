//! Decides whether and when a dead hand is restarted.

/// The decision after a death.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Start the hand again at this time, in microseconds.
    RestartAt(u64),
    /// Give the hand up. If other replicas are serving, the owner tries once more at this time.
    GiveUp {
        /// The time of the next start, in microseconds.
        again_at: u64,
    },
}

/// Counts failed starts. A hand that was ready once gets `limit` attempts to come back. A hand that
/// was never ready gets none, because the obstacle (an unsupported model, too little memory) does
/// not go away by itself.
///
/// A hand that dies while it computes has started successfully, so its death is no failed start.
/// Instead, a request is suspected of causing the death. A request is given up after two deaths.
/// The hand is never given up because of such deaths, however many there are.
#[derive(Debug)]
pub(crate) struct Recovery {
    limit: u32,
    failures: u32,
    /// The number of times that the hand was given up since it last worked.
    given_up: u32,
    ready_since: Option<u64>,
    ever_ready: bool,
}

const FIRST_BACKOFF_US: u64 = 250_000;
/// If a hand has been ready for this many microseconds, its start counts as a success, even if it
/// dies later.
const SETTLED_US: u64 = 5_000_000;
/// The time between giving up and the next attempt. It doubles each time.
const LONG_BACKOFF_US: u64 = 30_000_000;
const LONGEST_BACKOFF_US: u64 = 300_000_000;

impl Recovery {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, failures: 0, given_up: 0, ready_since: None, ever_ready: false }
    }

    /// Records that the hand is ready.
    pub(crate) fn ready(&mut self, now_us: u64) {
        self.ever_ready = true;
        self.ready_since = Some(now_us);
    }

    /// Records that the hand has computed a step, which ends a series of failures.
    pub(crate) fn works(&mut self) {
        (self.failures, self.given_up) = (0, 0);
    }

    /// Handles a death at `now_us`; `computing` is true if a step was in flight.
    pub(crate) fn died(&mut self, now_us: u64, computing: bool) -> Verdict {
        let up_us = self.ready_since.take().map(|since| now_us.saturating_sub(since));
        if computing || up_us.is_some_and(|up| up >= SETTLED_US) {
            self.works();
        }
        if computing {
            return Verdict::RestartAt(now_us);
        }
        if !self.ever_ready || self.failures > self.limit {
            return self.give_up(now_us);
        }
        self.failures += 1;
        // The first restart after a success is immediate.
        let backoff = match self.failures {
            1 => 0,
            n => FIRST_BACKOFF_US << (n - 2).min(6),
        };
        Verdict::RestartAt(now_us + backoff)
    }

    /// Gives up a hand that would die again.
    pub(crate) fn give_up(&mut self, now_us: u64) -> Verdict {
        self.ready_since = None;
        let wait = (LONG_BACKOFF_US << self.given_up.min(4)).min(LONGEST_BACKOFF_US);
        self.given_up += 1;
        Verdict::GiveUp { again_at: now_us + wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    fn given_up(seconds: u64) -> Verdict {
        Verdict::GiveUp { again_at: seconds * SECOND_US }
    }

    #[test]
    fn a_first_start_that_fails_is_given_up_at_once() {
        assert_eq!(Recovery::new(3).died(0, false), given_up(30));
    }

    #[test]
    fn respawns_back_off_and_end() {
        let mut recovery = Recovery::new(2);
        recovery.ready(0);
        assert_eq!(recovery.died(7, false), Verdict::RestartAt(7));
        assert_eq!(recovery.died(0, false), Verdict::RestartAt(250_000));
        assert_eq!(recovery.died(0, false), Verdict::RestartAt(500_000));
        assert_eq!(recovery.died(0, false), given_up(30));
        recovery.works();
        assert_eq!(recovery.died(9, false), Verdict::RestartAt(9));
    }

    #[test]
    fn whoever_was_given_up_is_tried_ever_more_seldom() {
        let mut recovery = Recovery::new(0);
        let waits = [30, 60, 120, 240, 300, 300];
        assert!(waits.iter().all(|&wait| recovery.died(0, false) == given_up(wait)));
        recovery.ready(0);
        assert_eq!(recovery.died(SETTLED_US, false), Verdict::RestartAt(SETTLED_US));
        assert_eq!(recovery.died(0, false), given_up(30), "the worker has worked in between");
    }

    #[test]
    fn deaths_that_a_request_is_blamed_for_do_not_add_up() {
        let mut recovery = Recovery::new(0);
        for now in 0..1000 {
            recovery.ready(now);
            assert_eq!(recovery.died(now, true), Verdict::RestartAt(now));
        }
        assert_eq!(recovery.died(1000, false), Verdict::RestartAt(1000), "the first failed start");
        assert_eq!(
            recovery.died(1000, false),
            Verdict::GiveUp { again_at: 1000 + LONG_BACKOFF_US }
        );
    }

    #[test]
    fn kills_of_an_idle_hand_that_had_settled_do_not_add_up() {
        let mut recovery = Recovery::new(1);
        for round in 0..9 {
            let now = round * 10_000_000;
            recovery.ready(now);
            assert_eq!(
                recovery.died(now + SETTLED_US, false),
                Verdict::RestartAt(now + SETTLED_US)
            );
        }
    }
}
