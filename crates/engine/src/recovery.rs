//! Whether and when a dead hand is started again.

/// What to do about a death.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Start again at this time.
    RestartAt(u64),
    /// It will not come back.
    GiveUp,
}

/// Counts failed starts. A hand that was ready once gets `limit` tries to come back; one that never was gets none, because what
/// keeps it from starting (an unsupported model, too little memory) does not go away by itself.
#[derive(Debug)]
pub(crate) struct Recovery {
    limit: u32,
    failures: u32,
    ready_since: Option<u64>,
    ever_ready: bool,
}

const FIRST_BACKOFF_US: u64 = 250_000;
/// A hand that was ready this long did start, whatever killed it afterwards.
const SETTLED_US: u64 = 5_000_000;

impl Recovery {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, failures: 0, ready_since: None, ever_ready: false }
    }

    /// The hand is ready.
    pub(crate) fn ready(&mut self, now_us: u64) {
        self.ever_ready = true;
        self.ready_since = Some(now_us);
    }

    /// The hand answered a step.
    pub(crate) fn works(&mut self) {
        self.failures = 0;
    }

    /// The hand died.
    pub(crate) fn died(&mut self, now_us: u64) -> Verdict {
        let up_us = self.ready_since.take().map(|since| now_us.saturating_sub(since));
        if up_us.is_some_and(|up| up >= SETTLED_US) {
            self.failures = 0;
        }
        if !self.ever_ready || self.failures > self.limit {
            return Verdict::GiveUp;
        }
        self.failures += 1;
        // The first restart after a success is immediate.
        let backoff = match self.failures {
            1 => 0,
            n => FIRST_BACKOFF_US << (n - 2).min(6),
        };
        Verdict::RestartAt(now_us + backoff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_start_that_fails_is_final() {
        assert_eq!(Recovery::new(3).died(0), Verdict::GiveUp);
    }

    #[test]
    fn respawns_back_off_and_end() {
        let mut recovery = Recovery::new(2);
        recovery.ready(0);
        assert_eq!(recovery.died(7), Verdict::RestartAt(7));
        assert_eq!(recovery.died(0), Verdict::RestartAt(250_000));
        assert_eq!(recovery.died(0), Verdict::RestartAt(500_000));
        assert_eq!(recovery.died(0), Verdict::GiveUp);
        recovery.works();
        assert_eq!(recovery.died(9), Verdict::RestartAt(9));
    }

    #[test]
    fn kills_of_an_idle_hand_that_had_settled_do_not_add_up() {
        let mut recovery = Recovery::new(1);
        for round in 0..9 {
            let now = round * 10_000_000;
            recovery.ready(now);
            assert_eq!(recovery.died(now + SETTLED_US), Verdict::RestartAt(now + SETTLED_US));
        }
    }
}
