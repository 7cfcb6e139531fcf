//! Dispatch by loads that are reported at intervals.

use std::collections::VecDeque;

/// A list of targets, one per request to dispatch. Dispatching along the list levels out the
/// reported loads. Each report replaces the list.
///
/// A data-parallel controller without exact loads works like this. SGLang's controller did, until
/// each output contained a load report. A new report replaces the list even if it does not count
/// the requests dispatched last.
#[derive(Debug, Clone, Default)]
pub struct Budget {
    turns: VecDeque<usize>,
    next: usize,
}

impl Budget {
    /// Sets new loads, one per target. The least loaded targets get turns until all loads are
    /// equal.
    pub fn reported(&mut self, loads: &[u64]) {
        self.turns.clear();
        let Some(&highest) = loads.iter().max() else { return };
        let lowest = loads.iter().copied().min().unwrap_or(highest);
        for level in lowest..highest {
            let below = (0..loads.len()).filter(|&at| loads[at] <= level);
            self.turns.extend(below);
        }
    }

    /// Returns an `open` target: the next open one in the list, otherwise the next open one of all
    /// `targets` in order. `None`: none is open.
    pub fn take(&mut self, targets: usize, open: impl Fn(usize) -> bool) -> Option<usize> {
        while let Some(at) = self.turns.pop_front() {
            if open(at) {
                return Some(at);
            }
        }
        let at = (0..targets).map(|i| (self.next + i) % targets).find(|&at| open(at))?;
        self.next = (at + 1) % targets;
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_level_the_loads_and_then_everybody_takes_one() {
        let mut budget = Budget::default();
        budget.reported(&[3, 1, 2, 3]);
        let mut loads = [3, 1, 2, 3];
        for _ in 0..3 {
            loads[budget.take(4, |_| true).unwrap()] += 1;
        }
        assert_eq!(loads, [3, 3, 3, 3]);
        let next: Vec<_> = (0..5).filter_map(|_| budget.take(4, |_| true)).collect();
        assert_eq!(next, [0, 1, 2, 3, 0]);
    }

    #[test]
    fn who_is_closed_has_no_turn() {
        let mut budget = Budget::default();
        budget.reported(&[0, 2]);
        assert_eq!(budget.take(2, |at| at == 1), Some(1));
        assert_eq!(budget.take(2, |_| false), None);
    }

    #[test]
    fn a_report_forgets_what_was_sent_since_the_last_one() {
        let mut budget = Budget::default();
        for _ in 0..5 {
            budget.reported(&[4, 3]);
            assert_eq!(budget.take(2, |_| true), Some(1));
        }
    }
}
