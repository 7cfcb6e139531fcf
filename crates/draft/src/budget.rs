//! The number of drafts of a step.

use std::cmp::Ordering;

use crate::acceptance::Acceptance;
use crate::costs::StepCosts;
use crate::lookup::DraftMatch;

/// The factor by which drafts must raise a step's expected tokens per microsecond.
const GAIN: f64 = 1.03;
/// The factor that is required while drafts have lost more than [`DEBT`] of all time.
const GAIN_IN_DEBT: f64 = 1.22;
/// The share of all time that drafts may lose before the required gain rises.
const DEBT: f64 = 0.005;
/// The share of all time that drafts may lose before only forced drafts are sent.
const LOST: f64 = 0.01;
/// The factor on saved and spent times at each step, so that old steps count less.
const FADING: f64 = 1.0 - 1.0 / 4096.0;
/// The lowest probability at which a draft is sent. Below it the gain is smaller than the error of
/// measured times.
const LEAST_ODDS: f64 = 0.2;
/// The number of consecutive steps with drafts after which one step has none. The time of steps
/// without drafts has to be measured from time to time, as the baseline.
const STREAK: u32 = 128;
/// The weight of all earlier waits for results, relative to a weight of 1 for a new wait.
const WAITS: f64 = 15.0;

/// The drafts that a row could have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftOffer {
    /// The match that the drafts come from.
    pub found: DraftMatch,
    /// The number of these drafts.
    pub most: u32,
    /// The request's acceptance relative to that of other requests; 1 is average.
    pub ratio: f64,
    /// The number of leading drafts that are certain: no other token is allowed there.
    pub forced: u32,
}

/// A step that only decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeStep {
    /// The number of rows. Each returned at least one token.
    pub rows: u32,
    /// The number of drafts of all rows.
    pub drafts: u32,
    /// The number of tokens that the rows returned.
    pub tokens: u32,
    /// The time that the device took, in microseconds.
    pub us: u32,
    /// Microseconds for which the device was idle before the step, because its plan waited for a
    /// result for the sake of drafts. `None`: it did not wait.
    pub waited_us: Option<u32>,
}

/// The probabilities of the drafts of an offer.
#[derive(Debug, Clone, Copy)]
struct Odds {
    /// The probability that the next draft and all before it are right.
    next: f64,
    /// The probability of the first draft that is not certain.
    first: f64,
    /// The probability of each further draft, given that all before it are right.
    further: f64,
}

/// Limits drafts to those whose time pays off in a step.
#[derive(Debug, Clone, Default)]
pub struct DraftBudget {
    costs: StepCosts,
    acceptance: Acceptance,
    /// Microseconds that drafts have saved.
    saved_us: f64,
    /// Microseconds of all steps.
    spent_us: f64,
    /// The mean idle time of the device before a step whose plan waited, in microseconds.
    wait_us: f64,
    /// The number of steps with drafts since the last step without drafts.
    streak: u32,
}

impl DraftBudget {
    /// Writes to `counts` how many drafts to take from each offer, at most `room` in total. The
    /// counts maximise the tokens per microsecond of a step with `rows` rows that return a token
    /// each.
    pub fn buy(&self, rows: u32, offers: &[DraftOffer], room: u32, counts: &mut Vec<u32>) {
        counts.clear();
        counts.resize(offers.len(), 0);
        let Some(alone) = self.costs.us(rows.max(1)).filter(|_| self.streak < STREAK) else {
            return;
        };
        let mut odds: Vec<Odds> = offers.iter().map(|offer| self.odds(offer)).collect();
        let mut taken = counts.clone();
        let (mut tokens, usual) = (f64::from(rows), f64::from(rows) / alone);
        let mut best = usual * self.least_gain();
        for drafts in 1..=room {
            let open = (0..offers.len())
                .filter(|&at| taken[at] < offers[at].most && odds[at].next >= LEAST_ODDS);
            let Some(at) = open.max_by(|&a, &b| odds[a].next.total_cmp(&odds[b].next)) else {
                break;
            };
            tokens += odds[at].next;
            taken[at] += 1;
            let Odds { next, first, further } = &mut odds[at];
            *next *= match taken[at].cmp(&offers[at].forced) {
                Ordering::Less => 1.0,
                Ordering::Equal => *first,
                Ordering::Greater => *further,
            };
            // More positions never make a step shorter, even if a shorter time was measured.
            let us = self.costs.us(rows + drafts).map(|us| us.max(alone) + self.wait_us);
            let rate = us.map_or(0.0, |us| tokens / us);
            if rate > best {
                best = rate;
                counts.clone_from(&taken);
            }
        }
    }

