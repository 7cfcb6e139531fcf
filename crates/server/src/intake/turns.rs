//! Turns among clients that send large bodies.
//!
//! A body that arrives too slowly loses its turn. It then waits in the queue for slow bodies, whose
//! turns are shorter, so a fast client never waits for a slow one. Turns go to clients, not to
//! bodies: a client with forty bodies waits for one turn of each other client between two of its
//! own.

use std::sync::Arc;
use std::time::Duration;

use forebay_http::ClientId;
use tokio::time::Instant;

use super::line::{Line, Permit};

/// Bytes a second that must arrive during a turn.
const RATE: u64 = 10_000_000;
/// How long a client with a turn may send nothing.
pub(crate) const PATIENCE: Duration = Duration::from_millis(5);

/// The speed of a body's arrival so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// The body arrived as fast as it was read.
    Steady,
    /// The body's turn ended before all of it was read.
    Slow,
}

impl Pace {
    /// The time over which the rate is measured.
    fn window(self) -> Duration {
        match self {
            Self::Steady => Duration::from_millis(50),
            Self::Slow => PATIENCE,
        }
    }

    /// The number of bytes that must arrive in a window.
    fn share(self) -> usize {
        (RATE as u128 * self.window().as_micros() / 1_000_000) as usize
    }

    /// The longest turn while others wait.
    fn longest(self) -> Duration {
        10 * self.window()
    }
}

/// The turns of both paces.
#[derive(Debug)]
pub(crate) struct Turns {
    steady: Arc<Line>,
    slow: Arc<Line>,
}

/// The right to send, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _permit: Permit,
    pace: Pace,
    began: Instant,
    window: Instant,
    arrived: usize,
}

impl Turns {
    /// Allows `count` steady bodies at a time, and one slow one.
    pub(crate) fn new(count: usize) -> Self {
        let count = count.max(1);
        Self { steady: Line::new(count, count), slow: Line::new(1, 1) }
    }

    /// Waits for a turn for `client`. Dropping the future gives it up.
    pub(crate) async fn take(&self, client: ClientId, pace: Pace) -> Turn {
        let line = match pace {
            Pace::Steady => &self.steady,
            Pace::Slow => &self.slow,
        };
        let permit = line.take(client).await;
        let now = Instant::now();
        Turn { _permit: permit, pace, began: now, window: now, arrived: 0 }
    }

    /// Turns that were given, of either pace.
    #[cfg(test)]
    pub(crate) fn given(&self) -> u64 {
        self.steady.given() + self.slow.given()
    }

    /// The number of free steady turns.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.steady.free()
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
    /// When the turn is lost, unless bytes arrive first.
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
