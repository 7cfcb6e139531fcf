//! Encodes text in which some ranges are ordinary text, even if they spell special tokens. The
//! encoding can be stopped.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::normalizer::Range as Part;
use tokenizers::{
    AddedToken, Model as _, NormalizedString, Normalizer as _, OffsetType, PreTokenizedString,
    PreTokenizer as _, Token,
};

use crate::error::TextError;

/// The longest word in bytes. The time and memory for encoding a word grow with its length, and
/// even a long run of white space is one word.
pub(crate) const LONGEST_WORD: usize = 1 << 20;
/// The longest word in bytes after the pre-tokenizer, which may replace a byte by a two-byte
/// character.
const LONGEST_WRITTEN: usize = 2 * LONGEST_WORD;

/// Finds the added tokens of a text as the `tokenizers` library does, except in ranges that are
/// ordinary text.
///
/// The library can only switch off all special tokens or none. This type uses the same algorithm,
/// with a list of excluded ranges. It searches for tokens first in the original text, then in the
/// normalised rest. The search goes from left to right, and prefers the longest of the tokens that
/// start first. The text of a rejected token is consumed too.
#[derive(Debug)]
pub(crate) struct Plain {
    raw: Option<Matcher>,
    normalised: Option<Matcher>,
    /// Finds the texts of special tokens, wherever they occur.
    special: Option<AhoCorasick>,
}

struct Matcher {
    finder: AhoCorasick,
    tokens: Vec<(u32, AddedToken)>,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// The positions of added tokens, as the library finds them.
type Found = Vec<(Option<u32>, Range<usize>)>;

impl Plain {
    pub(crate) fn new(inner: &tokenizers::Tokenizer) -> Result<Self, TextError> {
        let added = inner.get_added_vocabulary();
        let load = |error: &dyn fmt::Display| TextError::Load(format!("added tokens: {error}"));
        let mut halves = [Vec::new(), Vec::new()];
        let mut special = Vec::new();
        for (&id, token) in added.get_added_tokens_decoder() {
            if token.content.is_empty() {
                continue;
            }
            if added.is_special_token(&token.content) {
                special.push(token.content.clone());
            }
            let pattern = match token.normalized {
                true => added.simple_id_to_token(id).unwrap_or_else(|| token.content.clone()),
                false => token.content.clone(),
            };
            if !pattern.is_empty() {
                halves[usize::from(token.normalized)].push((pattern, id, token.clone()));
            }
        }
        let matcher = |half: Vec<(String, u32, AddedToken)>| {
            if half.is_empty() {
                return Ok(None);
            }
            let patterns = half.iter().map(|(pattern, ..)| pattern);
            let finder = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(patterns)
                .map_err(|error| load(&error))?;
            let tokens = half.into_iter().map(|(_, id, token)| (id, token)).collect();
            Ok(Some(Matcher { finder, tokens }))
        };
        let [raw, normalised] = halves;
        let special = (!special.is_empty())
            .then(|| AhoCorasick::new(&special).map_err(|error| load(&error)))
            .transpose()?;
        Ok(Self { raw: matcher(raw)?, normalised: matcher(normalised)?, special })
    }

