//! Estimates the share of a prompt that each backend has in its prefix cache.
//!
//! The router gets texts, while backends cache blocks of tokens. The head of a backend's response
//! lists the block names of the prompt, and from then on the router maps the texts of that prompt
//! to these blocks. A backend reports each block that it stores or drops. A text without known
//! blocks counts as cached by the backend to which it was last sent. See ADR 13.

use std::collections::HashSet;

use lru::LruCache;
use rustc_hash::FxBuildHasher;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The number of bytes in a text block, about two pages of 16 tokens.
const TEXT_BLOCK: usize = 128;
/// The largest number of known text blocks. The least recently used are forgotten.
const MAX_TEXTS: usize = 1 << 20;
/// The largest number of namers whose block names are stored for one text. Brains with the same
/// secret give the same names, and count as one namer.
const MAX_NAMERS: usize = 8;

/// Names of a prompt's prefixes: of its first 128 bytes, its first 256 bytes, and so on. The last
/// prefix is the whole prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Texts(Vec<u64>);

impl Texts {
    /// Names the prefixes of `prompt`. Prompts with different salts have no common names.
    pub(crate) fn new(salt: u64, prompt: &[u8]) -> Self {
        let names = prompt.chunks(TEXT_BLOCK).scan(salt, |parent, block| {
            *parent = xxh3_64_with_seed(block, *parent);
            Some(*parent)
        });
        Self(names.collect())
    }
}

/// What is known about a text.
#[derive(Debug, Clone)]
struct Known {
    /// The name of the text's last full block, from each namer whose backend has reported it. The
    /// newest entry is last.
    blocks: Vec<(u64, u64)>,
    /// The backend to which the text was last sent.
    sent_to: u32,
}

impl Known {
    /// Returns the name that namer `names` gives to the text's last block.
    fn block(&self, names: u64) -> Option<u64> {
        self.blocks.iter().find(|(namer, _)| *namer == names).map(|&(_, block)| block)
    }

    fn learn(&mut self, names: u64, block: u64) {
        if let Some(known) = self.blocks.iter_mut().find(|(namer, _)| *namer == names) {
            known.1 = block;
            return;
        }
        if self.blocks.len() == MAX_NAMERS {
            self.blocks.remove(0);
        }
        self.blocks.push((names, block));
    }
}

/// A prefix of a prompt, with what is known about it.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// The prefix's share of the prompt, more than 0 and at most 1.
    share: f32,
    known: Known,
}

/// All known texts.
#[derive(Debug)]
pub(crate) struct TextIndex {
    known: LruCache<u64, Known, FxBuildHasher>,
    limit: usize,
}

impl Default for TextIndex {
    fn default() -> Self {
        // A bounded cache would allocate all its memory at once.
        Self { known: LruCache::unbounded_with_hasher(FxBuildHasher), limit: MAX_TEXTS }
    }
}

impl TextIndex {
    /// Returns the known prefixes of a prompt, longest first.
    pub(crate) fn parts(&mut self, texts: &Texts) -> Vec<Part> {
        let count = texts.0.len();
        let mut parts: Vec<Part> = Vec::new();
        for (index, text) in texts.0.iter().enumerate().rev() {
            let Some(known) = self.known.get(text) else { continue };
            let same = |part: &Part| {
                part.known.blocks == known.blocks && part.known.sent_to == known.sent_to
            };
            if !parts.last().is_some_and(same) {
                let known = known.clone();
                parts.push(Part { share: (index + 1) as f32 / count as f32, known });
            }
        }
        parts
    }

    /// Records that a prompt was sent to a backend.
    pub(crate) fn sent(&mut self, texts: &Texts, backend: u32) {
        for &text in &texts.0 {
            let none = || Known { blocks: Vec::new(), sent_to: backend };
            self.known.get_or_insert_mut(text, none).sent_to = backend;
        }
        while self.known.len() > self.limit {
            self.known.pop_lru();
        }
    }

    /// Records the names `blocks` that namer `names` gives to a prompt's blocks. The blocks are
    /// assumed to be of equal size, and the last one to end at the prompt's end.
    pub(crate) fn learn(&mut self, texts: &Texts, names: u64, blocks: &[u64]) {
        let count = texts.0.len();
        for (index, text) in texts.0.iter().enumerate() {
            let within = (index + 1) * blocks.len() / count;
            if let Some(known) = self.known.get_mut(text)
                && within > 0
            {
                known.learn(names, blocks[within - 1]);
            }
        }
    }
}

/// The bits of a block event that state which tiers hold the block.
const TIERS: u64 = 3;

/// The largest number of blocks that are stored for a backend. Further blocks do not count as
/// cached.
pub(crate) const MAX_BLOCKS: usize = 1 << 22;

/// The blocks that a backend has in its prefix cache. The backend chooses their names, so the hash
/// table uses a secret key.
#[derive(Debug)]
pub(crate) struct Stored {
    names: HashSet<u64>,
    limit: usize,
}

impl Default for Stored {
    fn default() -> Self {
        Self { names: HashSet::new(), limit: MAX_BLOCKS }
    }
}

impl Stored {
    /// Applies a batch of events. An event is a block name whose two lowest bits state which tiers
    /// hold the block; both are 0 for a dropped block. Blocks of either tier count as cached, since
    /// restoring is faster than computing.
    pub(crate) fn apply(&mut self, events: impl Iterator<Item = u64>) {
        for event in events {
            if event & TIERS == 0 {
                self.names.remove(&event);
            } else if self.names.len() < self.limit {
                self.names.insert(event & !TIERS);
            }
        }
    }