    fn odds(&self, offer: &DraftOffer) -> Odds {
        let (first, further) = self.acceptance.expected(offer.found);
        let lost = self.saved_us < -LOST * self.spent_us;
        let bounded = |odds: f64| if lost { 0.0 } else { (odds * offer.ratio).min(0.99) };
        let (first, further) = (bounded(first), bounded(further));
        Odds { next: if offer.forced > 0 { 1.0 } else { first }, first, further }
    }

    fn least_gain(&self) -> f64 {
        if self.saved_us < -DEBT * self.spent_us { GAIN_IN_DEBT } else { GAIN }
    }

    /// Records the time of a decode-only step.
    pub fn step_ended(&mut self, step: DecodeStep) {
        let DecodeStep { rows, drafts, tokens, us, waited_us } = step;
        if rows == 0 || us == 0 {
            return;
        }
        (self.saved_us, self.spent_us) = (self.saved_us * FADING, self.spent_us * FADING);
        self.spent_us += f64::from(us);
        if let Some(waited) = waited_us {
            // A wait beyond the length of a step has other reasons, so it does not count.
            let waited = f64::from(waited.min(us));
            self.saved_us -= waited;
            self.wait_us = (self.wait_us * WAITS + waited) / (WAITS + 1.0);
        }
        if let Some(alone) = self.costs.us(rows).filter(|_| drafts > 0) {
            self.saved_us += alone * f64::from(tokens) / f64::from(rows) - f64::from(us);
        }
        self.streak = if drafts > 0 { self.streak.saturating_add(1) } else { 0 };
        self.costs.learn(rows + drafts, us);
    }

    /// Learns from a step of `positions` positions, some of which belong to prompts.
    pub fn prompts_ended(&mut self, positions: u32, drafts: u32, us: u32) {
        if drafts == 0 {
            self.streak = 0;
        }
        self.costs.learn_prompt(positions, us);
    }

