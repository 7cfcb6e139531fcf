//! Cuts before added tokens.

use std::collections::{HashMap, HashSet};

use aho_corasick::{AhoCorasick, Input};

use super::AddedToken;

/// Finds added tokens that are always recognised where their text occurs, whatever surrounds it.
///
/// The library finds added tokens from left to right, the longest of those that start first. Some
/// tokens overlap with no token: none contains another, and no suffix of one is a prefix of another
/// or of itself. Such a token is found everywhere, and the tokens on each side of it do not depend
/// on the other side.
#[derive(Debug)]
pub(crate) struct TokenCuts {
    finder: AhoCorasick,
    longest: usize,
}

impl TokenCuts {
    /// `None`: there is no such token. Tokens that are searched in normalised text count only if
    /// the normaliser `is_identity`.
    pub(crate) fn new(added: &[AddedToken], is_identity: bool) -> Option<Self> {
        // If the normaliser changes text, tokens of the normalised text are searched for in the
        // rest.
        let looked_for = added.iter().filter(|token| is_identity || !token.normalised);
        let contents: HashSet<&str> = looked_for.map(|token| token.content.as_str()).collect();
        let contents: Vec<&str> = contents.into_iter().collect();
        let clean = clean(&contents)?;
        let longest = clean.iter().map(|token| token.len()).max()?;
        Some(Self { finder: AhoCorasick::new(clean).ok()?, longest })
    }

    /// The position of the first such token that starts at or after `from` and before `to`.
    pub(crate) fn find(&self, text: &str, from: usize, to: usize) -> Option<usize> {
        if from >= to {
            return None;
        }
        let end = (to + self.longest - 1).min(text.len());
        self.finder.find(Input::new(text).range(from..end)).map(|found| found.start())
    }
}

/// The tokens that overlap with no other token.
fn clean<'a>(contents: &[&'a str]) -> Option<Vec<&'a str>> {
    let beginnings: HashSet<&[u8]> = contents
        .iter()
        .flat_map(|token| (1..token.len()).map(|end| &token.as_bytes()[..end]))
        .collect();
    // Suffixes of tokens that are prefixes of a token, by the token that they end.
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
