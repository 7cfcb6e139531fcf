//! Turns of clients that send large bodies.
//!
//! A body that arrives too slowly loses its turn. It then waits in the queue for slow bodies, whose
//! turns are shorter, so a fast client never waits for a slow one. Turns go to clients, not to
//! bodies: between two turns of its own, a client with forty bodies waits for one turn of each
//! other client.

use std::sync::Arc;
use std::time::Duration;

use forebay_http::ClientId;
use tokio::time::Instant;

use super::line::{Line, Permit};

/// Bytes per second that must arrive during a turn.
const RATE: u64 = 10_000_000;
/// How long a client may send nothing during its turn.
pub(crate) const PATIENCE: Duration = Duration::from_millis(5);

/// The speed of a body's arrival so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// The body has arrived at the required rate so far.
    Steady,
    /// The body lost its turn because it arrived too slowly.
    Slow,
}

impl Pace {
    /// Returns the time over which the rate is measured.
    fn window(self) -> Duration {
        match self {
            Self::Steady => Duration::from_millis(50),
            Self::Slow => PATIENCE,
        }
    }

    /// Returns the number of bytes that must arrive per window.
    fn share(self) -> usize {
        (RATE as u128 * self.window().as_micros() / 1_000_000) as usize
    }

    /// Returns the longest turn while other bodies wait.
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

/// A client's turn to send its body, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _permit: Permit,
    pace: Pace,
    began: Instant,
    window: Instant,
    arrived: usize,
}

impl Turns {
    /// Allows `count` steady bodies at a time, and one slow body.
    pub(crate) fn new(count: usize) -> Self {
        let count = count.max(1);
        Self { steady: Line::new(count, count), slow: Line::new(1, 1) }
    }

    /// Waits for a turn for `client`. Dropping the future leaves the queue.
    pub(crate) async fn take(&self, client: ClientId, pace: Pace) -> Turn {
        let line = match pace {
            Pace::Steady => &self.steady,
            Pace::Slow => &self.slow,
        };
        let permit = line.take(client).await;
        let now = Instant::now();
        Turn { _permit: permit, pace, began: now, window: now, arrived: 0 }
    }

    /// Returns the number of turns that were ever given, at either pace.
    #[cfg(test)]
    pub(crate) fn given(&self) -> u64 {
        self.steady.given() + self.slow.given()
    }

    /// Returns the number of free turns for steady bodies.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.steady.free()
    }
}

/// Whether a turn continues after bytes have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    GoesOn,
    /// The body came too slowly.
    TooSlow,
    /// The turn has lasted long enough: other bodies are next.
    Over,
}

impl Turn {
    /// Returns the time at which the turn is lost, unless bytes arrive first.
    pub(crate) fn deadline(&self) -> Instant {
        (Instant::now() + PATIENCE).min(self.window + self.pace.window())
    }

    /// Counts `bytes` arrived bytes.
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