    /// Records the outcome of drafts that were not forced. Either a row contained the drafts, or
    /// they were compared with tokens that were sampled without drafts. Returns the drafts'
    /// acceptance relative to the average; 1 is average.
    pub fn drafts_ended(&mut self, found: DraftMatch, drafted: u32, accepted: u32) -> f64 {
        let (first, further) = self.acceptance.expected(found);
        let expected: f64 = (0..drafted).map(|nth| first * further.powi(nth.cast_signed())).sum();
        self.acceptance.learn(found, drafted, accepted);
        (f64::from(accepted) / expected.max(0.01)).min(2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DraftSource;

    fn bought(budget: &DraftBudget, rows: u32, offers: &[DraftOffer], room: u32) -> Vec<u32> {
        let mut counts = Vec::new();
        budget.buy(rows, offers, room, &mut counts);
        counts
    }

    fn own(length: u32) -> DraftMatch {
        DraftMatch { length, source: DraftSource::Own }
    }

    fn plain(rows: u32, us: u32) -> DecodeStep {
        DecodeStep { rows, drafts: 0, tokens: rows, us, waited_us: None }
    }

    /// A device on which a step of up to four positions takes 1 ms, and each further group of four
    /// takes 1 ms more.
    fn stairs() -> DraftBudget {
        let mut budget = DraftBudget::default();
        for _ in 0..40 {
            for positions in [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32] {
                budget.step_ended(plain(positions, 1000 * positions.div_ceil(4)));
            }
        }
        budget
    }

    #[test]
    fn drafts_fill_a_stair_and_no_more() {
        let budget = stairs();
        let sure = DraftOffer { found: own(32), most: 8, ratio: 1.0, forced: 0 };
        let unsure = DraftOffer { found: own(2), most: 8, ratio: 0.5, forced: 0 };
        assert_eq!(
            bought(&DraftBudget::default(), 1, &[sure], 8),
            [0],
            "without measurements no draft is bought"
        );
        assert_eq!(bought(&budget, 1, &[sure], 2), [2], "drafts stay within the room");
        assert_eq!(
            bought(&budget, 4, &[unsure; 4], 8),
            [0; 4],
            "the fifth position costs too much"
        );
        let both = bought(&budget, 2, &[unsure, sure], 8);
        assert!(both[1] >= 2 && both[0] <= 1, "{both:?}: the surer ones come first");
        assert_eq!(bought(&budget, 32, &[unsure; 32], 64), [0; 32], "arithmetic bounds the step");
    }

    #[test]
    fn what_is_forced_is_certain_and_what_follows_it_is_not() {
        let budget = stairs();
        let unsure = DraftOffer { found: own(2), most: 8, ratio: 0.5, forced: 0 };
        let begins = |forced| DraftOffer { forced, ..unsure };
        assert_eq!(bought(&budget, 2, &[unsure; 2], 8), [1, 1]);
        assert_eq!(bought(&budget, 2, &[unsure, begins(2)], 8), [0, 2], "forced drafts go first");
        assert_eq!(bought(&budget, 2, &[unsure, begins(1)], 8).iter().sum::<u32>(), 2);
    }

    #[test]
    fn drafts_that_never_pay_end() {
        let mut budget = stairs();
        let offer = DraftOffer { found: own(8), most: 4, ratio: 1.0, forced: 0 };
        let mut ratio = 1.0;
        let mut bad = 0;
        for _ in 0..400 {
            let count = bought(&budget, 1, &[DraftOffer { ratio, ..offer }], 4)[0];
            bad += u32::from(count > 0);
            let us = 1000 + 300 * count;
            budget.step_ended(DecodeStep {
                rows: 1,
                drafts: count,
                tokens: 1,
                us,
                waited_us: None,
            });
            if count > 0 {
                let share = budget.drafts_ended(own(8), count, 0);
                ratio = (ratio + (share - ratio) / 8.0).clamp(0.25, 1.5);
            }
        }
        assert!(bad < 60, "{bad} of 400 steps had drafts that were wrong");
    }

    #[test]
    fn a_loss_stops_all_but_certain_drafts() {
        let mut budget = stairs();
        let sure = DraftOffer { found: own(32), most: 3, ratio: 1.0, forced: 0 };
        assert_eq!(bought(&budget, 1, &[sure], 8), [3]);
        // The drafts are right as often as before, but the device is idle before each step.
        let mut steps = 0;
        while bought(&budget, 1, &[sure], 8) != [0] {
            let step = DecodeStep { rows: 1, drafts: 3, tokens: 1, us: 1000, waited_us: Some(900) };
            budget.step_ended(step);
            steps += 1;
        }
        assert!(steps < 20, "{steps} beside 440 others");
        for _ in 0..8 {
            budget.step_ended(DecodeStep { waited_us: Some(900), ..plain(1, 1000) });
        }
        let certain = DraftOffer { forced: 3, ..sure };
        assert_eq!(bought(&budget, 1, &[sure], 8), [0]);
        assert_eq!(
            bought(&budget, 1, &[certain], 8),
            [3],
            "certain drafts are worth a wait of nearly a step"
        );
        (0..8000).for_each(|_| budget.step_ended(plain(1, 1000)));
        budget.wait_us = 0.0;
        assert_eq!(bought(&budget, 1, &[sure], 8), [3], "a loss is forgotten in the end");
    }

    #[test]
    fn one_step_of_many_has_no_drafts() {
        let mut budget = stairs();
        let sure = DraftOffer { found: own(32), most: 3, ratio: 1.0, forced: 0 };
        for _ in 0..STREAK {
            assert_eq!(bought(&budget, 1, &[sure], 8), [3]);
            let step = DecodeStep { rows: 1, drafts: 3, tokens: 4, us: 1000, waited_us: None };
            budget.step_ended(step);
        }
        assert_eq!(bought(&budget, 1, &[sure], 8), [0]);
        budget.step_ended(plain(1, 1000));
        assert_eq!(bought(&budget, 1, &[sure], 8), [3]);
    }

    #[test]
    fn an_improbable_draft_is_never_bought() {
        let mut budget = DraftBudget::default();
        // All positions cost the same.
        (0..400).for_each(|at| budget.step_ended(plain(1 + at % 32, 1000)));
        let improbable = DraftOffer { found: own(2), most: 8, ratio: 0.3, forced: 0 };
        assert_eq!(bought(&budget, 1, &[improbable], 8), [0]);
        assert_eq!(bought(&budget, 1, &[DraftOffer { ratio: 0.8, ..improbable }], 8), [2]);
    }
}
