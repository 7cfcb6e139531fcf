//! Moves queued requests when the loads of targets have drifted apart.
//!
//! A request goes to the target that is best at that moment. Later one target may turn out faster
//! than its token count suggested, and another slower. A move pays off if it halves the tokens to
//! compute before the request's first token. Smaller gains would be within the error of using
//! tokens to estimate time.

use crate::ledger::Load;

/// The largest number of moves per request.
pub const MOST_MOVES: u8 = 2;

/// Returns the targets with the most and the least prefill left, if a move between them may pay
/// off. Only `open` targets take requests.
pub fn drifted(loads: &[Load], open: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
    let queued = loads.iter().enumerate().filter(|(_, load)| load.in_prefill > 1);
    let (from, most) = queued.max_by_key(|(_, load)| load.work.prefill)?;
    let others = loads.iter().enumerate().filter(|&(at, _)| at != from && open(at));
    let (to, least) = others.min_by_key(|(_, load)| load.work.prefill)?;
    move_pays(most, least, 1).then_some((from, to))
}

/// True if a move of a queued request pays off. The request has `uncached` tokens to compute at the
/// new target. That target must have fewer requests, so that moves do not counteract policies that
/// balance the number of requests.
#[must_use]
pub fn move_pays(here: &Load, there: &Load, uncached: u64) -> bool {
    let sooner = there.work.prefill.saturating_add(uncached).saturating_mul(2);
    sooner <= here.work.prefill && there.requests < here.requests
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ledger::{Ledger, Work};

    fn ledger(prefills: &[&[u64]]) -> Ledger {
        let mut ledger = Ledger::new(prefills.len());
        let mut id = 0;
        for (target, works) in prefills.iter().enumerate() {
            for &prefill in *works {
                ledger.sent(id, target, Work { prefill, decode: 1 });
                id += 1;
            }
        }
        ledger
    }

    #[test]
    fn a_queue_twice_as_long_as_another_has_drifted() {
        let drift = |prefills: &[&[u64]]| drifted(ledger(prefills).loads(), |at| at != 3);
        assert_eq!(
            drift(&[&[10, 10], &[9], &[50], &[]]),
            Some((0, 1)),
            "a single request cannot move"
        );
        assert_eq!(drift(&[&[10, 10], &[10]]), None);
        assert_eq!(drift(&[&[10]]), None);
    }

    #[test]
    fn a_target_with_as_many_requests_takes_none() {
        let ledger = ledger(&[&[100, 100], &[1, 1]]);
        assert_eq!(drifted(ledger.loads(), |_| true), None);
    }

    #[test]
    fn a_move_pays_if_it_halves_what_comes_first() {
        let ledger = ledger(&[&[100, 100], &[20]]);
        let pays = |uncached| move_pays(&ledger.loads()[0], &ledger.loads()[1], uncached);
        assert!(pays(80) && !pays(81));
    }

    proptest! {
        /// If only moves that pay off are made, the number of moves is finite: no request moves in
        /// circles.
        #[test]
        fn moves_end(works in prop::collection::vec((0..5_usize, 1..10_000_u64), 1..60)) {
            let mut ledger = Ledger::new(5);
            let mut sizes = Vec::new();
            for (id, &(target, prefill)) in (0..).zip(&works) {
                ledger.sent(id, target, Work { prefill, decode: 1 });
                sizes.push(prefill);
            }
            let mut moves = 0;
            while let Some((from, to)) = drifted(ledger.loads(), |_| true) {
                let (here, there) = (ledger.loads()[from], ledger.loads()[to]);
                let mut queued: Vec<u64> = ledger.requests(from).collect();
                queued.sort_unstable();
                let pays = |id: &u64| move_pays(&here, &there, sizes[*id as usize]);
                let Some(id) = queued.into_iter().find(pays) else { break };
                ledger.sent(id, to, Work { prefill: sizes[id as usize], decode: 1 });
                moves += 1;
                prop_assert!(moves <= 20 * works.len(), "{moves} moves");
            }
        }
    }
}
