//! Finds cuts before added tokens.

use std::collections::{HashMap, HashSet};

use aho_corasick::{AhoCorasick, Input};

use super::AddedToken;

/// Finds added tokens that are recognised wherever their text occurs, whatever surrounds it.
///
/// The library finds added tokens from left to right, and prefers the longest of those that start
/// first. Some tokens cannot overlap with any token: none contains another, and no suffix of one is
/// a prefix of another or of itself. Such a token is always found, and the tokens on each side of
/// it do not depend on the other side.
#[derive(Debug)]
pub(crate) struct TokenCuts {
    finder: AhoCorasick,
    longest: usize,
}

impl TokenCuts {
    /// Creates the finder, or returns `None` if every token may overlap with another. Tokens that
    /// are searched for in normalised text count only if the normaliser `is_identity`.
    pub(crate) fn new(added: &[AddedToken], is_identity: bool) -> Option<Self> {
        // If the normaliser changes text, the library searches for tokens of the normalised text
        // only in the text between the other tokens.
        let looked_for = added.iter().filter(|token| is_identity || !token.normalised);
        let contents: HashSet<&str> = looked_for.map(|token| token.content.as_str()).collect();
        let contents: Vec<&str> = contents.into_iter().collect();
        let clean = clean(&contents)?;
        let longest = clean.iter().map(|token| token.len()).max()?;
        Some(Self { finder: AhoCorasick::new(clean).ok()?, longest })
    }

    /// Returns the position of the first of these tokens that starts at or after `from` and before
    /// `to`.
    pub(crate) fn find(&self, text: &str, from: usize, to: usize) -> Option<usize> {
        if from >= to {
            return None;
        }
        let end = (to + self.longest - 1).min(text.len());
        self.finder.find(Input::new(text).range(from..end)).map(|found| found.start())
    }
}

/// Returns the tokens that cannot overlap with any token.
fn clean<'a>(contents: &[&'a str]) -> Option<Vec<&'a str>> {
    let beginnings: HashSet<&[u8]> = contents
        .iter()
        .flat_map(|token| (1..token.len()).map(|end| &token.as_bytes()[..end]))
        .collect();
    // For each token, its suffixes that are prefixes of a token.
    let mut shared: HashMap<&str, Vec<&[u8]>> = HashMap::new();
    for token in contents {
        let ends = (1..token.len()).map(|start| &token.as_bytes()[start..]);
        shared.insert(token, ends.filter(|end| beginnings.contains(end)).collect());
    }
    let all_shared: HashSet<&[u8]> = shared.values().flatten().copied().collect();

    let mut dirty = HashSet::new();
    let inside = AhoCorasick::new(contents).ok()?;
    for &token in contents {
        for found in inside.find_overlapping_iter(token) {
            let other = contents[found.pattern()];
            if other != token {
                dirty.extend([token, other]);
            }
        }
        let begins_shared =
            (1..token.len()).any(|end| all_shared.contains(&token.as_bytes()[..end]));
        if begins_shared || !shared[token].is_empty() {
            dirty.insert(token);
        }
    }
    Some(contents.iter().copied().filter(|token| !dirty.contains(token)).collect())
}
