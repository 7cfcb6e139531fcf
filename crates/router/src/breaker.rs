//! A circuit breaker: a backend that fails repeatedly gets no requests for a while, and then one at
//! a time.
//!
//! A client may send requests that always fail, so the failures of one client prove little. A
//! breaker opens only for failures of several clients' requests, or for failures that the router
//! detects by itself. Each success cancels one failure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Limits at which a breaker opens and closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerConfig {
    /// The number of failures within `window` that open the breaker; 0: it never opens.
    pub failures: usize,
    /// The number of successes that close an open breaker.
    pub successes: usize,
    /// The time for which the breaker stays open.
    pub pause: Duration,
    /// The time for which a failure counts.
    pub window: Duration,
}

impl Default for BreakerConfig {
    /// The defaults of SGLang's router.
    fn default() -> Self {
        Self {
            failures: 10,
            successes: 3,
            pause: Duration::from_secs(60),
            window: Duration::from_secs(120),
        }
    }
}

/// The origin of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureOrigin {
    /// The failure of a request of this client.
    Client(u64),
    /// The router itself: a connection could not be opened, or a health check got no response.
    Router,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Open {
        until: Instant,
    },
    /// Requests pass one at a time until `successes` of them have succeeded.
    Trying {
        successes: usize,
        under_way: bool,
    },
}

/// The breaker of one backend.
#[derive(Debug)]
pub struct Breaker {
    config: BreakerConfig,
    state: State,
    failures: VecDeque<(Instant, FailureOrigin)>,
}

