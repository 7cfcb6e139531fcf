//! Random numbers that depend only on the seed, not on the machine or the number of threads.

use rand::SeedableRng as _;
use rand::rngs::ChaCha12Rng;

/// The uses of random numbers. Each use has its own generator, so that a flag that affects one does
/// not change the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Gaps between requests.
    Arrivals,
    /// Lengths of one request.
    Lengths,
    /// Words of one request.
    Words,
    /// Words that requests share.
    Shared,
    /// Pixels of one request.
    Pixels,
    /// The order of a file's records, or of the generated requests.
    Order,
}

/// Creates the generator of request (or block, or group) `index`: ChaCha with 12 rounds, with
/// `seed` and `purpose` as the key and `index` as the stream.
pub(crate) fn generator(seed: u64, purpose: Purpose, index: u64) -> ChaCha12Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8] = purpose as u8;
    let mut generator = ChaCha12Rng::from_seed(key);
    generator.set_stream(index);
    generator
}

#[cfg(test)]
mod tests {
    use rand::RngExt as _;

    use super::*;

    #[test]
    fn numbers_depend_on_seed_purpose_and_index_and_on_nothing_else() {
        let first = |seed, purpose, index| generator(seed, purpose, index).random::<u64>();
        let one = first(1, Purpose::Words, 0);
        assert_eq!(one, first(1, Purpose::Words, 0));
        assert_ne!(one, first(2, Purpose::Words, 0));
        assert_ne!(one, first(1, Purpose::Shared, 0));
        assert_ne!(one, first(1, Purpose::Words, 1));
    }
}
