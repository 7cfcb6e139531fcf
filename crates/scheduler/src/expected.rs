//! The tokens that a request is expected to generate next.

use forebay_draft::{DraftMatch, DraftOffer, DraftSource};

/// The weight of all earlier rows in a request's own acceptance rate, relative to 1 for the new
/// row.
const MEMORY: f64 = 7.0;
/// The number of misses after which the pause without drafts stops growing, at 64 tokens.
const MOST_MISSES: u32 = 8;

/// Drafts of a row in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowDrafts {
    pub(crate) count: u32,
    /// The id of the request.
    pub(crate) id: u64,
    pub(crate) found: DraftMatch,
    /// The number of leading drafts that are certain.
    pub(crate) forced: u32,
}

/// Drafts that were not sent to the hand, only compared with the tokens that are sampled. They
/// measure acceptance while drafting is off.
#[derive(Debug, Clone)]
struct Comparison {
    found: DraftMatch,
    drafts: Vec<i32>,
    /// The number of leading drafts that equal the sampled tokens.
    right: usize,
}

/// A request's next drafts, and the record of its earlier ones.
#[derive(Debug)]
pub(crate) struct ExpectedDrafts {
    pub(crate) tokens: Vec<i32>,
    /// The match that the expected tokens come from; `None`: no tokens are expected.
    pub(crate) found: Option<DraftMatch>,
    /// The number of leading drafts that are certain.
    pub(crate) forced: u32,
    /// The request's acceptance rate, relative to that of all requests.
    ratio: f64,
    /// The number of steps for which plans wait for the request's results.
    pub(crate) patience: u8,
    comparison: Option<Comparison>,
    /// The number of consecutive rows whose drafts were all wrong.
    misses: u32,
    /// Tokens to generate before uncertain drafts are tried again.
    rest: u32,
}

impl Default for ExpectedDrafts {
    fn default() -> Self {
        Self {
            tokens: Vec::new(),
            found: None,
            forced: 0,
            ratio: 1.0,
            patience: 0,
            comparison: None,
            misses: 0,
            rest: 0,
        }
    }
}

impl ExpectedDrafts {
    pub(crate) fn offer(&self, most: u32) -> DraftOffer {
        let certain = DraftMatch { length: self.forced, source: DraftSource::Form };
        let found = self.found.unwrap_or(certain);
        DraftOffer { found, most, ratio: self.ratio, forced: self.forced }
    }

    /// The number of the request's drafts that a step may have, at most `most`. While the request
    /// pauses, only its certain drafts count.
    pub(crate) fn offered(&self, most: u32) -> u32 {
        let drafts = if self.rest > 0 { self.forced } else { self.tokens.len() as u32 };
        drafts.min(most)
    }

    /// Drops the expected tokens until new ones are set.
    pub(crate) fn forget(&mut self) {
        self.tokens.clear();
        (self.found, self.forced) = (None, 0);
    }

    /// Updates the acceptance rate. `share`: the acceptance of the last drafts, relative to that of
    /// all requests.
    pub(crate) fn learn(&mut self, share: f64) {
        self.ratio = ((self.ratio * MEMORY + share) / (MEMORY + 1.0)).clamp(0.1, 1.5);
    }

    /// Records the outcome of a row with `accepted` accepted drafts. After two consecutive rows
    /// without any, the request pauses its drafts. Each further miss doubles the pause.
    pub(crate) fn row_ended(&mut self, accepted: u32) {
        if accepted > 0 {
            (self.misses, self.rest) = (0, 0);
        } else {
            self.misses = (self.misses + 1).min(MOST_MISSES);
            self.rest = (1 << self.misses) >> 2;
        }
    }

    /// Starts comparing the drafts with the tokens that are sampled, unless a comparison is
    /// running.
    pub(crate) fn begin_comparison(&mut self) {
        let Some(found) = self.found.filter(|_| self.comparison.is_none() && self.forced == 0)
        else {
            return;
        };
        self.comparison = Some(Comparison { found, drafts: self.tokens.clone(), right: 0 });
    }

    /// Ends the comparison, because tokens came from a row with drafts.
    pub(crate) fn end_comparison(&mut self) {
        self.comparison = None;
    }

    /// Compares a token that came without drafts. If that ends the comparison, returns its outcome:
    /// the drafts, their number, and how many were right.
    pub(crate) fn compare(&mut self, token: i32) -> Option<(DraftMatch, u32, u32)> {
        self.rest = self.rest.saturating_sub(1);
        let comparison = self.comparison.as_mut()?;
        let right = comparison.drafts.get(comparison.right) == Some(&token);
        comparison.right += usize::from(right);
        if right && comparison.right < comparison.drafts.len() {
            return None;
        }
        let Comparison { found, drafts, right } = self.comparison.take()?;
        Some((found, drafts.len() as u32, right as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expecting(tokens: &[i32]) -> ExpectedDrafts {
        let found = Some(DraftMatch { length: 4, source: DraftSource::Own });
        ExpectedDrafts { tokens: tokens.into(), found, ..ExpectedDrafts::default() }
    }

    #[test]
    fn a_comparison_ends_with_the_first_wrong_token_or_its_last() {
        for (came, expected) in [(&[1, 2, 9][..], 2), (&[9], 0), (&[1, 2, 3], 3)] {
            let mut expects = expecting(&[1, 2, 3]);
            expects.begin_comparison();
            let (last, before) = came.split_last().unwrap();
            assert!(before.iter().all(|&token| expects.compare(token).is_none()));
            let found = expects.found.unwrap();
            assert_eq!(expects.compare(*last), Some((found, 3, expected)), "{came:?}");
            assert_eq!(expects.compare(*last), None, "no comparison is under way");
        }
        let mut expects = expecting(&[1, 2, 3]);
        expects.forced = 1;
        expects.begin_comparison();
        assert_eq!(expects.compare(9), None, "forced tokens are not compared");
    }

    #[test]
    fn a_request_rests_longer_after_each_miss() {
        let mut expects = expecting(&[1, 2, 3]);
        let mut rests = Vec::new();
        for _ in 0..10 {
            expects.row_ended(0);
            let mut steps = 0;
            while expects.offered(8) == 0 {
                expects.compare(7);
                steps += 1;
            }
            rests.push(steps);
        }
        assert_eq!(rests, [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]);
        expects.row_ended(0);
        expects.forced = 2;
        assert_eq!(expects.offered(8), 2, "forced tokens are no miss");
        expects.row_ended(1);
        assert_eq!(expects.offered(8), 3);
    }
}
