//! The time that background work may add to the steps of other requests.
//!
//! Foreground requests earn this time: each of their steps adds a share of its duration to an
//! account. A step that also has background rows withdraws the time that those rows added. While
//! the account is empty, there are no background rows. So background rows run often where they cost
//! next to nothing, as on a device whose steps are bound by reading weights. They run rarely where
//! arithmetic bounds a step. Either way, background work slows the foreground by the earned share
//! on average. With a share above 0, background work makes progress beside streams that never end.

use crate::mean::Mean;

/// A step's rows and positions, of foreground and background requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mixture {
    /// Rows of foreground requests.
    pub(crate) rows: u32,
    /// Positions of foreground requests.
    pub(crate) positions: u32,
    /// Positions of background requests.
    pub(crate) background: u32,
}

/// The account of the time that background work may add.
#[derive(Debug)]
pub(crate) struct Background {
    /// The share of foreground time that is earned; 1: unbounded.
    share: f64,
    /// Microseconds left; negative if overdrawn.
    left_us: f64,
    /// The decode rows of the latest steps without background work, and the time of these steps.
    alone: Option<(u32, Mean)>,
    /// True if the next step should be measured without background work.
    measures: bool,
    /// Microseconds that a background position adds to a step.
    position_us: Mean,
}

impl Background {
    /// Creates an empty account. `percent`: the share of foreground time; 100 and more: unbounded.
    pub(crate) fn new(percent: u32) -> Self {
        let share = f64::from(percent) / 100.0;
        Self { share, left_us: 0.0, alone: None, measures: false, position_us: Mean::default() }
    }

    /// True if a step with foreground rows must not have background rows.
    pub(crate) fn is_spent(&self) -> bool {
        self.share == 0.0 || self.left_us < 0.0 || self.measures
    }

    /// Learns from the time of a step. `drafts`: whether the step verified drafts, so that its time
    /// does not follow from its number of rows.
    pub(crate) fn learn(&mut self, step: Mixture, drafts: bool, device_us: u32) {
        let Mixture { rows, positions, background } = step;
        if device_us == 0 || self.share >= 1.0 {
            return;
        }
        if rows == 0 {
            // No foreground request was delayed, so nothing is owed.
            (self.left_us, self.alone, self.measures) = (0.0, None, false);
            return;
        }
        let us = f64::from(device_us);
        let decodes = rows == positions && !drafts;
        let known = self.alone.filter(|&(of, _)| of == rows);
        if background == 0 {
            self.earn(us);
            self.measures = false;
            if decodes {
                let mut mean = known.map(|(_, mean)| mean).unwrap_or_default();
                mean.learn(us);
                self.alone = Some((rows, mean));
            }
            return;
        }
        let alone_us = known.filter(|_| decodes).and_then(|(_, mean)| mean.get());
        self.measures = decodes && alone_us.is_none();
        let count = f64::from(background);
        let added_us = match alone_us {
            Some(alone_us) => {
                let added_us = (us - alone_us).max(0.0);
                self.position_us.learn(added_us / count);
                added_us
            }
            None => {
                let mean_us = us / (count + f64::from(positions));
                (count * self.position_us.get().unwrap_or(mean_us)).min(us)
            }
        };
        self.earn(us - added_us);
        self.left_us -= added_us;
    }

    /// Adds a share of a step's time, and caps the account at that time.
    fn earn(&mut self, us: f64) {
        self.left_us = (self.left_us + self.share * us).min(us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of eight streams. A step takes 1 ms, and `row_us` more for each background row.
    /// Returns the total time relative to the streams alone, and the number of background rows.
    fn run(percent: u32, row_us: u32, steps: u32) -> (f64, u32) {
        let mut account = Background::new(percent);
        let (mut us, mut rows) = (0, 0);
        for _ in 0..steps {
            let background = if account.is_spent() { 0 } else { 8 };
            let step_us = 1000 + background * row_us;
            account.learn(Mixture { rows: 8, positions: 8, background }, false, step_us);
            us += step_us;
            rows += background;
        }
        (f64::from(us) / f64::from(1000 * steps), rows)
    }

    #[test]
    fn others_lose_their_share_and_no_more() {
        for (percent, row_us) in [(5, 100), (5, 1000), (20, 100), (1, 30)] {
            let (slowed, rows) = run(percent, row_us, 10_000);
            let most = 1.0 + f64::from(percent) / 100.0;
            assert!(slowed < most + 0.005, "{percent} %, {row_us} us a row: {slowed}");
            assert!(slowed > most - 0.01, "the share is used: {slowed}");
            assert!(rows > 0);
        }
    }

    #[test]
    fn rows_that_cost_next_to_nothing_are_in_nearly_every_step() {
        let (slowed, rows) = run(5, 2, 1000);
        assert!(rows > 8 * 980 && slowed < 1.02, "{rows} rows, {slowed}");
    }

    #[test]
    fn without_a_share_there_is_no_row_and_with_all_of_it_no_bound() {
        assert_eq!(run(0, 10, 100).1, 0);
        assert_eq!(run(100, 5000, 100).1, 800);
    }

    #[test]
    fn other_rows_are_measured_again() {
        let mut account = Background::new(5);
        let step = |rows, background| Mixture { rows, positions: rows, background };
        account.learn(step(8, 0), false, 8000);
        account.learn(step(8, 4), false, 8100);
        assert!(!account.is_spent());
        // Seven streams have ended. A baseline of 8000 us would hide the time that background rows
        // add.
        account.learn(step(1, 4), false, 5000);
        assert!(account.is_spent());
        account.learn(step(1, 0), false, 1000);
        account.learn(step(1, 4), false, 5000);
        assert!(account.left_us < -3000.0, "{}", account.left_us);
        account.learn(step(0, 4), false, 4000);
        assert!(!account.is_spent(), "no stream is left to protect");
    }

    #[test]
    fn steps_with_prompts_or_drafts_are_charged_by_positions() {
        let mut account = Background::new(5);
        account.learn(Mixture { rows: 1, positions: 1, background: 0 }, false, 1000);
        account.learn(Mixture { rows: 1, positions: 1, background: 4 }, false, 1400);
        let before = account.left_us;
        account.learn(Mixture { rows: 2, positions: 101, background: 4 }, false, 9000);
        let lost = before - account.left_us;
        assert!((lost - (400.0 - 0.05 * 8600.0)).abs() < 1.0, "{lost}");
        account.learn(Mixture { rows: 1, positions: 3, background: 4 }, true, 1000);
        assert!(account.is_spent());
    }
}
