//! The probability that drafts are right, by their source and the length of the match that they
//! come from.

use crate::lookup::{DraftMatch, DraftSource};

/// The largest match length of each class except the last.
const CLASSES: [u32; 6] = [2, 3, 4, 6, 9, 15];
/// For each class, the share of first drafts that were right, measured over 59 requests (ADR 86).
const FIRST: [f64; CLASSES.len() + 1] = [0.52, 0.59, 0.90, 0.78, 0.62, 0.89, 0.97];
/// For each class, the share of further drafts that were right, given that all drafts before them
/// were.
const FURTHER: [f64; CLASSES.len() + 1] = [0.74, 0.74, 0.77, 0.80, 0.88, 0.94, 0.98];
/// The weight of these shares, as a number of measured drafts.
const PRIOR: f64 = 4.0;
/// The number of drafts after which older ones weigh half as much.
const MEMORY: f64 = 512.0;

fn class(length: u32) -> usize {
    CLASSES.iter().position(|&most| length <= most).unwrap_or(CLASSES.len())
}

/// Counted drafts of one class.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    drafted: f64,
    accepted: f64,
}

impl Tally {
    fn add(&mut self, accepted: bool) {
        self.drafted += 1.0;
        self.accepted += f64::from(u8::from(accepted));
        if self.drafted > MEMORY {
            self.drafted /= 2.0;
            self.accepted /= 2.0;
        }
    }

    fn share(self, prior: f64) -> f64 {
        (self.accepted + prior * PRIOR) / (self.drafted + PRIOR)
    }
}

/// The drafts of one source, by the length of their match.
#[derive(Debug, Clone, Default)]
struct Tallies {
    first: [Tally; FIRST.len()],
    further: [Tally; FURTHER.len()],
}

/// The acceptance of drafts so far, and the expected acceptance. Drafts from other requests' texts
/// are counted separately.
#[derive(Debug, Clone, Default)]
pub struct Acceptance {
    own: Tallies,
    shared: Tallies,
}

impl Acceptance {
    /// Records the outcome of `drafted` tokens after a match: the first `accepted` were right.
    pub fn learn(&mut self, found: DraftMatch, drafted: u32, accepted: u32) {
        let class = class(found.length);
        if drafted == 0 {
            return;
        }
        let shared = found.source == DraftSource::Shared;
        let tallies = if shared { &mut self.shared } else { &mut self.own };
        tallies.first[class].add(accepted > 0);
        // A draft after a rejected one is not counted, because it was not tested.
        for nth in 1..drafted.min(accepted + 1) {
            tallies.further[class].add(nth < accepted);
        }
    }

    /// The probability that the first draft after a match is right, and that of each further one if
    /// those before it are.
    #[must_use]
    pub fn expected(&self, found: DraftMatch) -> (f64, f64) {
        let class = class(found.length);
        let shared = found.source == DraftSource::Shared;
        let Tallies { first, further } = if shared { &self.shared } else { &self.own };
        (first[class].share(FIRST[class]), further[class].share(FURTHER[class]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(length: u32) -> DraftMatch {
        DraftMatch { length, source: DraftSource::Own }
    }

    #[test]
    fn what_comes_often_is_expected() {
        let mut acceptance = Acceptance::default();
        assert_eq!(acceptance.expected(own(2)), (0.52, 0.74));
        for _ in 0..2000 {
            acceptance.learn(own(2), 3, 0);
            acceptance.learn(own(40), 3, 2);
        }
        let (first, further) = acceptance.expected(own(2));
        assert!(
            first < 0.02 && further > 0.7,
            "a miss at the first token teaches nothing of later ones: {further}"
        );
        let (first, further) = acceptance.expected(own(16));
        assert!(first > 0.99 && (0.45..0.55).contains(&further), "{first} {further}");
        assert_eq!(acceptance.expected(own(5)), (0.78, 0.80));
        let shared = DraftMatch { length: 2, source: DraftSource::Shared };
        assert_eq!(acceptance.expected(shared), (0.52, 0.74), "shared texts are learned apart");
    }
}
