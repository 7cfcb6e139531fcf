//! Names of blocks.

use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use xxhash_rust::xxh3::{xxh3_64_with_secret, xxh3_128_with_secret, xxh3_128_with_seed};

/// The number of tokens that are hashed at a time, in a stack buffer. The buffer suffices for a
/// page of the usual size.
const CHUNK: usize = 64;
/// Bytes of a name.
const NAME: usize = 16;
/// Bytes of the secret that XXH3 takes.
const SECRET: usize = 192;

/// The name of a block: a 128-bit XXH3, keyed with a secret, of its parent's name and its own
/// tokens ([`Namer`]). Equal names count as equal content; tokens are never compared.
///
/// Two different blocks among `n` have the same name with a probability of about `n^2 / 2^129`:
/// 2^-65 for the 2^32 blocks that a busy replica sees in years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(u128);

/// The identity of an image: a cryptographic hash of its file and its processing. Images with equal
/// identities count as equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageId(pub u128);

/// Names blocks with a secret.
///
/// Without the secret nobody can compute the name of a guessed prompt, or construct two prompts
/// with the same name. So leaked names reveal nothing about prompts. Names are still kept from
/// clients, because XXH3 is not a cryptographic hash. Namers with the same secret give the same
/// names; namers with different secrets have none in common.
#[derive(Clone)]
pub struct Namer(Arc<[u8; SECRET]>);

impl fmt::Debug for Namer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Namer(secret)")
    }
}

impl Namer {
    /// Creates a namer with a secret of any length. 32 random bytes are enough.
    #[must_use]
    pub fn new(secret: &[u8]) -> Self {
        let mut expanded = [0; SECRET];
        for (number, part) in (1..).zip(expanded.chunks_exact_mut(NAME)) {
            part.copy_from_slice(&xxh3_128_with_seed(secret, number).to_le_bytes());
        }
        Self(Arc::new(expanded))
    }

    /// Creates a namer without a secret, for tests and simulations. Its names are the same
    /// everywhere.
    #[must_use]
    pub fn open() -> Self {
        Self::new(&[])
    }

    /// A number that identifies the secret: it is equal for namers with the same secret. It does
    /// not reveal the secret.
    #[must_use]
    pub fn id(&self) -> u64 {
        xxh3_64_with_secret(b"forebay namer 2", &*self.0)
    }

    /// Hashes these texts to a salt, never 0. Without the secret nobody can find other texts with
    /// the same salt.
    #[must_use]
    pub fn salt(&self, texts: &[&[u8]]) -> u64 {
        let mut bytes = b"forebay salt 1".to_vec();
        for text in texts {
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text);
        }
        xxh3_64_with_secret(&bytes, &*self.0).max(1)
    }

    /// The parent of every first block of requests with this salt. Requests with different salts
    /// share nothing.
    #[must_use]
    pub fn root(&self, salt: u64) -> BlockHash {
        let mut bytes = *b"forebay block 2\0\0\0\0\0\0\0\0\0";
        bytes[16..].copy_from_slice(&salt.to_le_bytes());
        BlockHash(xxh3_128_with_secret(&bytes, &*self.0))
    }

    /// The name of the block that follows `parent` and holds `tokens` (as many as a page has
    /// positions).
    #[must_use]
    pub fn child(&self, parent: BlockHash, tokens: &[i32]) -> BlockHash {
        let mut bytes = [0; NAME + 4 * CHUNK];
        tokens.chunks(CHUNK).fold(parent, |parent, chunk| {
            let used = NAME + 4 * chunk.len();
            bytes[..NAME].copy_from_slice(&parent.0.to_le_bytes());
            for (place, token) in bytes[NAME..used].chunks_exact_mut(4).zip(chunk) {
                place.copy_from_slice(&token.to_le_bytes());
            }
            BlockHash(xxh3_128_with_secret(&bytes[..used], &*self.0))
        })
    }

    /// The name of a block with images. Each image adds three values: its first position in the
    /// block, its identity, and the number of its positions before the block. Without images this
    /// is [`Self::child`].
    #[must_use]
    pub fn child_with(
        &self,
        parent: BlockHash,
        tokens: &[i32],
        images: impl Iterator<Item = (u32, ImageId, u32)>,
    ) -> BlockHash {
        images.fold(self.child(parent, tokens), |name, (at, ImageId(image), first)| {
            let mut bytes = [0; 2 * NAME + 8];
            bytes[..NAME].copy_from_slice(&name.0.to_le_bytes());
            bytes[NAME..2 * NAME].copy_from_slice(&image.to_le_bytes());
            bytes[2 * NAME..2 * NAME + 4].copy_from_slice(&at.to_le_bytes());
            bytes[2 * NAME + 4..].copy_from_slice(&first.to_le_bytes());
            BlockHash(xxh3_128_with_secret(&bytes, &*self.0))
        })
    }

    /// The names of the full blocks at the beginning of `tokens`, `page_size` tokens each, for
    /// requests with this salt.
    #[must_use]
    pub fn chain(&self, salt: u64, tokens: &[i32], page_size: usize) -> Vec<BlockHash> {
        let mut parent = self.root(salt);
        let name = |block| {
            parent = self.child(parent, block);
            parent
        };
        tokens.chunks_exact(page_size).map(name).collect()
    }
}

