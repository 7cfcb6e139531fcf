//! Session affinity: requests of one key go to the same target.

use std::hash::{BuildHasher, Hash};

use rustc_hash::FxBuildHasher;

/// Returns the target of a key, among the `open` ones of `targets` targets; `None`: none is open.
///
/// This is rendezvous hashing (Thaler, Ravishankar 1998): each pair of key and target has a hash,
/// and the largest wins. So no state is kept, and if a target is removed, only its own keys move.
pub fn preferred(key: impl Hash, targets: usize, open: impl Fn(usize) -> bool) -> Option<usize> {
    let key = FxBuildHasher.hash_one(key);
    (0..targets).filter(|&at| open(at)).max_by_key(|&at| mix(key ^ mix(at as u64)))
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_keys_of_a_target_that_goes_away_move() {
        let mut counts = [0; 4];
        for key in 0..4000 {
            let at = preferred(("session", key), 4, |_| true).unwrap();
            counts[at] += 1;
            for gone in 0..4 {
                let now = preferred(("session", key), 4, |target| target != gone).unwrap();
                assert_eq!(now == at, gone != at);
            }
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
        assert_eq!(preferred(1, 4, |_| false), None);
    }
}
