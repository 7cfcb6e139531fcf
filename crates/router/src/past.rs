//! The history of a request: the backends that died while they had it, and its part in these
//! deaths.
//!
//! Each request in flight at a death is a suspect, as with the hands of a brain (`docs/adr/0004`).
//! Suspects are tried one at a time: a backend has at most one of them on trial. A suspect whose
//! backend dies during the trial is given up. Other requests at that backend are not blamed for the
//! death. See `docs/adr/0021`.

use std::time::{Duration, Instant};

/// Deaths of backends that a request lives through, however well they are explained.
const MAX_DEATHS: u8 = 3;
/// Deaths without another suspect.
const MAX_UNEXPLAINED: u8 = 2;
/// The least time that a trial takes, unless something is produced sooner.
const SHORTEST_TRIAL: Duration = Duration::from_secs(1);

/// The part of a request in a backend's death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The request was on trial there.
    OnTrial,
    /// Another was.
    Bystander,
    /// No request was on trial there.
    Present,
}

/// The history of a request.
#[derive(Debug, Default)]
pub(crate) struct Past {
    deaths: u8,
    unexplained: u8,
    /// The time that the request had been with the backend that died last.
    lived: Duration,
    /// True if the request has to be tried alone.
    suspect: bool,
}

impl Past {
    /// A backend has died that had the request since `since`. False: it is not tried again.
    pub(crate) fn died(&mut self, role: Role, since: Instant, now: Instant) -> bool {
        self.deaths += 1;
        self.unexplained += u8::from(role == Role::Present);
        self.lived = now.saturating_duration_since(since);
        self.suspect = true;
        role != Role::OnTrial && self.unexplained < MAX_UNEXPLAINED && self.deaths < MAX_DEATHS
    }

    /// Something was produced after the death: it got further than before.
    pub(crate) fn acquit(&mut self) {
        self.suspect = false;
    }

    /// The longest time of its next trial. A request that has produced nothing by then has outlived
    /// its earlier death. `None` if it is no suspect.
    pub(crate) fn trial(&self) -> Option<Duration> {
        self.suspect.then(|| (2 * self.lived).max(SHORTEST_TRIAL))
    }

    /// Backends that died under it.
    pub(crate) fn deaths(&self) -> u8 {
        self.deaths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn died(past: &mut Past, role: Role) -> bool {
        let now = Instant::now();
        past.died(role, now, now)
    }

    #[test]
    fn a_second_death_on_trial_is_the_last() {
        let mut past = Past::default();
        assert_eq!(past.trial(), None);
        assert!(died(&mut past, Role::Present));
        assert_eq!(past.trial(), Some(SHORTEST_TRIAL));
        assert!(!died(&mut past, Role::OnTrial));
        assert_eq!(past.deaths(), 2);
    }

    #[test]
    fn two_deaths_that_nobody_explains_are_enough() {
        let mut past = Past::default();
        assert!(died(&mut past, Role::Present));
        past.acquit();
        assert_eq!(past.trial(), None);
        assert!(!died(&mut past, Role::Present));
    }

    #[test]
    fn who_was_beside_the_one_to_blame_lives_on() {
        let mut past = Past::default();
        assert!(died(&mut past, Role::Present));
        past.acquit();
        assert!(died(&mut past, Role::Bystander));
        past.acquit();
        assert!(!died(&mut past, Role::Bystander), "but not for ever");
    }

    #[test]
    fn a_trial_lasts_longer_than_what_came_before_the_death() {
        let (mut past, start) = (Past::default(), Instant::now());
        past.died(Role::Present, start, start + 7 * SHORTEST_TRIAL);
        assert_eq!(past.trial(), Some(14 * SHORTEST_TRIAL));
    }
}
