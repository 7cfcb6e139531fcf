//! Finds positions at which a text may be cut, so that its parts, encoded separately, have the same
//! ids as the whole.
//!
//! A cut is made only where the tokenizer's definition guarantees this. There are two kinds of
//! cuts:
//!
//! - before an added token ([`TokenCuts`]): an added token ends one section of the text and starts
//!   another, and each section is normalised, split and encoded separately;
//! - between two characters that the pre-tokenizer always separates ([`TextCuts`]), such as a
//!   letter and the space after it.
//!
//! In doubt there is no cut: a tokenizer may have cuts of both kinds, of one kind, or none.

mod follow;
mod text;
mod tokens;

use serde_json::Value;

use text::TextCuts;
use tokens::TokenCuts;

/// The number of bytes to search for one kind of cut before the other kind is tried.
const WINDOW: usize = 4096;

/// The positions at which a tokenizer's texts may be cut.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    tokens: Option<TokenCuts>,
    text: Option<TextCuts>,
}

impl Cuts {
    /// Determines the cuts of a tokenizer from the content of its `tokenizer.json`.
    pub(crate) fn of(file: &Value) -> Self {
        let dropout = &file["model"]["dropout"];
        if !(dropout.is_null() || dropout.as_f64() == Some(0.0)) {
            // A tokenizer with dropout is random: it encodes the same text differently each time.
            return Self::default();
        }
        let Some(added) = AddedToken::all(file) else { return Self::default() };
        let Some(normaliser) = Normaliser::of(&file["normalizer"]) else {
            return Self { tokens: TokenCuts::new(&added, false), text: None };
        };
        Self {
            tokens: TokenCuts::new(&added, normaliser == Normaliser::Identity),
            text: TextCuts::new(file, normaliser, &added),
        }
    }

    /// True if texts may be cut between words.
    pub(crate) fn between_words(&self) -> bool {
        self.text.is_some()
    }

    /// Finds the first position for a cut. From `token` on, the cut may be before an added token;
    /// from `anywhere` on (at least `token`), between characters too. Offsets are in bytes. A cut
    /// is never at the start or end of the text.
    pub(crate) fn next(&self, text: &str, token: usize, anywhere: usize) -> Option<usize> {
        let before_token = |from: usize, to: usize| self.tokens.as_ref()?.find(text, from, to);
        let between = |from: usize, to: usize| self.text.as_ref()?.find(text, from, to);
        let anywhere = if self.text.is_some() { anywhere.min(text.len()) } else { text.len() };
        if let Some(place) = before_token(token.max(1), anywhere) {
            return Some(place);
        }
        (anywhere.max(1)..text.len()).step_by(WINDOW).find_map(|from| {
            let to = (from + WINDOW).min(text.len());
            let place = before_token(from, to);
            between(from, place.unwrap_or(to)).or(place)
        })
    }

    /// True if no text can be cut.
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_none() && self.text.is_none()
    }
}

/// The normalisers whose effect on a cut text is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Normaliser {
    Identity,
    /// Unicode's canonical composition.
    Nfc,
}

impl Normaliser {
    fn of(normaliser: &Value) -> Option<Self> {
        match normaliser["type"].as_str() {
            None if normaliser.is_null() => Some(Self::Identity),
            Some("NFC") => Some(Self::Nfc),
            Some("Sequence") => {
                let steps = normaliser["normalizers"].as_array()?;
                let steps: Vec<Self> = steps.iter().map(Self::of).collect::<Option<_>>()?;
                Some(if steps.contains(&Self::Nfc) { Self::Nfc } else { Self::Identity })
            }
            _ => None,
        }
    }
}

/// An added token.
#[derive(Debug)]
pub(crate) struct AddedToken {
    content: String,
    /// True if the token is searched for in the normalised text rather than in the original text.
    normalised: bool,
}

