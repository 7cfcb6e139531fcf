//! The device's speed: the quicker way to blocks, to restore or to compute them, and the worth of a
//! time in tokens.

/// Weight of the newest measurement in a running mean, one in so many.
const NEWEST: f64 = 8.0;

/// The factor on the time of a restore that is not tried.
const FADING: f64 = 0.95;

/// Running means of the device's times.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// Microseconds a page that is restored.
    restore_us: Option<f64>,
    /// Microseconds a token that is computed in a step that is mostly prefill.
    prefill_us: Option<f64>,
    /// Microseconds a token that is computed, in any step.
    token_us: Option<f64>,
}

fn learn(mean: &mut Option<f64>, measured: f64) {
    *mean = Some(mean.map_or(measured, |mean| mean + (measured - mean) / NEWEST));
}

impl Rates {
    /// Notes the time of a step with so many positions, of which `single` were in rows of one.
    pub(crate) fn computed(&mut self, positions: u32, single: u32, device_us: u32) {
        // What decode rows cost is not what a position of a chunk costs.
        if positions > 2 * single && device_us > 0 {
            learn(&mut self.prefill_us, f64::from(device_us) / f64::from(positions));
        }
    }

    /// Notes the time of a step with so many positions, of any rows.
    pub(crate) fn stepped(&mut self, positions: u32, device_us: u32) {
        if positions > 0 && device_us > 0 {
            learn(&mut self.token_us, f64::from(device_us) / f64::from(positions));
        }
    }

    /// The number of tokens that the device computes in so many microseconds; 0: it is not known.
    pub(crate) fn tokens_in(&self, us: u64) -> u64 {
        self.token_us.map_or(0, |token_us| (us as f64 / token_us) as u64)
    }

    /// Notes the time of a restore of so many pages.
    pub(crate) fn restored(&mut self, pages: u64, us: u32) {
        if pages > 0 && us > 0 {
            learn(&mut self.restore_us, f64::from(us) / pages as f64);
        }
    }

    /// Blocks were computed because restoring takes longer. What is never done is never measured,
    /// so it is taken for a little faster each time, until it is tried again.
    pub(crate) fn declined(&mut self) {
        self.restore_us = self.restore_us.map(|us| us * FADING);
    }

    /// True if to restore so many pages is faster than to compute so many tokens. Always, until
    /// both rates are known.
    pub(crate) fn restores(&self, pages: u32, tokens: u32) -> bool {
        match (self.restore_us, self.prefill_us) {
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
        let mut rates = Rates::default();
        assert!(rates.restores(1000, 1));
        rates.restored(10, 1000);
        assert!(rates.restores(1000, 1), "what a token takes is not known");
        rates.computed(100, 50, 100);
        assert!(rates.restores(1000, 1), "half of it was decode");
        rates.computed(100, 0, 1000);
        assert!(rates.restores(1, 16) && !rates.restores(1, 10));
        for _ in 0..100 {
            rates.restored(10, 10);
        }
        assert!(rates.restores(1, 10), "it has become fast");
        for _ in 0..100 {
            rates.restored(1, 1000);
        }
        assert_eq!(rates.tokens_in(10), 0, "no step was seen");
        rates.stepped(100, 250);
        assert_eq!((rates.tokens_in(10), rates.tokens_in(2)), (4, 0));
        let mut declined = 0;
        while !rates.restores(1, 10) {
            rates.declined();
            declined += 1;
        }
        assert!((10..100).contains(&declined), "it is tried again after a while");
    }
}