impl Breaker {
    /// Creates a closed breaker.
    #[must_use]
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, state: State::Closed, failures: VecDeque::new() }
    }

    /// True if a request may pass at `now`.
    #[must_use]
    pub fn allows(&self, now: Instant) -> bool {
        match self.state {
            State::Closed => true,
            State::Open { until } => now >= until,
            State::Trying { under_way, .. } => !under_way,
        }
    }

    /// Records that a request passes.
    pub fn pass(&mut self, now: Instant) {
        match &mut self.state {
            State::Open { until } if now >= *until => {
                self.state = State::Trying { successes: 0, under_way: true };
            }
            State::Trying { under_way, .. } => *under_way = true,
            State::Closed | State::Open { .. } => {}
        }
    }

    /// Records that a request which passed was answered.
    pub fn answer(&mut self) {
        if let State::Trying { successes, under_way } = &mut self.state {
            *successes += 1;
            *under_way = false;
            if *successes >= self.config.successes {
                self.reset();
            }
        }
    }

    /// Records that the answer to a request was completed, which cancels a failure.
    pub fn succeed(&mut self) {
        if self.state == State::Closed {
            self.failures.pop_front();
        }
    }

    /// Records that a request which passed ended without an answer. The request itself may be to
    /// blame.
    pub fn forgo(&mut self) {
        if let State::Trying { under_way, .. } = &mut self.state {
            *under_way = false;
        }
    }

    /// Records a failure. Failures of one client count for at most half of the limit.
    pub fn fail(&mut self, now: Instant, origin: FailureOrigin) {
        if matches!(self.state, State::Open { .. }) || self.config.failures == 0 {
            return;
        }
        self.failures.retain(|(time, _)| *time + self.config.window >= now);
        let share = match origin {
            FailureOrigin::Client(_) => self.config.failures.div_ceil(2),
            FailureOrigin::Router => self.config.failures,
        };
        let of_origin = |(_, other): &(Instant, FailureOrigin)| *other == origin;
        if self.failures.iter().filter(|failure| of_origin(failure)).count() >= share
            && let Some(oldest) = self.failures.iter().position(of_origin)
        {
            self.failures.remove(oldest);
        }
        self.failures.push_back((now, origin));
        let trying = matches!(self.state, State::Trying { .. });
        if self.is_agreed() && (trying || self.failures.len() >= self.config.failures) {
            self.failures.clear();
            self.state = State::Open { until: now + self.config.pause };
        }
    }

    /// True if the failures do not all come from one client.
    fn is_agreed(&self) -> bool {
        let mut origins = self.failures.iter().map(|&(_, origin)| origin);
        let first = origins.next();
        first == Some(FailureOrigin::Router) || origins.any(|origin| Some(origin) != first)
    }

    /// Closes the breaker and forgets earlier failures, because the backend was down and is up
    /// again.
    pub fn reset(&mut self) {
        self.state = State::Closed;
        self.failures.clear();
    }

    /// The name of the state: `closed`, `open` or `trying`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.state {
            State::Closed => "closed",
            State::Open { .. } => "open",
            State::Trying { .. } => "trying",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const ROUTER: FailureOrigin = FailureOrigin::Router;

    fn breaker(failures: usize) -> Breaker {
        Breaker::new(BreakerConfig {
            failures,
            successes: 2,
            pause: 10 * SECOND,
            window: 30 * SECOND,
        })
    }

    fn client(number: u64) -> FailureOrigin {
        FailureOrigin::Client(number)
    }

    #[test]
    fn failures_close_together_open_it() {
        let (mut breaker, start) = (breaker(3), Instant::now());
        for second in [0, 40, 80, 81] {
            breaker.fail(start + second * SECOND, ROUTER);
            assert!(breaker.allows(start + second * SECOND));
        }
        breaker.fail(start + 82 * SECOND, ROUTER);
        assert!(!breaker.allows(start + 91 * SECOND) && breaker.allows(start + 92 * SECOND));
    }

    #[test]
    fn one_client_cannot_open_it() {
        for threshold in 1..6 {
            let (mut breaker, now) = (breaker(threshold), Instant::now());
            (0..50).for_each(|_| breaker.fail(now, client(1)));
            assert!(breaker.allows(now) && breaker.failures.len() <= threshold);
            let more = threshold - threshold.div_ceil(2);
            (0..more.max(1)).for_each(|_| breaker.fail(now, client(2)));
            assert!(!breaker.allows(now), "{threshold}");
        }
    }

    #[test]
    fn a_success_takes_a_failure_off() {
        let (mut breaker, now) = (breaker(4), Instant::now());
        for round in 0..50 {
            breaker.fail(now, client(round));
            breaker.fail(now, client(round + 1));
            breaker.succeed();
            breaker.succeed();
        }
        assert!(breaker.allows(now) && breaker.failures.is_empty());
        (0..4).for_each(|number| breaker.fail(now, client(number)));
        assert!(!breaker.allows(now));
    }

    #[test]
    fn requests_try_one_after_the_other_until_enough_went_well() {
        let (mut breaker, start) = (breaker(3), Instant::now());
        (0..3).for_each(|_| breaker.fail(start, ROUTER));
        let later = start + 10 * SECOND;
        breaker.pass(later);
        assert!(!breaker.allows(later), "one probe is under way");
        breaker.answer();
        assert_eq!(breaker.name(), "trying");
        breaker.pass(later);
        breaker.forgo();
        breaker.pass(later);
        breaker.answer();
        assert_eq!(breaker.name(), "closed");
    }

    #[test]
    fn a_failed_trial_opens_it_again_unless_it_is_one_clients() {
        let (mut breaker, start) = (breaker(3), Instant::now());
        (0..3).for_each(|_| breaker.fail(start, ROUTER));
        let later = start + 10 * SECOND;
        breaker.pass(later);
        (0..9).for_each(|_| breaker.fail(later, client(1)));
        assert_eq!(breaker.name(), "trying");
        breaker.fail(later, client(2));
        assert!(!breaker.allows(later + 9 * SECOND) && breaker.allows(later + 10 * SECOND));
        breaker.pass(later + 10 * SECOND);
        breaker.fail(later + 10 * SECOND, ROUTER);
        assert_eq!(breaker.name(), "open");
        breaker.reset();
        assert!(breaker.allows(later));
    }

    #[test]
    fn zero_failures_switch_it_off() {
        let (mut breaker, now) = (breaker(0), Instant::now());
        (0..50).for_each(|_| breaker.fail(now, ROUTER));
        assert!(breaker.allows(now));
    }
}