    /// Removes all blocks.
    pub(crate) fn clear(&mut self) {
        self.names = HashSet::new();
    }

    /// The number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns the share of a prompt that `backend` has cached. `self` has the backend's blocks;
    /// `names` is the id of the backend's namer.
    pub(crate) fn share(&self, parts: &[Part], backend: u32, names: u64) -> f32 {
        let has = |part: &&Part| match part.known.block(names) {
            Some(block) => self.names.contains(&(block & !TIERS)),
            None => part.known.sent_to == backend,
        };
        parts.iter().find(has).map_or(0.0, |part| part.share)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stored(names: &[u64]) -> Stored {
        let mut stored = Stored::default();
        stored.apply(names.iter().zip([1, 2, 3].iter().cycle()).map(|(name, tiers)| name | tiers));
        stored
    }

    #[test]
    fn a_text_is_where_its_blocks_are() {
        let mut index = TextIndex::default();
        let texts = Texts::new(0, &[b'x'; 4 * TEXT_BLOCK]);
        assert!(index.parts(&texts).is_empty());
        index.sent(&texts, 7);
        let parts = index.parts(&texts);
        assert_eq!((stored(&[]).share(&parts, 7, 1), stored(&[]).share(&parts, 8, 1)), (1.0, 0.0));
        index.learn(&texts, 1, &[20, 40, 60, 80]);
        let parts = index.parts(&texts);
        // From here on, only reported blocks count, because the blocks of the text are known.
        assert_eq!(stored(&[]).share(&parts, 7, 1), 0.0);
        assert_eq!(stored(&[20, 40]).share(&parts, 8, 1), 0.5);
        assert_eq!(stored(&[20, 40, 60, 80]).share(&parts, 8, 1), 1.0);
        let longer = [&[b'x'; 4 * TEXT_BLOCK][..], &[b'y'; 4 * TEXT_BLOCK]].concat();
        let longer = Texts::new(0, &longer);
        assert_eq!(stored(&[80]).share(&index.parts(&longer), 8, 1), 0.5);
        assert!(index.parts(&Texts::new(0, &[b'z'; 2 * TEXT_BLOCK])).is_empty());
    }

    #[test]
    fn what_has_another_salt_is_another_text() {
        let mut index = TextIndex::default();
        let texts = |salt| Texts::new(salt, &[b'x'; 4 * TEXT_BLOCK]);
        index.sent(&texts(1), 7);
        index.learn(&texts(1), 0, &[20, 40, 60, 80]);
        assert!(index.parts(&texts(2)).is_empty() && !index.parts(&texts(1)).is_empty());
    }

    #[test]
    fn brains_with_names_of_their_own_are_each_understood() {
        let mut index = TextIndex::default();
        let texts = Texts::new(0, &[b'x'; 2 * TEXT_BLOCK]);
        index.sent(&texts, 1);
        index.learn(&texts, 100, &[20, 40]);
        index.sent(&texts, 2);
        index.learn(&texts, 200, &[60, 80]);
        let parts = index.parts(&texts);
        assert_eq!(stored(&[20, 40]).share(&parts, 1, 100), 1.0);
        assert_eq!(stored(&[60]).share(&parts, 2, 200), 0.5);
        assert_eq!(
            stored(&[20, 40]).share(&parts, 2, 200),
            0.0,
            "names of another namespace do not match"
        );
        for names in 0..MAX_NAMERS as u64 {
            index.learn(&texts, names, &[20, 40]);
        }
        assert_eq!(index.parts(&texts)[0].known.blocks.len(), MAX_NAMERS);
    }

    #[test]
    fn the_oldest_texts_are_forgotten() {
        let mut index = TextIndex { limit: 3, ..TextIndex::default() };
        let texts = |byte| Texts::new(0, &[byte; 2 * TEXT_BLOCK]);
        index.sent(&texts(1), 0);
        index.sent(&texts(2), 0);
        assert_eq!(index.known.len(), 3);
        assert_eq!(index.parts(&texts(2))[0].share, 1.0);
    }

    #[test]
    fn blocks_beyond_the_limit_are_not_known() {
        let mut stored = Stored { limit: 3, ..Stored::default() };
        stored.apply((1u64..10).map(|name| name << 2 | 1));
        assert_eq!(stored.len(), 3);
        stored.apply([1 << 2, 9 << 2 | 1].into_iter());
        assert!(stored.len() == 3 && stored.names.contains(&(9 << 2)));
    }

    proptest! {
        #[test]
        fn events_leave_what_was_stored_and_not_dropped(events in prop::collection::vec(0u64..24, 0..60)) {
            let mut stored = Stored::default();
            stored.apply(events.iter().copied());
            for name in 0..6 {
                let last = events.iter().rfind(|&&event| event >> 2 == name);
                prop_assert_eq!(stored.names.contains(&(name << 2)), last.is_some_and(|event| event & TIERS != 0));
            }
        }

        /// Prompts with a common prefix have the same names for it.
        #[test]
        fn texts_share_their_beginnings(length in 1usize..2000, more in 0usize..500) {
            let long: Vec<u8> = (0..length + more).map(|at| (at % 251) as u8).collect();
            let (short, long) = (Texts::new(3, &long[..length]), Texts::new(3, &long));
            let whole = length / TEXT_BLOCK;
            prop_assert_eq!(&short.0[..whole], &long.0[..whole]);
        }
    }
}
