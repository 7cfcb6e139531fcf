//! Turns among clients that send large bodies.
//!
//! A body that arrives too slowly loses its turn. Then it waits among the slow ones, whose turns
//! are shorter. So a fast client never waits for a slow one. Turns go to clients, not to bodies. A
//! client with forty bodies waits for one turn of each other client between two of its own.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::client::ClientId;

/// Bytes a second that have to arrive during a turn.
const RATE: u64 = 10_000_000;
/// The time for which a client with a turn may send nothing.
pub(crate) const PATIENCE: Duration = Duration::from_millis(5);

/// The speed of a body's arrival so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// The body arrived as fast as it was read.
    Steady,
    /// The body lost a turn.
    Slow,
}

impl Pace {
    /// The time over which the rate is looked at.
    fn window(self) -> Duration {
        match self {
            Self::Steady => Duration::from_millis(50),
            Self::Slow => PATIENCE,
        }
    }

    /// The bytes that have to arrive in a window.
    fn share(self) -> usize {
        (RATE as u128 * self.window().as_micros() / 1_000_000) as usize
    }

    /// The longest turn while others wait.
    fn longest(self) -> Duration {
        10 * self.window()
    }
}

/// Turns of one pace.
#[derive(Debug, Default)]
struct Lane {
    free: usize,
    /// Turns that were given, ever.
    given: u64,
    /// Clients that wait, in the order of their turns.
    order: VecDeque<ClientId>,
    waiting: HashMap<ClientId, VecDeque<oneshot::Sender<Turn>>>,
}

impl Lane {
    /// Whoever is next; the client's other bodies go behind all other clients'.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let client = self.order.pop_front()?;
        let bodies = self.waiting.get_mut(&client)?;
        let next = bodies.pop_front();
        if bodies.is_empty() {
            self.waiting.remove(&client);
        } else {
            self.order.push_back(client);
        }
        next
    }
}

/// The turns of both paces.
#[derive(Debug)]
pub(crate) struct Turns {
    steady: Arc<Mutex<Lane>>,
    slow: Arc<Mutex<Lane>>,
}

/// The right to send, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The lane of the turn; `None` for a turn that was not taken.
    lane: Option<Arc<Mutex<Lane>>>,
    pace: Pace,
    began: Instant,
    window: Instant,
    arrived: usize,
}

impl Turns {
    /// `count` steady bodies at a time, and one slow one.
    pub(crate) fn new(count: usize) -> Self {
        let lane = |free| Arc::new(Mutex::new(Lane { free, ..Lane::default() }));
        Self { steady: lane(count.max(1)), slow: lane(1) }
    }

    fn lane(&self, pace: Pace) -> &Arc<Mutex<Lane>> {
        match pace {
            Pace::Steady => &self.steady,
            Pace::Slow => &self.slow,
        }
    }

    /// Waits for a turn of `client`. Dropping the future gives it up.
    pub(crate) async fn take(&self, client: ClientId, pace: Pace) -> Turn {
        let lane = self.lane(pace);
        let waiting = {
            let mut inside = lane.lock();
            if inside.free > 0 {
                inside.free -= 1;
                inside.given += 1;
                return Turn::new(Some(Arc::clone(lane)), pace);
            }
            let (sender, waiting) = oneshot::channel();
            let bodies = inside.waiting.entry(client).or_default();
            bodies.push_back(sender);
            if bodies.len() == 1 {
                inside.order.push_back(client);
            }
            waiting
        };
        match waiting.await {
            // It begins when it is taken, not when it was given.
            Ok(turn) => turn.restarted(),
            // Lanes live as long as their turns; without them, nobody has to wait.
            Err(_) => Turn::new(None, pace),
        }
    }

    /// Turns that were given, of either pace.
    #[cfg(test)]
    pub(crate) fn given(&self) -> u64 {
        self.steady.lock().given + self.slow.lock().given
    }

    /// The number of free steady turns.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.steady.lock().free
    }
}

/// The state of a turn after bytes have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    GoesOn,
    /// The body came too slowly.
    TooSlow,
    /// The turn was long enough: others are next.
    Over,
}

impl Turn {
    fn new(lane: Option<Arc<Mutex<Lane>>>, pace: Pace) -> Self {
        let now = Instant::now();
        Self { lane, pace, began: now, window: now, arrived: 0 }
    }

    fn restarted(mut self) -> Self {
        let now = Instant::now();
        (self.began, self.window) = (now, now);
        self
    }

    /// The time at which the turn is lost, unless bytes arrive before.
    pub(crate) fn deadline(&self) -> Instant {
        (Instant::now() + PATIENCE).min(self.window + self.pace.window())
    }

    /// Counts arrived bytes.
    pub(crate) fn arrived(&mut self, bytes: usize) -> Verdict {
        let now = Instant::now();
        self.arrived += bytes;
        if self.arrived >= self.pace.share() {
            (self.window, self.arrived) = (now, 0);
        }
        if now > self.window + self.pace.window() {
            Verdict::TooSlow
        } else if now > self.began + self.pace.longest() {
            Verdict::Over
        } else {
            Verdict::GoesOn
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(lane) = self.lane.take() else { return };
        let mut inside = lane.lock();
        while let Some(next) = inside.next() {
            inside.given += 1;
            match next.send(Self::new(Some(Arc::clone(&lane)), self.pace)) {
                Ok(()) => return,
                // It has left the line.
                Err(mut unwanted) => unwanted.lane = None,
            }
            inside.given -= 1;
        }
        inside.free += 1;
    }
}
