//! The least number of replicas that meets the objectives.

/// The least number from 1 to `most` for which `enough` holds; `None` if it does not hold for
/// `most`. If `enough` is not monotonic, the result is a number for which it holds and whose
/// predecessor was tried in vain.
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

#[cfg(test)]
mod tests {
    use super::*;

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
