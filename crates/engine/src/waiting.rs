//! The bound on the waiting queue, each client's share of it, and the expected wait.

use forebay_fair::{Holdings, Shares};
use parking_lot::Mutex;

/// The largest number of waiting probes. They are counted apart from all other requests.
const PROBES: usize = 16;
/// The length of a window in which the queue's speed is measured, in microseconds.
const WINDOW_US: u64 = 10_000_000;
/// The longest retry delay that is suggested to a client, in seconds.
const LONGEST_S: u64 = 60;

/// Counts the requests that were submitted and not admitted yet, for all engines that share this
/// counter.
///
/// Clients share the entries of the queue ([`Shares`]). In addition, a quarter of the limit is
/// reserved for clients with only a few waiting requests.
#[derive(Debug, Default)]
pub struct WaitingPlaces(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    requests: Holdings,
    /// The waiting background requests, which are counted separately.
    background: Holdings,
    tokens: u64,
    probes: usize,
    rate: Rate,
}

/// A request's entry in the waiting queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The client of the request.
    pub(crate) client: u64,
    /// The largest number of tokens that the request may reach.
    pub(crate) tokens: u64,
    /// True if the request is a probe. Probes are not counted among the other requests.
    pub(crate) probe: bool,
    /// True for background work. It has its own queue of the same size, and takes no entries from
    /// other requests.
    pub(crate) background: bool,
}

/// Measures the speed of the queue: the tokens of admitted requests, over the time in which the
/// queue was not empty.
#[derive(Debug, Default)]
struct Rate {
    since_us: u64,
    tokens: u64,
    /// The tokens and the microseconds of the previous window.
    before: (u64, u64),
}

impl Rate {
    fn roll(&mut self, now_us: u64) {
        self.before = (self.tokens, now_us.saturating_sub(self.since_us));
        (self.since_us, self.tokens) = (now_us, 0);
    }

    fn note(&mut self, tokens: u64, now_us: u64) {
        if now_us.saturating_sub(self.since_us) >= WINDOW_US {
            self.roll(now_us);
        }
        self.tokens = self.tokens.saturating_add(tokens);
    }

    /// Estimates the seconds until `tokens` tokens have left the queue, at its recent rate.
    fn seconds_for(&self, tokens: u64, now_us: u64) -> u64 {
        let measured = u128::from(self.tokens) + u128::from(self.before.0);
        let micros = now_us.saturating_sub(self.since_us).saturating_add(self.before.1);
        let needed = u128::from(tokens) * u128::from(micros);
        let seconds = needed.div_ceil(measured.max(1) * 1_000_000);
        u64::try_from(seconds).unwrap_or(u64::MAX)
    }
}

impl WaitingPlaces {
    /// Takes one of `limit` entries. The error is the number of seconds after which to try again.
    pub(crate) fn enter(&self, place: Place, limit: usize, now_us: u64) -> Result<(), u32> {
        let mut inner = self.0.lock();
        if place.probe {
            if inner.probes >= PROBES {
                return Err(1);
            }
            inner.probes += 1;
            return Ok(());
        }
        if place.background {
            let took = inner.background.take(place.client, 1, Shares::of_places(limit));
            return if took { Ok(()) } else { Err(inner.retry_after(now_us)) };
        }
        let was_empty = inner.requests.all() == 0;
        if !inner.requests.take(place.client, 1, Shares::of_places(limit)) {
            return Err(inner.retry_after(now_us));
        }
        if was_empty {
            inner.rate.since_us = now_us;
        }
        inner.tokens = inner.tokens.saturating_add(place.tokens);
        Ok(())
    }

    /// Records that a request was admitted.
    pub(crate) fn admitted(&self, place: Place, now_us: u64) {
        let mut inner = self.0.lock();
        if !place.probe && !place.background {
            inner.rate.note(place.tokens, now_us);
        }
        inner.leave(place, now_us);
    }

    /// Gives back the entry of a request that was not admitted.
    pub(crate) fn left(&self, place: Place, now_us: u64) {
        self.0.lock().leave(place, now_us);
    }

    /// Estimates the seconds until all requests that wait now are admitted, from 1 to 60.
    pub(crate) fn retry_after(&self, now_us: u64) -> u32 {
        self.0.lock().retry_after(now_us)
    }
}

