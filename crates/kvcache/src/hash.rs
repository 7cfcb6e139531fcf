//! Names of blocks.

use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Tokens copied to bytes at a time: a stack buffer of 256 bytes, a page of usual size in one go.
const CHUNK: usize = 64;

/// The name of a block: a 128-bit XXH3 of its parent's name and its own tokens. Equal names are taken for equal content, without a look
/// at the tokens.
///
/// Two different blocks among `n` have the same name with a probability of about `n^2 / 2^129`: 2^-65 for the 2^32 blocks that a
/// busy replica sees in years. XXH3 is no cryptographic hash, though: who wants a collision can construct one. Tenants that must not
/// trust each other's prompts need different, secret cache salts, which keep their names apart from the root on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The parent of every first block. Requests with different salts share nothing.
    #[must_use]
    pub fn root(cache_salt: u64) -> Self {
        let mut bytes = *b"forebay block 1\0\0\0\0\0\0\0\0\0";
        bytes[16..].copy_from_slice(&cache_salt.to_le_bytes());
        Self(xxh3_128(&bytes))
    }

    /// The name of the block that follows this one and holds `tokens` (as many as a page has positions).
    #[must_use]
    pub fn child(self, tokens: &[i32]) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&self.0.to_le_bytes());
        for chunk in tokens.chunks(CHUNK) {
            let mut bytes = [0; 4 * CHUNK];
            for (place, token) in bytes.chunks_exact_mut(4).zip(chunk) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * chunk.len()]);
        }
        Self(hasher.digest128())
    }

    /// The names of the full blocks at the beginning of `tokens`, `page_size` tokens each, for requests with this salt.
    #[must_use]
    pub fn chain(cache_salt: u64, tokens: &[i32], page_size: usize) -> Vec<Self> {
        let mut parent = Self::root(cache_salt);
        let name = |block| {
            parent = parent.child(block);
            parent
        };
        tokens.chunks_exact(page_size).map(name).collect()
    }

    /// The name as a number, for those who hand it on.
    #[must_use]
    pub fn number(self) -> u128 {
        self.0
    }
}

impl From<u128> for BlockHash {
    /// The name that somebody else has computed by the same rules.
    fn from(number: u128) -> Self {
        Self(number)
    }
}

/// Hashes a [`BlockHash`] to its low half: it is a good hash already.
#[derive(Default)]
pub(crate) struct NameHasher(u64);

/// Builds [`NameHasher`]s.
pub(crate) type BuildNameHasher = BuildHasherDefault<NameHasher>;

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_salt_parent_tokens_and_their_order() {
        let root = BlockHash::root(0);
        let names = [
            root,
            BlockHash::root(1),
            root.child(&[1, 2]),
            root.child(&[2, 1]),
            root.child(&[1, 2]).child(&[1, 2]),
            BlockHash::root(1).child(&[1, 2]),
            root.child(&[1]),
            root.child(&[1, 2, 0]),
        ];
        for (i, a) in names.iter().enumerate() {
            for b in &names[i + 1..] {
                assert_ne!(a, b);
            }
        }
        assert_eq!(root.child(&[1, 2]), BlockHash::root(0).child(&[1, 2]));
    }

    #[test]
    fn a_chain_names_the_full_blocks_only() {
        let first = BlockHash::root(3).child(&[1, 2]);
        assert_eq!(BlockHash::chain(3, &[1, 2, 3, 4, 5], 2), [first, first.child(&[3, 4])]);
        assert_eq!(BlockHash::chain(3, &[1], 2), []);
        assert_eq!(BlockHash::from(first.number()), first);
    }

    #[test]
    fn long_blocks_are_hashed_whole() {
        let mut tokens: Vec<i32> = (0..200).collect();
        let name = BlockHash::root(0).child(&tokens);
        for at in 0..tokens.len() {
            tokens[at] ^= 1 << 20;
            assert_ne!(BlockHash::root(0).child(&tokens), name, "token {at} counts");
            tokens[at] ^= 1 << 20;
        }
        assert_eq!(BlockHash::root(0).child(&tokens), name);
    }

    #[test]
    fn names_do_not_change_between_releases() {
        // Other tiers and peers will hold names, so a change of the hash is a change of a format.
        let name = BlockHash::root(7).child(&[1, -2, 3]);
        assert_eq!(name.0, 126_234_796_457_742_804_698_401_826_325_641_901_135);
    }
}