impl AddedToken {
    /// Returns all added tokens, or `None` if one of them depends on the surrounding text or strips
    /// spaces from it.
    fn all(file: &Value) -> Option<Vec<Self>> {
        let Some(list) = file["added_tokens"].as_array() else { return Some(Vec::new()) };
        let plain = |token: &Value| {
            let looks_around =
                ["single_word", "lstrip", "rstrip"].iter().any(|flag| token[flag] != false);
            let content = token["content"].as_str().filter(|_| !looks_around)?;
            Some(Self { content: content.to_owned(), normalised: token["normalized"].as_bool()? })
        };
        let mut all: Vec<Self> = list.iter().map(plain).collect::<Option<_>>()?;
        all.retain(|token| !token.content.is_empty());
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(normaliser: Value, pre_tokenizer: Value, added: &[(&str, bool, bool)]) -> Value {
        let added: Vec<Value> = added
            .iter()
            .map(|&(content, normalised, lstrip)| {
                json!({
                    "content": content, "normalized": normalised, "lstrip": lstrip, "rstrip": false,
                    "single_word": false,
                })
            })
            .collect();
        json!({"normalizer": normaliser, "pre_tokenizer": pre_tokenizer, "added_tokens": added, "model": {}})
    }

    fn gpt2() -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})
    }

    /// Returns all positions at which `text` may be cut.
    fn places(file: &Value, text: &str) -> Vec<usize> {
        let cuts = Cuts::of(file);
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(place) = cuts.next(text, from, from) {
            found.push(place);
            from = place + 1;
        }
        found
    }

    #[test]
    fn words_are_cut_before_their_space_and_after_their_letters() {
        assert_eq!(
            places(&file(Value::Null, gpt2(), &[]), "ab c  d's, é x\n"),
            [2, 4, 7, 9, 10, 13, 15]
        );
    }

    #[test]
    fn a_lookahead_sees_the_same_on_both_sides() {
        // There is no cut after a space: `\s+(?!\S)` would match differently at the end of a text
        // than before a letter.
        assert_eq!(places(&file(Value::Null, gpt2(), &[]), "a  b"), [1]);
    }

    #[test]
    fn tokens_are_cut_before_and_never_inside() {
        let tokens = [("<|a b|>", false, false)];
        assert_eq!(places(&file(Value::Null, gpt2(), &tokens), "x<|a b|>"), [1]);
        assert_eq!(places(&file(json!({"type": "Prepend"}), gpt2(), &tokens), "x y<|a b|>z"), [3]);
    }

    #[test]
    fn tokens_that_overlap_are_no_place_for_a_cut() {
        let none = json!({"type": "Metaspace", "prepend_scheme": "first"});
        for pair in [["<a>", "><"], ["<a>", "a"], ["aa", "x"], ["<a>", "<a><b>"]] {
            let tokens = pair.map(|token| (token, false, false));
            let clean = places(&file(Value::Null, none.clone(), &tokens), "1<a><b>aa2");
            assert_eq!(clean, Vec::<usize>::new(), "{pair:?}");
        }
        let clean = [("<a>", false, false), ("<b>", false, false)];
        assert_eq!(places(&file(Value::Null, none, &clean), "1<a><b>2"), [1, 4]);
    }

    #[test]
    fn what_is_not_known_is_not_cut() {
        let unknown = [
            file(json!({"type": "NFKC"}), gpt2(), &[]),
            file(json!({"type": "Sequence", "normalizers": [{"type": "Strip"}]}), gpt2(), &[]),
            file(Value::Null, json!({"type": "ByteLevel", "add_prefix_space": true}), &[]),
            file(Value::Null, Value::Null, &[]),
            file(Value::Null, gpt2(), &[("<m>", false, true)]),
        ];
        for file in unknown {
            assert_eq!(places(&file, "a b c <m> d"), Vec::<usize>::new(), "{file}");
        }
        let mut random = file(Value::Null, gpt2(), &[("<m>", false, false)]);
        random["model"]["dropout"] = json!(0.1);
        assert_eq!(places(&random, "a b<m>"), Vec::<usize>::new());
    }

    #[test]
    fn composition_reaches_over_no_cut() {
        let nfc = file(json!({"type": "NFC"}), gpt2(), &[]);
        assert_eq!(places(&nfc, "e\u{301} x"), [3]);
        assert_eq!(places(&nfc, "字，字"), [3, 6]);
        assert_eq!(places(&nfc, "字,\u{327}"), [3]);
    }
}
