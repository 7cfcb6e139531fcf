//! The history of a request: the backends that died while they computed it, and its role in these
//! deaths.
//!
//! Each request in flight at a death is a suspect, as in a brain when a hand dies (ADR 4). A
//! backend has at most one suspect on trial at a time. If a backend dies during a trial, only the
//! request on trial is given up. See ADR 21 and ADR 66.

use std::time::{Duration, Instant};

/// The shortest time of a trial that does not end earlier by output.
const SHORTEST_TRIAL: Duration = Duration::from_secs(1);
/// The number of deaths after which a trial does not end with the first output.
const MANY: u8 = 2;

/// A request's role in a backend's death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The request itself was on trial.
    OnTrial,
    /// Another request was on trial.
    Bystander,
    /// No request was on trial.
    Present,
}

/// The length of a request's trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trial {
    /// Until the request produces output, or until this time has passed. The time is longer than
    /// the time for which the request ran before the last death.
    Output(Duration),
    /// For this time, even if the request produces output: the request was in flight at several
    /// deaths, so output alone does not clear it.
    Time(Duration),
    /// Until the request ends. It was in flight at several deaths for which no other request is to
    /// blame.
    Whole,
}

impl Trial {
    /// Returns the time after which the trial ends even without output; `None`: there is no limit.
    pub(crate) fn longest(self) -> Option<Duration> {
        match self {
            Self::Output(time) | Self::Time(time) => Some(time),
            Self::Whole => None,
        }
    }
}

/// The history of a request.
#[derive(Debug, Default)]
pub(crate) struct Past {
    deaths: u8,
    /// The number of deaths for which no other request is to blame.
    unexplained: u8,
    /// The time for which the request had been at the backend that died last.
    lived: Duration,
    /// The time of the last death.
    last: Option<Instant>,
    /// True if the request has to be put on trial.
    suspect: bool,
}

impl Past {
    /// Records the death of a backend that had the request since `since`. Returns false if the
    /// request must not be tried again.
    pub(crate) fn died(&mut self, role: Role, since: Instant, now: Instant) -> bool {
        self.deaths = self.deaths.saturating_add(1);
        self.unexplained = self.unexplained.saturating_add((role == Role::Present).into());
        self.lived = now.saturating_duration_since(since);
        self.last = Some(now);
        self.suspect = true;
        role != Role::OnTrial
    }

    /// Records output after the last death. Returns true if the trial is over.
    pub(crate) fn produced(&mut self) -> bool {
        let over = matches!(self.trial(), None | Some(Trial::Output(_)));
        self.suspect &= !over;
        over
    }

    /// Returns the request's next trial; `None`: the request is not a suspect.
    pub(crate) fn trial(&self) -> Option<Trial> {
        let time = (2 * self.lived).max(SHORTEST_TRIAL);
        self.suspect.then_some(match (self.deaths, self.unexplained) {
            (..MANY, _) => Trial::Output(time),
            (_, ..=MANY) => Trial::Time(time),
            _ => Trial::Whole,
        })
    }

    /// Returns the time of the last death if the request is still a suspect.
    pub(crate) fn suspected(&self) -> Option<Instant> {
        self.last.filter(|_| self.suspect)
    }

    /// The number of backends that died while they computed the request.
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
    fn a_death_on_trial_is_the_last() {
        let mut past = Past::default();
        assert_eq!(past.trial(), None);
        assert!(died(&mut past, Role::Present));
        assert_eq!(past.trial(), Some(Trial::Output(SHORTEST_TRIAL)));
        assert!(!died(&mut past, Role::OnTrial));
        assert_eq!(past.deaths(), 2);
    }

    #[test]
    fn deaths_in_company_make_trials_longer_and_give_nothing_up() {
        let mut past = Past::default();
        assert!(died(&mut past, Role::Present));
        assert!(past.produced() && past.trial().is_none() && past.suspected().is_none());
        assert!(died(&mut past, Role::Present));
        assert_eq!(past.trial(), Some(Trial::Time(SHORTEST_TRIAL)));
        assert!(!past.produced() && past.trial().is_some(), "the first output is no proof");
        for _ in 0..300 {
            assert!(died(&mut past, Role::Present));
            assert_eq!(past.trial(), Some(Trial::Whole));
        }
        assert!(!died(&mut past, Role::OnTrial));
    }

    #[test]
    fn who_was_beside_the_one_to_blame_lives_on() {
        let mut past = Past::default();
        assert!(died(&mut past, Role::Present));
        for _ in 0..300 {
            past.produced();
            assert!(died(&mut past, Role::Bystander));
            assert_eq!(past.trial(), Some(Trial::Time(SHORTEST_TRIAL)));
        }
    }

    #[test]
    fn a_trial_lasts_longer_than_what_came_before_the_death() {
        let (mut past, start) = (Past::default(), Instant::now());
        past.died(Role::Present, start, start + 7 * SHORTEST_TRIAL);
        assert_eq!(past.trial(), Some(Trial::Output(14 * SHORTEST_TRIAL)));
        assert_eq!(past.suspected(), Some(start + 7 * SHORTEST_TRIAL));
    }
}
