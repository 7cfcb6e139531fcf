//! Finds cuts between characters.

use std::collections::HashSet;

use serde_json::Value;

use super::follow::{Follow, contains, is_space};
use super::{AddedToken, Normaliser};

/// The pattern of the `ByteLevel` pre-tokenizer: that of GPT-2.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Characters whose properties are the same in every Unicode version. Canonical composition neither
/// changes them nor joins them with preceding characters.
const SETTLED: [(char, char); 9] = [
    ('\0', '\u{7f}'),
    ('\u{c0}', '\u{24f}'),
    ('\u{391}', '\u{3a1}'),
    ('\u{3a3}', '\u{3c9}'),
    ('\u{410}', '\u{44f}'),
    ('\u{3001}', '\u{3002}'),
    ('\u{4e00}', '\u{9fa5}'),
    ('\u{ac00}', '\u{d7a3}'),
    ('\u{ff01}', '\u{ff5e}'),
];

/// Finds the pairs of characters between which a text may be cut.
///
/// A cut between `a` and `b` requires all of these, for a pre-tokenizer that is a sequence of
/// patterns:
///
/// - no added token contains `a` followed by `b`, so no added token extends over the cut;
/// - no pattern matches `b` directly after `a`. So matches end at the cut, and are the same whether
///   the text continues there or ends. After the cut, matching works as at the start of a text,
///   because the patterns have no lookbehind. Their only lookahead, for "no letter comes next",
///   applies after a space, and `a` is not a space;
/// - a match of one of the patterns starts at `b`, so there is a boundary, and the model encodes
///   each side separately;
/// - composition never joins `b` with the characters before it.
#[derive(Debug)]
pub(crate) struct TextCuts {
    stages: Vec<Stage>,
    /// The pairs of adjacent characters within added tokens.
    inside_tokens: HashSet<(char, char)>,
    /// The second characters of these pairs.
    inside_seconds: HashSet<char>,
    /// The results for pairs of ASCII characters, one bit mask per first character.
    ascii: [u128; 128],
}

#[derive(Debug)]
enum Stage {
    /// Splits off the matches of the pattern.
    Pattern(Follow),
    /// Splits off every digit separately.
    EachDigit,
    /// Splits off digits, with adjacent digits together.
    Digits,
}

impl TextCuts {
    /// Determines the cuts of a tokenizer; `None` if a part of it may depend on text across a cut.
    pub(crate) fn new(file: &Value, normaliser: Normaliser, added: &[AddedToken]) -> Option<Self> {
        if normaliser == Normaliser::Nfc {
            // The library searches the composed text for these tokens.
            let composed = added.iter().filter(|token| token.normalised);
            if !composed.flat_map(|token| token.content.chars()).all(is_settled) {
                return None;
            }
        }
        let mut stages = Vec::new();
        stages_of(&file["pre_tokenizer"], &mut stages, &mut false)?;
        let neighbours = |token: &AddedToken| -> Vec<(char, char)> {
            token.content.chars().zip(token.content.chars().skip(1)).collect()
        };
        let inside_tokens: HashSet<(char, char)> = added.iter().flat_map(neighbours).collect();
        let inside_seconds = inside_tokens.iter().map(|&(_, second)| second).collect();
        let mut cuts = Self { stages, inside_tokens, inside_seconds, ascii: [0; 128] };
        for left in 0..128_u8 {
            for right in 0..128_u8 {
                if cuts.decide(char::from(left), char::from(right)) {
                    cuts.ascii[usize::from(left)] |= 1 << right;
                }
            }
        }
        Some(cuts)
    }

    /// Finds the first cut at or after `from` and before `to`.
    pub(crate) fn find(&self, text: &str, from: usize, to: usize) -> Option<usize> {
        let from = (from.max(1)..text.len()).find(|&at| text.is_char_boundary(at))?;
        let mut left = text[..from].chars().next_back()?;
        for (offset, right) in text[from..].char_indices() {
            if from + offset >= to {
                return None;
            }
            if self.between(left, right) {
                return Some(from + offset);
            }
            left = right;
        }
        None
    }

    fn between(&self, left: char, right: char) -> bool {
        if left.is_ascii() && right.is_ascii() {
            self.ascii[left as usize] >> (right as u32) & 1 == 1
        } else {
            self.decide(left, right)
        }
    }

    fn decide(&self, left: char, right: char) -> bool {
        if !is_settled(right) || left.is_whitespace() {
            return false;
        }
        // `left` is not a space, not even after composition.
        let settled = is_settled(left);
        let inside_token = if settled {
            self.inside_tokens.contains(&(left, right))
        } else {
            self.inside_seconds.contains(&right)
        };
        if inside_token {
            return false;
        }
        let may_be_in =
            |set: &[(char, char)]| if settled { contains(set, left) } else { !is_space(set) };
        let mut bounded = false;
        for stage in &self.stages {
            match stage {
                Stage::Pattern(follow) => {
                    if follow.joins(may_be_in, right) {
                        return false;
                    }
                    bounded |= follow.starts_at(right);
                }
                Stage::EachDigit => bounded |= right.is_numeric(),
                Stage::Digits => {
                    if right.is_numeric() && (!settled || left.is_numeric()) {
                        return false;
                    }
                    bounded |= right.is_numeric();
                }
            }
        }
        bounded
    }
}

/// Collects the stages of a pre-tokenizer, in order. `in_bytes` is set once the text has been
/// converted to byte symbols.
fn stages_of(pre_tokenizer: &Value, stages: &mut Vec<Stage>, in_bytes: &mut bool) -> Option<()> {
    if *in_bytes {
        return None;
    }
    match pre_tokenizer["type"].as_str()? {
        "Sequence" => {
            let steps = pre_tokenizer["pretokenizers"].as_array()?;
            steps.iter().try_for_each(|step| stages_of(step, stages, in_bytes))
        }
        "Split" => {
            let invert = pre_tokenizer["invert"].as_bool()?;
            // With either behaviour, each match becomes a separate piece.
            match (pre_tokenizer["behavior"].as_str()?, invert) {
                ("Isolated", false) | ("Removed", true) => {}
                _ => return None,
            }
            stages.push(Stage::Pattern(Follow::new(pre_tokenizer["pattern"]["Regex"].as_str()?)?));
            Some(())
        }
        "ByteLevel" => {
            *in_bytes = true;
            if pre_tokenizer["add_prefix_space"].as_bool()? {
                return None;
            }
            if pre_tokenizer["use_regex"].as_bool().unwrap_or(true) {
                stages.push(Stage::Pattern(Follow::new(GPT2)?));
            }
            Some(())
        }
        "Digits" => {
            let each = pre_tokenizer["individual_digits"].as_bool()?;
            stages.push(if each { Stage::EachDigit } else { Stage::Digits });
            Some(())
        }
        _ => None,
    }
}

fn is_settled(character: char) -> bool {
    contains(&SETTLED, character)
}
