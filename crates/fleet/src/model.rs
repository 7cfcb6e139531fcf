//! One model of a fleet.

use serde::Serialize;

/// A model that the fleet may load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FleetModel {
    /// The expected number of bytes of the model's weights and pages.
    pub bytes: u64,
    /// True if the model stays in memory, even when it is idle or another model needs the memory.
    pub pinned: bool,
    /// The model is unloaded after this many milliseconds without a request; `None`: never.
    pub idle_ms: Option<u64>,
}

/// The state of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelState {
    /// Nothing of the model is in memory.
    Unloaded,
    /// The model is being loaded.
    Loading,
    /// The model takes requests.
    Ready,
    /// The model is finishing its last requests, or being unloaded.
    Leaving,
    /// The model's weights and pages have been dropped, but state is kept that makes the next load
    /// faster.
    Asleep,
}

/// What is kept of a model that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepLevel {
    /// State for a fast load is kept: [`ModelState::Asleep`].
    Asleep,
    /// Nothing is kept: [`ModelState::Unloaded`].
    Unloaded,
}

impl SleepLevel {
    fn state(self) -> ModelState {
        match self {
            Self::Asleep => ModelState::Asleep,
            Self::Unloaded => ModelState::Unloaded,
        }
    }
}

/// The phase of a model: unloaded, loading, in memory or leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Out(SleepLevel),
    Loading {
        began_ms: u64,
    },
    /// The model has been in memory since `since_ms`, and takes requests unless `closed` is set.
    In {
        since_ms: u64,
        stay_ms: u64,
        closed: Option<SleepLevel>,
    },
    /// The caller is removing the model from memory.
    Leaving(SleepLevel),
}

/// A model with its requests.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) model: FleetModel,
    pub(crate) phase: Phase,
    /// The sleep level to go to after [`crate::Fleet::dismiss`]; `None`: the model was not
    /// dismissed.
    pub(crate) dismissed: Option<SleepLevel>,
    /// An idle time that replaces `idle_ms` until the model is unloaded.
    pub(crate) keep: Option<Option<u64>>,
    /// The number of bytes that the model takes in memory.
    pub(crate) held: u64,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) used_ms: u64,
    /// The time before which the model is not loaded again after a failure.
    pub(crate) paused_until_ms: u64,
}

impl Member {
    pub(crate) fn new(model: FleetModel) -> Self {
        Self {
            model,
            phase: Phase::Out(SleepLevel::Unloaded),
            dismissed: None,
            keep: None,
            held: 0,
            running: 0,
            waiting: 0,
            used_ms: 0,
            paused_until_ms: 0,
        }
    }

    pub(crate) fn state(&self) -> ModelState {
        match self.phase {
            Phase::Out(level) => level.state(),
            Phase::Loading { .. } => ModelState::Loading,
            Phase::In { closed: None, .. } => ModelState::Ready,
            Phase::In { closed: Some(_), .. } | Phase::Leaving(_) => ModelState::Leaving,
        }
    }

    /// True if the model takes requests.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::In { closed: None, .. })
    }

    /// True if the model is about to free its memory.
    pub(crate) fn gives_back(&self) -> bool {
        matches!(self.phase, Phase::In { closed: Some(_), .. } | Phase::Leaving(_))
    }

    pub(crate) fn close(&mut self, level: SleepLevel) {
        if let Phase::In { closed, .. } = &mut self.phase {
            *closed = Some(level);
        }
    }

    /// The time at which the minimum stay ends; `None`: the model takes no requests.
    pub(crate) fn stays_until_ms(&self) -> Option<u64> {
        match self.phase {
            Phase::In { since_ms, stay_ms, closed: None } => Some(since_ms.saturating_add(stay_ms)),
            _ => None,
        }
    }

    /// The time at which the model is unloaded if no request arrives; `None`: it stays, or is busy.
    pub(crate) fn idle_until_ms(&self) -> Option<u64> {
        let open_and_idle = self.is_open() && self.running == 0 && self.waiting == 0;
        let may_leave = open_and_idle && !self.model.pinned;
        let idle = self.keep.unwrap_or(self.model.idle_ms)?;
        may_leave.then(|| self.used_ms.saturating_add(idle))
    }
}
