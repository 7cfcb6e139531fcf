//! Back-pressure: compares the pages for which handed-on requests wait with the available pages.
//!
//! While decode targets have fewer free pages than the requests waiting for them need, prefill
//! targets admit no further request that is to be handed on. So the number of waiting requests is
//! bounded.

use std::collections::HashMap;

/// The tokens that wait at each target, and the tokens that it has room for.
#[derive(Debug, Default)]
pub struct Pressure {
    /// For each request that was handed on and is not admitted yet: its target and its tokens.
    waiting: HashMap<u64, (usize, u64)>,
    ahead: Vec<u64>,
    /// The room of each target, in tokens; `None`: not reported yet.
    room: Vec<Option<u64>>,
}

impl Pressure {
    /// Creates the records of `targets` targets, without waiting requests.
    #[must_use]
    pub fn new(targets: usize) -> Self {
        Self { waiting: HashMap::new(), ahead: vec![0; targets], room: vec![None; targets] }
    }

    /// Records that a request with `tokens` tokens was handed on to a target.
    pub fn handed(&mut self, id: u64, at: usize, tokens: u64) {
        self.gone(id);
        self.waiting.insert(id, (at, tokens));
        self.ahead[at] += tokens;
    }

    /// Records that a request has got its pages.
    pub fn admitted(&mut self, id: u64) {
        if let Some((at, tokens)) = self.gone(id) {
            // An estimate until the target's next report.
            self.room[at] = self.room[at].map(|room| room.saturating_sub(tokens));
        }
    }

    /// Removes a request from the waiting ones. Returns its target and its tokens; `None`: it was
    /// not waiting.
    pub fn gone(&mut self, id: u64) -> Option<(usize, u64)> {
        let (at, tokens) = self.waiting.remove(&id)?;
        self.ahead[at] -= tokens;
        Some((at, tokens))
    }

    /// Records that a target has free pages for `tokens` tokens.
    pub fn set_room(&mut self, at: usize, tokens: u64) {
        self.room[at] = Some(tokens);
    }

    /// The number of tokens that wait at a target.
    #[must_use]
    pub fn ahead(&self, at: usize) -> u64 {
        self.ahead[at]
    }

    /// True if more tokens wait at the `decode` targets than they have room for, and all have
    /// reported their room.
    #[must_use]
    pub fn exceeds(&self, decode: impl Fn(usize) -> bool) -> bool {
        let targets = || (0..self.ahead.len()).filter(|&at| decode(at));
        let room: Option<u64> = targets().map(|at| self.room[at]).sum();
        room.is_some_and(|room| targets().map(|at| self.ahead[at]).sum::<u64>() > room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_compared_with_the_room_that_is_left() {
        let mut pressure = Pressure::new(3);
        let exceeds = |pressure: &Pressure| pressure.exceeds(|at| at > 0);
        assert!(!exceeds(&pressure), "no tokens wait");
        pressure.set_room(1, 100);
        pressure.handed(6, 1, 1000);
        assert!(!exceeds(&pressure), "the other target may have room");
        pressure.set_room(2, 50);
        assert!(exceeds(&pressure));
        assert_eq!(pressure.gone(6), Some((1, 1000)));
        pressure.handed(7, 1, 90);
        pressure.handed(8, 1, 60);
        assert_eq!((pressure.ahead(1), exceeds(&pressure)), (150, false));
        pressure.handed(9, 2, 1);
        assert!(exceeds(&pressure));
        // Request 7 has its pages, so its tokens no longer wait.
        pressure.admitted(7);
        assert!(exceeds(&pressure), "61 tokens wait for 60");
        pressure.set_room(1, 20);
        assert_eq!(pressure.gone(8), Some((1, 60)));
        assert!(!exceeds(&pressure));
        pressure.handed(9, 1, 30);
        assert_eq!(
            (pressure.ahead(1), pressure.ahead(2)),
            (30, 0),
            "request 9 moved to the other target"
        );
        assert!(pressure.exceeds(|at| at == 1) && !pressure.exceeds(|_| false));
        pressure.admitted(9);
        pressure.admitted(9);
        assert_eq!(pressure.ahead(1), 0);
    }
}
