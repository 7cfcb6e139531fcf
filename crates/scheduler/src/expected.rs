//! The tokens that a request is expected to generate next.

use forebay_draft::{DraftMatch, DraftOffer};

/// The weight of all earlier rows in a request's own acceptance, where a new one has 1.
const MEMORY: f64 = 7.0;

/// Drafts of a row in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowDrafts {
    pub(crate) count: u32,
    /// The request.
    pub(crate) id: u64,
    pub(crate) found: DraftMatch,
    /// The first so many are certain.
    pub(crate) forced: u32,
}

/// The drafts that a request has next, and how well it did with earlier ones.
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) tokens: Vec<i32>,
    /// `None`: it expects nothing.
    pub(crate) found: Option<DraftMatch>,
    /// The first so many are certain.
    pub(crate) forced: u32,
    /// Its acceptance, relative to that of all requests.
    ratio: f64,
    /// The number of steps for which plans wait for its results.
    pub(crate) patience: u8,
}

impl Default for Expected {
    fn default() -> Self {
        Self { tokens: Vec::new(), found: None, forced: 0, ratio: 1.0, patience: 0 }
    }
}

impl Expected {
    pub(crate) fn offer(&self, most: u32) -> DraftOffer {
        let length = self.found.map_or(0, |found| found.length);
        DraftOffer { length, most, ratio: self.ratio, forced: self.forced }
    }

    /// Expects nothing, until it is told of the next tokens.
    pub(crate) fn forget(&mut self) {
        self.tokens.clear();
        (self.found, self.forced) = (None, 0);
    }

    pub(crate) fn learn(&mut self, share: f64) {
        self.ratio = ((self.ratio * MEMORY + share) / (MEMORY + 1.0)).clamp(0.1, 1.5);
    }
}
