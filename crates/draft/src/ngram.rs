//! Hashes of n-grams, which are a few consecutive tokens.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

/// A secret of this process. Without it, a client could send a prompt whose n-grams all have the
/// same hash, and each lookup would compare with all of them.
static SECRET: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));

/// Hashes consecutive tokens. Equal tokens with equal seeds have equal hashes.
pub(crate) fn hash(seed: u64, tokens: impl Iterator<Item = i32>) -> u64 {
    mixed(seed ^ *SECRET, tokens)
}

fn mixed(seed: u64, tokens: impl Iterator<Item = i32>) -> u64 {
    let mixed = tokens.fold(seed, |hash, token| {
        let mixed = hash ^ u64::from(token.cast_unsigned());
        mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    mixed.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_client_cannot_choose_ngrams_of_one_bucket() {
        const BUCKETS: u64 = 1 << 10;
        let grams = (0..200_000).map(|number| [number % 500, number / 500]);
        let alike: Vec<[i32; 2]> =
            grams.filter(|gram| mixed(0, gram.iter().copied()) % BUCKETS == 0).take(100).collect();
        assert_eq!(alike.len(), 100, "they are easy to find for a known seed");
        let buckets: HashSet<u64> =
            alike.iter().map(|gram| hash(0, gram.iter().copied()) % BUCKETS).collect();
        assert!(buckets.len() > 50, "{} buckets of {} n-grams", buckets.len(), alike.len());
    }
}
