//! The state of a rank, shared by the engine's thread and the relaying tasks.

use std::time::Duration;

use forebay_engine::{Payload, There};
use forebay_hand::{Distant, Exit};
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, watch};

use std::sync::{Arc, OnceLock};

use crate::mirror::Mirror;

/// How long to wait, after a rank's connection broke, for the report on how the rank ended.
const LAST_BREATH: Duration = Duration::from_millis(500);

/// The state of a rank.
#[derive(Debug)]
pub(crate) struct Life {
    /// How the hand ended; `None`: it is still running.
    ended: Mutex<Option<Exit>>,
    changed: Condvar,
    /// Signals that the hand has to be stopped.
    pub(crate) doom: Notify,
    /// The outpost's report on how the hand ended.
    pub(crate) report: watch::Sender<Option<Exit>>,
    /// The mirror of the outpost on which the rank runs, once that is chosen.
    pub(crate) mirror: OnceLock<Arc<Mirror>>,
}

impl Default for Life {
    fn default() -> Self {
        Self {
            ended: Mutex::default(),
            changed: Condvar::new(),
            doom: Notify::new(),
            report: watch::Sender::new(None),
            mirror: OnceLock::new(),
        }
    }
}

impl Life {
    /// Records how the hand ended. Only the first call has an effect.
    pub(crate) fn end(&self, how: &Exit) {
        self.ended.lock().get_or_insert_with(|| how.clone());
        self.changed.notify_all();
    }

    /// Waits until the outpost has reported how the rank ended.
    pub(crate) async fn reported(&self) -> Exit {
        let mut report = self.report.subscribe();
        let found = report.wait_for(Option::is_some).await;
        found.ok().and_then(|said| said.clone()).unwrap_or_default()
    }
}

/// The engine's handle to a rank.
#[derive(Debug)]
pub(crate) struct Handle(pub(crate) Arc<Life>);

impl Distant for Handle {
    fn doom(&self) {
        self.0.doom.notify_one();
    }

    fn ended_within(&self, limit: Duration) -> bool {
        let mut ended = self.0.ended.lock();
        if ended.is_none() {
            self.0.changed.wait_for(&mut ended, limit);
        }
        ended.is_some()
    }

    fn carry(&self, payload: &Arc<dyn Payload>, there: There) {
        // A rank without an outpost has no hand that could read the payload.
        if let Some(mirror) = self.0.mirror.get() {
            mirror.carry(payload, there);
        }
    }

    fn bury(self: Box<Self>) -> Exit {
        self.ended_within(LAST_BREATH);
        let how = self.0.ended.lock().clone();
        how.unwrap_or_else(|| "its outpost has not said how it ended".into())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.doom();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_counts_and_wakes() {
        let life = Arc::new(Life::default());
        let handle = Box::new(Handle(Arc::clone(&life)));
        assert!(!handle.ended_within(Duration::ZERO));
        let waiting = std::thread::spawn(move || {
            let ended = handle.ended_within(Duration::from_secs(60));
            (ended, handle.bury())
        });
        life.end(&"exit status 3".into());
        life.end(&"lost".into());
        assert_eq!(waiting.join().unwrap(), (true, "exit status 3".into()));
    }
}
