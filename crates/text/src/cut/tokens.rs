//! Cuts before added tokens.

use std::collections::{HashMap, HashSet};

use aho_corasick::{AhoCorasick, Input};

use super::AddedToken;

/// Finds added tokens whose every occurrence in a text is that token, in any surroundings.
///
/// The library finds added tokens from left to right, the longest of those that start first. Some
/// tokens share no text with any other one: neither contains the other, and no end of one is a
/// beginning of the other, itself included. Such a token is found at any place, and the tokens on
/// either side of it do not depend on the other side.
#[derive(Debug)]
pub(crate) struct TokenCuts {
    finder: AhoCorasick,
    longest: usize,
}

impl TokenCuts {
    /// `None` if there is no such token. Tokens that are looked for in the normalised text count
    /// only where that `is_identity`.
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

    /// The place of the first token that starts from `from` on and before `to`.
    pub(crate) fn find(&self, text: &str, from: usize, to: usize) -> Option<usize> {
        if from >= to {
            return None;
        }
        let end = (to + self.longest - 1).min(text.len());
        self.finder.find(Input::new(text).range(from..end)).map(|found| found.start())
    }
}

/// The tokens that share no text with another one.
fn clean<'a>(contents: &[&'a str]) -> Option<Vec<&'a str>> {
    let beginnings: HashSet<&[u8]> = contents
        .iter()
        .flat_map(|token| (1..token.len()).map(|end| &token.as_bytes()[..end]))
        .collect();
    // Ends of a token that are beginnings of one, by the token they end.
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
