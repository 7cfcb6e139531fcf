//! A circuit breaker. A backend that fails again and again gets no requests for a while, and then a
//! few.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The rule by which a breaker opens and closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerConfig {
    /// The number of failures within `window` that open it; 0: it never opens.
    pub failures: usize,
    /// The number of successes that close it again.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Open {
        until: Instant,
    },
    /// Requests pass one after the other until `successes` of them went well.
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
    failures: VecDeque<Instant>,
}

impl Breaker {
    /// A closed breaker.
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

    /// Notes that a request passes.
    pub fn pass(&mut self, now: Instant) {
        match &mut self.state {
            State::Open { until } if now >= *until => {
                self.state = State::Trying { successes: 0, under_way: true };
            }
            State::Trying { under_way, .. } => *under_way = true,
            State::Closed | State::Open { .. } => {}
        }
    }

    /// Notes the success of a request that passed.
    pub fn succeed(&mut self) {
        if let State::Trying { successes, under_way } = &mut self.state {
            *successes += 1;
            *under_way = false;
            if *successes >= self.config.successes {
                self.state = State::Closed;
                self.failures.clear();
            }
        }
    }

    /// Notes that the client of a request that passed went away. That is neither success nor
    /// failure.
    pub fn forgo(&mut self) {
        if let State::Trying { under_way, .. } = &mut self.state {
            *under_way = false;
        }
    }

    /// Notes the failure of a request that passed.
    pub fn fail(&mut self, now: Instant) {
        let open = State::Open { until: now + self.config.pause };
        match self.state {
            State::Open { .. } => {}
            State::Trying { .. } => self.state = open,
            State::Closed => {
                self.failures.push_back(now);
                while self.failures.front().is_some_and(|&first| first + self.config.window < now) {
                    self.failures.pop_front();
                }
                if self.config.failures > 0 && self.failures.len() >= self.config.failures {
                    self.failures.clear();
                    self.state = open;
                }
            }
        }
    }

    /// Forgets earlier failures, because the backend answers health checks again after it was gone.
    pub fn reset(&mut self) {
        self.state = State::Closed;
        self.failures.clear();
    }

    /// `closed`, `open` or `trying`.
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

    fn breaker() -> Breaker {
        let config =
            BreakerConfig { failures: 3, successes: 2, pause: 10 * SECOND, window: 5 * SECOND };
        Breaker::new(config)
    }

    #[test]
    fn only_failures_close_together_open_it() {
        let (mut breaker, start) = (breaker(), Instant::now());
        for second in [0, 3, 6, 9, 12] {
            breaker.fail(start + second * SECOND);
        }
        assert!(breaker.allows(start + 12 * SECOND));
        breaker.fail(start + 12 * SECOND);
        assert!(!breaker.allows(start + 21 * SECOND));
        assert!(breaker.allows(start + 22 * SECOND));
    }

    #[test]
    fn it_is_tried_one_by_one_before_it_closes() {
        let (mut breaker, start) = (breaker(), Instant::now());
        (0..3).for_each(|_| breaker.fail(start));
        let later = start + 10 * SECOND;
        breaker.pass(later);
        assert!(!breaker.allows(later), "one is under way");
        breaker.succeed();
        assert_eq!(breaker.name(), "trying");
        breaker.pass(later);
        breaker.forgo();
        breaker.pass(later);
        breaker.succeed();
        assert_eq!(breaker.name(), "closed");
    }

    #[test]
    fn a_failed_trial_opens_it_again() {
        let (mut breaker, start) = (breaker(), Instant::now());
        (0..3).for_each(|_| breaker.fail(start));
        let later = start + 10 * SECOND;
        breaker.pass(later);
        breaker.fail(later);
        assert!(!breaker.allows(later + 9 * SECOND) && breaker.allows(later + 10 * SECOND));
        breaker.reset();
        assert!(breaker.allows(later));
    }

    #[test]
    fn zero_failures_switch_it_off() {
        let mut breaker = Breaker::new(BreakerConfig { failures: 0, ..BreakerConfig::default() });
        let now = Instant::now();
        (0..50).for_each(|_| breaker.fail(now));
        assert!(breaker.allows(now));
    }
}