    /// Returns the ranges of `text` that spell a special token and touch one of `client` (sorted
    /// ranges that do not overlap). The result is sorted by start, with overlapping ranges joined.
    pub(crate) fn spelled(&self, text: &str, client: &[Range<usize>]) -> Vec<Range<usize>> {
        let Some(special) = self.special.as_ref().filter(|_| !client.is_empty()) else {
            return Vec::new();
        };
        let mut spelled: Vec<Range<usize>> = special
            .find_overlapping_iter(text)
            .map(|found| found.range())
            .filter(|found| overlap(client, found))
            .collect();
        spelled.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in spelled {
            match joined.last_mut() {
                Some(last) if range.start < last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        joined
    }

    /// Returns the ids of `text`, without the post-processor's ids. Special tokens that touch one
    /// of the ranges in `plain` (sorted, not overlapping) are encoded as ordinary text.
    ///
    /// `go_on` is called before each word, with the number of ids so far.
    ///
    /// # Errors
    /// The library's errors, [`TextError::Closed`] if `go_on` returns false, and
    /// [`TextError::Undivided`] for a word that is too long.
    pub(crate) fn encode(
        &self,
        inner: &tokenizers::Tokenizer,
        text: &str,
        plain: &[Range<usize>],
        go_on: &dyn Fn(usize) -> bool,
    ) -> Result<Vec<i32>, TextError> {
        let failed = |error: tokenizers::Error| TextError::Encode(error.to_string());
        let special =
            |token: &AddedToken| inner.get_added_vocabulary().is_special_token(&token.content);
        let mut words = PreTokenizedString::from(text);
        words
            .split(|_, part| {
                let taken = |token: &AddedToken, range: &Range<usize>| {
                    !(special(token) && overlap(plain, range))
                };
                Ok(split(part, self.raw.as_ref(), &taken))
            })
            .map_err(failed)?;
        words
            .split(|_, mut part| {
                if let Some(normalizer) = inner.get_normalizer() {
                    normalizer.normalize(&mut part)?;
                }
                let shift = part.offsets_original().0;
                let source = part.clone();
                let taken = |token: &AddedToken, range: &Range<usize>| {
                    let original = source.convert_offsets(Part::Normalized(range.clone()));
                    let original = original.unwrap_or(0..usize::MAX - shift);
                    !(special(token)
                        && overlap(plain, &(shift + original.start..shift + original.end)))
                };
                Ok(split(part, self.normalised.as_ref(), &taken))
            })
            .map_err(failed)?;
        if !go_on(0) {
            return Err(TextError::Closed);
        }
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words).map_err(failed)?;
        }
        let count = Cell::new(0);
        let stopped = Cell::new(false);
        let longest = Cell::new(0);
        let tokenized = words.tokenize(|word| {
            if word.get().len() > LONGEST_WRITTEN {
                longest.set(word.get().len());
                return Err("too long".into());
            }
            if !go_on(count.get()) {
                stopped.set(true);
                return Err("stopped".into());
            }
            let tokens = inner.get_model().tokenize(word.get())?;
            count.set(count.get() + tokens.len());
            Ok(tokens)
        });
        if stopped.get() {
            return Err(TextError::Closed);
        }
        if longest.get() > 0 {
            return Err(TextError::Undivided { bytes: longest.get(), limit: LONGEST_WRITTEN });
        }
        tokenized.map_err(failed)?;
        let encoding = words.into_encoding(None, 0, OffsetType::None).map_err(failed)?;
        Ok(encoding.get_ids().iter().map(|id| id.cast_signed()).collect())
    }
}

/// True if `range` shares a byte with one of `ranges`, which are sorted and do not overlap.
pub(crate) fn overlap(ranges: &[Range<usize>], range: &Range<usize>) -> bool {
    let after = ranges.partition_point(|other| other.end <= range.start);
    ranges.get(after).is_some_and(|other| other.start < range.end)
}

fn split(
    part: NormalizedString,
    matcher: Option<&Matcher>,
    taken: &dyn Fn(&AddedToken, &Range<usize>) -> bool,
) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
    let found = match matcher {
        Some(matcher) if !part.get().is_empty() => matcher.find(part.get(), taken),
        _ => return vec![(part, None)],
    };
    let piece = |(id, range): (Option<u32>, Range<usize>)| {
        let slice = part.slice(Part::Normalized(range))?;
        let token = id.map(|id| {
            let text = slice.get().to_owned();
            let end = text.len();
            vec![Token::new(id, text, (0, end))]
        });
        Some((slice, token))
    };
    found.into_iter().filter_map(piece).collect()
}

impl Matcher {
    /// Finds the tokens of `text` for which `taken` returns true, with the text between them.
    fn find(&self, text: &str, taken: &dyn Fn(&AddedToken, &Range<usize>) -> bool) -> Found {
        let mut found = Vec::new();
        let mut from = 0;
        for place in self.finder.find_iter(text) {
            let (id, token) = &self.tokens[place.pattern()];
            let Range { mut start, mut end } = place.range();
            if !taken(token, &place.range()) {
                continue;
            }
            if token.single_word {
                let is_word = |c: Option<char>| c.is_some_and(regex_syntax::is_word_character);
                if is_word(text[..start].chars().next_back()) || is_word(text[end..].chars().next())
                {
                    continue;
                }
            }
            if token.lstrip {
                start = text[..start].trim_end().len().max(from);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if from < start {
                found.push((None, from..start));
            }
            found.push((Some(*id), start..end));
            from = end;
        }
        if from < text.len() {
            found.push((None, from..text.len()));
        }
        found
    }
}
