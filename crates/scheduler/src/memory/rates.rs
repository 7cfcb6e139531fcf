//! Decides whether blocks are restored or computed again, depending on which is faster.

use crate::mean::Mean;

/// The factor by which the assumed time of a restore shrinks each time that restoring is declined.
const FADING: f64 = 0.95;

/// Running means of the device's times.
#[derive(Debug, Default)]
pub(crate) struct RestoreRates {
    /// Microseconds per restored page.
    restore_us: Mean,
    /// Microseconds per token in steps that are mostly prefill.
    prefill_us: Mean,
}

impl RestoreRates {
    /// Learns the time of a step with this many positions, of which `single` were in rows of one
    /// position.
    pub(crate) fn computed(&mut self, positions: u32, single: u32, device_us: u32) {
        // The time per position of decode rows differs from that of prefill chunks.
        if positions > 2 * single && device_us > 0 {
            self.prefill_us.learn(f64::from(device_us) / f64::from(positions));
        }
    }

    /// Learns the time of a restore of `pages` pages.
    pub(crate) fn restored(&mut self, pages: u64, us: u32) {
        if pages > 0 && us > 0 {
            self.restore_us.learn(f64::from(us) / pages as f64);
        }
    }

    /// Notes that blocks were computed because restoring seemed slower. A restore that does not
    /// happen is not measured. So the assumed time of a restore shrinks each time, until a restore
    /// is tried again.
    pub(crate) fn declined(&mut self) {
        self.restore_us.scale(FADING);
    }

    /// True if restoring `pages` pages is faster than computing `tokens` tokens. True until both
    /// rates are known.
    pub(crate) fn restores(&self, pages: u32, tokens: u32) -> bool {
        match (self.restore_us.get(), self.prefill_us.get()) {
            (Some(restore), Some(prefill)) => {
                f64::from(pages) * restore < f64::from(tokens) * prefill
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_less_is_chosen_once_both_are_known() {
        let mut rates = RestoreRates::default();
        assert!(rates.restores(1000, 1));
        rates.restored(10, 1000);
        assert!(rates.restores(1000, 1), "the time of a token is unknown");
        rates.computed(100, 50, 100);
        assert!(rates.restores(1000, 1), "half of it was decode");
        rates.computed(100, 0, 1000);
        assert!(rates.restores(1, 16) && !rates.restores(1, 10));
        for _ in 0..100 {
            rates.restored(10, 10);
        }
        assert!(rates.restores(1, 10), "copies have become fast");
        for _ in 0..100 {
            rates.restored(1, 1000);
        }
        let mut declined = 0;
        while !rates.restores(1, 10) {
            rates.declined();
            declined += 1;
        }
        assert!((10..100).contains(&declined), "a restore is tried again after a while");
    }
}
