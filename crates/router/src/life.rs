//! Tracks the deaths of a backend's process.

/// The current process of a backend, and the dispatch that is on trial in it.
#[derive(Debug, Default)]
pub(crate) struct Life {
    /// The number of deaths so far. A dispatch that fails was in flight at a death if this count
    /// has grown since the dispatch began.
    pub(crate) deaths: u64,
    /// True if the backend was found dead and has not responded since.
    pub(crate) dead: bool,
    /// The random number that the process chose at its start; 0: not known.
    epoch: u64,
    /// The dispatch that is on trial, if any.
    pub(crate) trial: Option<u64>,
    /// The last death: the number of deaths before it, and the dispatch that was on trial when it
    /// happened.
    pub(crate) last: Option<(u64, Option<u64>)>,
}

impl Life {
    fn die(&mut self) {
        self.last = Some((self.deaths, self.trial.take()));
        self.deaths += 1;
    }

    /// Records that the backend was found dead. Until it responds again, this counts as one death.
    pub(crate) fn end(&mut self) {
        if !std::mem::replace(&mut self.dead, true) {
            self.die();
            self.epoch = 0;
        }
    }

    /// Records that the backend has responded. `epoch` is the random number that its process chose
    /// at its start.
    pub(crate) fn speak(&mut self, epoch: u64) {
        let known = std::mem::replace(&mut self.epoch, epoch);
        if known != 0 && known != epoch && !self.dead {
            // The backend died and was restarted between two checks.
            self.die();
        }
        self.dead = false;
    }
}
