//! A lower bound on the number of tokens of a text. It takes one pass over the bytes, and avoids
//! encoding a text that cannot fit.

#[cfg(test)]
mod tests;

use std::collections::HashSet;

use serde_json::Value;

use crate::scheme::Scheme;

/// The unit of weights: the weight of a byte that only tokens of one byte contain. The weights of a
/// token's bytes never add up to more than this.
const WHOLE: u64 = 1 << 32;
/// An upper bound on the factor by which canonical composition shortens text. The worst case is
/// U+1FBE, a diaeresis and an acute: 7 bytes, which become U+0390 with 2.
const COMPOSED: u64 = 4;
/// SentencePiece's character for a space. Its bytes in an input have no weight: the tokenizer
/// treats the character as a space, and the lengths of tokens are measured with the shorter space.
const METASPACE: &str = "\u{2581}";

/// How to compute the lower bound for a tokenizer: no text has fewer ids than [`Measure::fewest`].
#[derive(Debug)]
pub(crate) enum Measure {
    /// Every byte of the text is in a token. The weight of a byte is one over the length of the
    /// longest token that contains the byte. So the weights of a token's bytes add up to at most 1.
    Bytes {
        weights: Box<[u64; 256]>,
        /// True if text is composed first, which may shorten non-ASCII characters.
        composes: bool,
    },
    /// The given ASCII characters survive every normaliser and have tokens. So each of them is in a
    /// token of at most `longest` characters. Other characters may be dropped, or merge into one
    /// unknown token.
    Known { characters: [bool; 128], longest: usize },
    /// Spaces separate tokens. A word with an ASCII letter or digit has at least one token, however
    /// long the word is.
    Words,
    /// Nothing is known: the tokenizer may drop text.
    Unknown,
}

impl Measure {
    /// Creates the measure of a tokenizer from the content of its `tokenizer.json`. `pieces` has
    /// the bytes that each id adds to a text, except empty ones.
    pub(crate) fn of<'a>(
        file: &Value,
        scheme: &Scheme,
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Self {
        let Some(tokens) = Tokens::of(file) else { return Self::Unknown };
        let model = &file["model"];
        let kind = model["type"].as_str();
        let steps = steps(&file["normalizer"], "normalizers");
        let splits = steps_of_pre_tokenizer(file);
        let plain_bpe = kind.is_none_or(|kind| kind == "BPE")
            && ["continuing_subword_prefix", "end_of_word_suffix"]
                .iter()
                .all(|name| model[*name].as_str().is_none_or(str::is_empty));
        match scheme {
            Scheme::Bytes if plain_bpe && keeps_bytes(&splits) => match composes(&steps) {
                Some(composes) => {
                    let weights = tokens.without_dropped(weights(pieces, &tokens));
                    Self::Bytes { weights, composes }
                }
                None => Self::Unknown,
            },
            Scheme::Pieces(_)
                if plain_bpe
                    && model["byte_fallback"] == true
                    && tokens.has_byte_tokens()
                    && steps.iter().all(|step| only_marks_spaces(step))
                    && splits.iter().all(|step| step["type"] == "Metaspace") =>
            {
                let mut weights = weights(pieces, &tokens);
                METASPACE.bytes().for_each(|byte| weights[usize::from(byte)] = 0);
                Self::Bytes { weights, composes: false }
            }
            _ if kind == Some("Unigram") && steps.iter().all(|step| keeps_ascii(step)) => {
                let keeps = splits.iter().all(|step| {
                    matches!(step["type"].as_str(), Some("Metaspace" | "WhitespaceSplit"))
                });
                if keeps { tokens.known() } else { Self::Unknown }
            }
            _ if matches!(kind, Some("WordPiece" | "WordLevel"))
                && steps.iter().all(|step| keeps_ascii(step))
                && tokens.no_spaces =>
            {
                let at_spaces = |step: &&Value| {
                    matches!(
                        step["type"].as_str(),
                        Some("BertPreTokenizer" | "Whitespace" | "WhitespaceSplit")
                    )
                };
                if !splits.is_empty() && splits.iter().all(at_spaces) {
                    Self::Words
                } else {
                    Self::Unknown
                }
            }
            _ => Self::Unknown,
        }
    }

