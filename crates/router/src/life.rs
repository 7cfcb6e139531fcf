//! Lives and deaths of a backend's process.

/// The life of a backend's process, and the dispatch that is on trial in it.
#[derive(Debug, Default)]
pub(crate) struct Life {
    /// Deaths so far. A dispatch that breaks when there are more than at its beginning was in
    /// flight at one.
    pub(crate) deaths: u64,
    /// True if the backend was found dead and has not answered since.
    pub(crate) dead: bool,
    /// The process, as it calls itself; 0: not known.
    epoch: u64,
    /// The dispatch that is on trial.
    pub(crate) trial: Option<u64>,
    /// The number of the life that ended last, and the dispatch that was on trial at its end.
    pub(crate) last: Option<(u64, Option<u64>)>,
}

impl Life {
    fn die(&mut self) {
        self.last = Some((self.deaths, self.trial.take()));
        self.deaths += 1;
    }

    /// Notes that the backend is gone.
    pub(crate) fn end(&mut self) {
        if !std::mem::replace(&mut self.dead, true) {
            self.die();
            self.epoch = 0;
        }
    }

    /// Notes that the backend has answered, and calls itself `epoch`.
    pub(crate) fn speak(&mut self, epoch: u64) {
        let known = std::mem::replace(&mut self.epoch, epoch);
        if known != 0 && known != epoch && !self.dead {
            // It died and came back before anybody asked.
            self.die();
        }
        self.dead = false;
    }
}
