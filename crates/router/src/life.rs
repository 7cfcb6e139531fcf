//! Lives and deaths of a backend's process.

/// The current process of a backend, and the dispatch that is on trial in it.
#[derive(Debug, Default)]
pub(crate) struct Life {
    /// Deaths so far. A dispatch that breaks was in flight at a death if the count has grown since
    /// it began.
    pub(crate) deaths: u64,
    /// True if the backend was found dead and has not answered since.
    pub(crate) dead: bool,
    /// The process's own id; 0: not known.
    epoch: u64,
    /// The dispatch that is on trial.
    pub(crate) trial: Option<u64>,
    /// The number of the last ended life, and the dispatch that was on trial when it ended.
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

    /// Records that the backend has answered with the process id `epoch`.
    pub(crate) fn speak(&mut self, epoch: u64) {
        let known = std::mem::replace(&mut self.epoch, epoch);
        if known != 0 && known != epoch && !self.dead {
            // The backend died and came back between two checks.
            self.die();
        }
        self.dead = false;
    }
}