    /// Returns a lower bound on the number of ids of `text`, without special tokens around it.
    pub(crate) fn fewest(&self, text: &str) -> usize {
        let count = match self {
            Self::Bytes { weights, composes: false } => {
                let weigh = |&byte: &u8| weights[usize::from(byte)];
                text.as_bytes().iter().map(weigh).sum::<u64>().div_ceil(WHOLE)
            }
            Self::Bytes { weights, composes: true } => composed(weights, text).div_ceil(WHOLE),
            Self::Known { characters, longest } => {
                let known = |&&byte: &&u8| byte.is_ascii() && characters[usize::from(byte)];
                text.as_bytes().iter().filter(known).count().div_ceil(*longest) as u64
            }
            // Only characters that every normaliser treats as a space; some normalisers drop form
            // feeds.
            Self::Words => text
                .split([' ', '\t', '\n', '\r'])
                .filter(|word| word.bytes().any(|byte| byte.is_ascii_alphanumeric()))
                .count() as u64,
            Self::Unknown => 0,
        };
        usize::try_from(count).unwrap_or(usize::MAX)
    }
}

/// Returns the weight of a text that may be composed. An ASCII character before another ASCII
/// character stays unchanged. The rest shrinks at most by a factor of [`COMPOSED`].
fn composed(weights: &[u64; 256], text: &str) -> u64 {
    let bytes = text.as_bytes();
    // The smallest weight of a byte that occurs in UTF-8.
    let least = weights[..0xc0].iter().chain(&weights[0xc2..0xf5]).copied().min().unwrap_or(0);
    let mut sum = 0_u64;
    let mut others = 0_u64;
    for (at, &byte) in bytes.iter().enumerate() {
        let stays = byte.is_ascii() && bytes.get(at + 1).is_none_or(u8::is_ascii);
        if stays {
            sum += weights[usize::from(byte)];
        } else {
            others += 1;
        }
    }
    sum + others / COMPOSED * least
}

/// The properties of the vocabulary that the bound depends on.
struct Tokens {
    vocabulary: HashSet<String>,
    added: Vec<String>,
    /// True if an added token absorbs all spaces around it.
    strips: bool,
    /// True if no added token contains or absorbs a space.
    no_spaces: bool,
}

