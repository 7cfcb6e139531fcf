//! Finds the smallest number of replicas that meets the objectives, and the best split of a number
//! of replicas.

use std::collections::BTreeMap;

/// The smallest number from 1 to `most` for which `enough` holds, found by bisection; `None`: it
/// does not hold for `most`. If `enough` is not monotonic, it holds for the result, but not for the
/// number before it.
pub(crate) fn least(most: u32, mut enough: impl FnMut(u32) -> bool) -> Option<u32> {
    let (mut failed, mut tried) = (0, 1);
    while !enough(tried) {
        if tried == most {
            return None;
        }
        failed = tried;
        tried = tried.saturating_mul(2).min(most);
    }
    let mut met = tried;
    while met - failed > 1 {
        let middle = u32::midpoint(failed, met);
        if enough(middle) {
            met = middle;
        } else {
            failed = middle;
        }
    }
    Some(met)
}

/// The number of equal parts into which the first, coarse search divides the replicas.
const COARSE: u32 = 8;
/// The smallest step size of the search is the number of replicas divided by this.
const FINEST: u32 = 64;

/// The number of prefill replicas, of `replicas` in total, with the largest score of those tried:
/// every eighth, then in smaller steps around the best. Scores are compared lexicographically.
pub(crate) fn best_split(replicas: u32, mut score: impl FnMut(u32) -> (f64, f64)) -> u32 {
    let most = replicas - 1;
    let mut scores: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    let mut tried = |scores: &mut BTreeMap<u32, (f64, f64)>, prefill: u32| {
        let prefill = prefill.clamp(1, most);
        scores.entry(prefill).or_insert_with(|| score(prefill));
        let better =
            |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0).then_with(|| a.1.total_cmp(&b.1));
        // Of equal scores, the one with the fewest prefill replicas wins.
        let best = scores.iter().rev().max_by(|a, b| better(a.1, b.1));
        best.map_or(prefill, |(&best, _)| best)
    };
    let mut best = 1;
    for eighth in 1..COARSE {
        best = tried(&mut scores, replicas * eighth / COARSE);
    }
    let mut step = replicas / COARSE / 2;
    while step >= (replicas / FINEST).max(1) {
        let before = best;
        for prefill in [before.saturating_sub(step), before + step] {
            best = tried(&mut scores, prefill);
        }
        if best == before {
            step /= 2;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_split_is_found_in_few_tries() {
        for replicas in [2, 3, 8, 20, 64, 256] {
            for peak in 1..replicas {
                let mut tries = 0;
                let found = best_split(replicas, |prefill| {
                    assert!((1..replicas).contains(&prefill));
                    tries += 1;
                    (0.0, -f64::from(prefill.abs_diff(peak)))
                });
                assert!(found.abs_diff(peak) <= replicas / FINEST, "{found} for {peak}");
                assert!(tries <= 18, "{tries} for {peak} of {replicas}");
            }
        }
        assert_eq!(
            best_split(8, |_| (1.0, 0.0)),
            1,
            "of equal splits, the one with the fewest prefill replicas"
        );
        assert_eq!(best_split(8, |prefill| (f64::from(prefill / 4), -f64::from(prefill))), 4);
    }

    #[test]
    fn the_least_number_is_found_in_few_tries() {
        for most in 1..70 {
            for answer in 1..=most + 1 {
                let mut tries = 0;
                let found = least(most, |n| {
                    assert!((1..=most).contains(&n));
                    tries += 1;
                    n >= answer
                });
                assert_eq!(found, (answer <= most).then_some(answer));
                assert!(tries <= 14, "{tries} for {answer} of {most}");
            }
        }
    }
}
