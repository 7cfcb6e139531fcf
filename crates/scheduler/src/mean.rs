//! Running means of measured times.

/// The weight of the newest measurement is 1 / `NEWEST`.
const NEWEST: f64 = 8.0;

/// A running mean; `None`: nothing was measured yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mean(Option<f64>);

impl Mean {
    pub(crate) fn learn(&mut self, measured: f64) {
        self.0 = Some(self.0.map_or(measured, |mean| mean + (measured - mean) / NEWEST));
    }

    pub(crate) fn get(self) -> Option<f64> {
        self.0
    }

    pub(crate) fn scale(&mut self, factor: f64) {
        self.0 = self.0.map(|mean| mean * factor);
    }
}