impl BlockHash {
    /// The name as a number, for other formats.
    #[must_use]
    pub fn number(self) -> u128 {
        self.0
    }
}

impl From<u128> for BlockHash {
    /// A name from another process, computed by the same rules.
    fn from(number: u128) -> Self {
        Self(number)
    }
}

/// Hashes a [`BlockHash`] to its low half, because it is already a good hash.
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
    fn a_name_depends_on_secret_salt_parent_tokens_and_their_order() {
        let (namer, other) = (Namer::open(), Namer::new(b"another"));
        let root = namer.root(0);
        let names = [
            root,
            other.root(0),
            namer.root(1),
            namer.child(root, &[1, 2]),
            namer.child(root, &[2, 1]),
            other.child(root, &[1, 2]),
            namer.child(namer.child(root, &[1, 2]), &[1, 2]),
            namer.child(namer.root(1), &[1, 2]),
            namer.child(root, &[1]),
            namer.child(root, &[1, 2, 0]),
        ];
        for (i, a) in names.iter().enumerate() {
            for b in &names[i + 1..] {
                assert_ne!(a, b);
            }
        }
        assert_eq!(namer.child(root, &[1, 2]), Namer::new(&[]).child(root, &[1, 2]));
    }

    #[test]
    fn a_name_depends_on_the_images_in_the_block_and_on_where_they_stand() {
        let namer = Namer::open();
        let (root, tokens) = (namer.root(0), [7, 7, 7, 7]);
        let of = |images: &[(u32, u128, u32)]| {
            let images = images.iter().map(|&(at, id, first)| (at, ImageId(id), first));
            namer.child_with(root, &tokens, images)
        };
        assert_eq!(of(&[]), namer.child(root, &tokens));
        let names = [
            of(&[]),
            of(&[(0, 1, 0)]),
            of(&[(1, 1, 0)]),
            of(&[(0, 1, 4)]),
            of(&[(0, 2, 0)]),
            of(&[(0, 1 << 64, 0)]),
            of(&[(0, 1, 0), (2, 2, 0)]),
            of(&[(0, 2, 0), (2, 1, 0)]),
        ];
        for (i, a) in names.iter().enumerate() {
            assert!(!names[i + 1..].contains(a), "{i}");
        }
    }

    #[test]
    fn a_chain_names_the_full_blocks_only() {
        let namer = Namer::open();
        let first = namer.child(namer.root(3), &[1, 2]);
        assert_eq!(namer.chain(3, &[1, 2, 3, 4, 5], 2), [first, namer.child(first, &[3, 4])]);
        assert_eq!(namer.chain(3, &[1], 2), []);
        assert_eq!(BlockHash::from(first.number()), first);
    }

    #[test]
    fn long_blocks_are_hashed_whole() {
        let (namer, mut tokens) = (Namer::open(), (0..200).collect::<Vec<i32>>());
        let of = |tokens: &[i32]| namer.child(namer.root(0), tokens);
        let name = of(&tokens);
        for at in 0..tokens.len() {
            tokens[at] ^= 1 << 20;
            assert_ne!(of(&tokens), name, "token {at} is part of the name");
            tokens[at] ^= 1 << 20;
        }
        assert_eq!(of(&tokens), name);
    }

    #[test]
    fn every_byte_of_a_secret_counts() {
        let mut secret: Vec<u8> = (0..100).collect();
        let of = |secret: &[u8]| (Namer::new(secret).root(0), Namer::new(secret).id());
        let (root, id) = of(&secret);
        for at in 0..secret.len() {
            secret[at] ^= 1;
            let other = of(&secret);
            assert!(other.0 != root && other.1 != id, "byte {at} is part of the names");
            secret[at] ^= 1;
        }
        assert_eq!(format!("{:?}", Namer::new(&secret)), "Namer(secret)");
    }

    #[test]
    fn salts_are_apart_however_their_texts_are_cut() {
        let namer = Namer::open();
        let salts = [
            namer.salt(&[]),
            namer.salt(&[b""]),
            namer.salt(&[b"ab"]),
            namer.salt(&[b"a", b"b"]),
            namer.salt(&[b"ab", b""]),
            namer.salt(&[b"", b"ab"]),
            Namer::new(b"another").salt(&[b"ab"]),
        ];
        for (i, a) in salts.iter().enumerate() {
            assert!(*a != 0 && !salts[i + 1..].contains(a), "{i}");
        }
    }

    #[test]
    fn names_do_not_change_between_releases() {
        // Other tiers and peers store names, so changing the hash changes a format.
        let namer = Namer::new(b"a secret of a fleet of brains...");
        let name = namer.child(namer.root(7), &[1, -2, 3]);
        assert_eq!(name.0, 103_190_697_308_449_210_558_721_140_308_450_583_814);
    }
}