impl Inner {
    fn leave(&mut self, place: Place, now_us: u64) {
        if place.probe {
            self.probes = self.probes.saturating_sub(1);
            return;
        }
        if place.background {
            self.background.give_back(place.client, 1);
            return;
        }
        self.requests.give_back(place.client, 1);
        self.tokens = self.tokens.saturating_sub(place.tokens);
        if self.requests.all() == 0 {
            self.rate.roll(now_us);
        }
    }

    fn retry_after(&self, now_us: u64) -> u32 {
        let seconds = self.rate.seconds_for(self.tokens, now_us);
        u32::try_from(seconds.clamp(1, LONGEST_S)).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn place(client: u64) -> Place {
        Place { client, tokens: 100, probe: false, background: false }
    }

    fn fill(waiting: &WaitingPlaces, client: u64, limit: usize) -> usize {
        (0..).take_while(|_| waiting.enter(place(client), limit, 0).is_ok()).count()
    }

    #[test]
    fn a_client_alone_may_fill_the_queue_and_others_still_get_in() {
        let waiting = WaitingPlaces::default();
        assert_eq!(fill(&waiting, 1, 64), 64);
        assert_eq!(fill(&waiting, 2, 64), 4, "a few requests of each client");
        assert_eq!(fill(&waiting, 3, 64), 4);
        let more: usize = (4..100).map(|client| fill(&waiting, client, 64)).sum();
        assert_eq!(more, 8, "at most 80 requests in all");
        assert_eq!(fill(&waiting, 1, 64), 0);
    }

    #[test]
    fn beside_others_a_client_has_half() {
        let waiting = WaitingPlaces::default();
        waiting.enter(place(1), 64, 0).expect("room");
        assert_eq!(fill(&waiting, 2, 64), 32);
        assert_eq!(fill(&waiting, 3, 64), 31);
        waiting.left(place(2), 0);
        waiting.left(place(1), 0);
        assert_eq!(fill(&waiting, 2, 64), 1, "only the places that the client gave back");
        assert_eq!(fill(&WaitingPlaces::default(), 1, 0), 0);
    }

    #[test]
    fn probes_have_places_of_their_own() {
        let waiting = WaitingPlaces::default();
        fill(&waiting, 1, 5);
        let probe = Place { probe: true, ..place(9) };
        for _ in 0..PROBES {
            waiting.enter(probe, 5, 0).expect("room");
        }
        assert_eq!(waiting.enter(probe, 5, 0), Err(1));
        waiting.left(probe, 0);
        waiting.enter(probe, 5, 0).expect("room");
        assert_eq!(fill(&waiting, 2, 5), 1, "other clients keep their places");
    }

    #[test]
    fn work_in_the_background_keeps_nobody_out() {
        let waiting = WaitingPlaces::default();
        let background = Place { background: true, ..place(1) };
        let entered = (0..).take_while(|_| waiting.enter(background, 64, 0).is_ok()).count();
        assert_eq!(entered, 64, "the client has a queue of its own");
        assert_eq!(fill(&waiting, 1, 64), 64);
        waiting.left(background, 0);
        waiting.enter(background, 64, 0).expect("the place that was given back");
        assert_eq!(fill(&waiting, 2, 64), 4);
    }

    #[test]
    fn the_time_to_wait_is_that_of_what_waits() {
        let waiting = WaitingPlaces::default();
        // An hour without requests must not affect the measured speed of the queue.
        let start = 3600 * SECOND;
        for _ in 0..50 {
            waiting.enter(place(1), 1000, start).expect("room");
        }
        for second in 1..=20 {
            waiting.admitted(place(1), start + second * SECOND);
        }
        let now = start + 20 * SECOND;
        let thirty = waiting.retry_after(now);
        assert!((28..=31).contains(&thirty), "30 requests are left, one a second: {thirty}");
        for _ in 0..25 {
            waiting.admitted(place(1), now);
        }
        let sooner = waiting.retry_after(now);
        assert!(sooner < 5, "{sooner}");
        for _ in 0..100_000 {
            waiting.enter(place(1), 1_000_000, now).expect("room");
        }
        assert_eq!(waiting.retry_after(now + 10 * SECOND), 60);
        let empty = WaitingPlaces::default();
        assert_eq!(empty.retry_after(start), 1);
    }
}