impl Tokens {
    fn of(file: &Value) -> Option<Self> {
        let vocabulary = match &file["model"]["vocab"] {
            Value::Object(tokens) => tokens.keys().cloned().collect(),
            Value::Array(pieces) => {
                pieces.iter().filter_map(|piece| piece[0].as_str().map(str::to_owned)).collect()
            }
            _ => return None,
        };
        let list = file["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        let added: Vec<String> =
            list.iter().filter_map(|token| token["content"].as_str().map(str::to_owned)).collect();
        let strips = list.iter().any(|token| token["lstrip"] == true || token["rstrip"] == true);
        let no_spaces = !strips && !added.iter().any(|token| token.contains(char::is_whitespace));
        Some(Self { vocabulary, added, strips, no_spaces })
    }

    /// Sets the weight of bytes without a token to 0, because the tokenizer drops them.
    fn without_dropped(&self, mut weights: Box<[u64; 256]>) -> Box<[u64; 256]> {
        let mut has = [false; 256];
        for symbol in (0..0x144_u32).filter_map(char::from_u32) {
            if let Some(byte) = crate::scheme::byte_of_char(symbol) {
                has[usize::from(byte)] =
                    self.vocabulary.contains(symbol.encode_utf8(&mut [0; 4]) as &str);
            }
        }
        weights.iter_mut().zip(has).for_each(|(weight, has)| *weight *= u64::from(has));
        weights
    }

    fn has_byte_tokens(&self) -> bool {
        (0..=255_u8).all(|byte| self.vocabulary.contains(&format!("<0x{byte:02X}>")))
    }

    fn known(&self) -> Measure {
        let has =
            |byte: u8| self.vocabulary.contains(char::from(byte).encode_utf8(&mut [0; 4]) as &str);
        // A normaliser may change the case.
        let both = |byte: u8| has(byte.to_ascii_lowercase()) && has(byte.to_ascii_uppercase());
        let known = |byte: usize| {
            u8::try_from(byte).is_ok_and(|byte| byte.is_ascii_alphanumeric() && both(byte))
        };
        let lengths = self.vocabulary.iter().chain(&self.added).map(|token| token.chars().count());
        Measure::Known {
            characters: std::array::from_fn(known),
            longest: lengths.max().unwrap_or(1).max(1),
        }
    }
}

/// Returns the weight of each byte: [`WHOLE`] divided by the length of the longest token that
/// contains the byte.
fn weights<'a>(pieces: impl Iterator<Item = &'a [u8]>, tokens: &Tokens) -> Box<[u64; 256]> {
    let mut longest = [1_u64; 256];
    let mut note = |piece: &[u8]| {
        for &byte in piece {
            let longest = &mut longest[usize::from(byte)];
            *longest = (*longest).max(piece.len() as u64);
        }
    };
    pieces.for_each(&mut note);
    tokens.added.iter().for_each(|token| note(token.as_bytes()));
    let mut weights = Box::new(longest.map(|longest| WHOLE / longest));
    if tokens.strips {
        // Every white space character is one of these bytes, or contains one of them.
        for c in ('\0'..=char::MAX).filter(|c| c.is_whitespace()) {
            c.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| weights[usize::from(byte)] = 0);
        }
    }
    weights
}

/// Returns the steps of a normaliser or pre-tokenizer, with sequences flattened.
fn steps<'a>(step: &'a Value, inner: &str) -> Vec<&'a Value> {
    match step[inner].as_array() {
        Some(list) => list.iter().flat_map(|step| steps(step, inner)).collect(),
        None if step.is_null() => Vec::new(),
        None => vec![step],
    }
}

fn steps_of_pre_tokenizer(file: &Value) -> Vec<&Value> {
    steps(&file["pre_tokenizer"], "pretokenizers")
}

/// True if a byte-level pre-tokenizer drops nothing before it converts text to bytes.
fn keeps_bytes(splits: &[&Value]) -> bool {
    let keeps = |step: &&Value| match step["type"].as_str() {
        Some("ByteLevel" | "Digits") => true,
        Some("Split" | "Punctuation") => step["behavior"] != "Removed",
        _ => false,
    };
    splits.iter().all(keeps) && splits.iter().any(|step| step["type"] == "ByteLevel")
}

/// True if text is composed; `None` if there are other normalisers.
fn composes(steps: &[&Value]) -> Option<bool> {
    let nfc = steps.iter().all(|step| step["type"] == "NFC");
    nfc.then_some(!steps.is_empty())
}

/// True if a normaliser only replaces spaces and adds one at the start.
fn only_marks_spaces(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("Prepend") => true,
        Some("Replace") => step["pattern"]["String"] == " " && step["content"] == METASPACE,
        _ => false,
    }
}

/// True if a normaliser keeps ASCII letters and digits, except for their case, and the spaces
/// between them.
fn keeps_ascii(step: &Value) -> bool {
    match step["type"].as_str() {
        Some(
            "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" | "Strip" | "Nmt"
            | "Precompiled" | "Prepend" | "BertNormalizer",
        ) => true,
        Some("Replace") => {
            let pattern = step["pattern"]["String"].as_str();
            let spaces = step["pattern"]["Regex"] == " {2,}" && step["content"] != "";
            spaces
                || pattern.is_some_and(|p| {
                    !p.contains(|c: char| c.is_ascii_alphanumeric() || c.is_whitespace())
                })
        }
        _ => false,
    }
}
