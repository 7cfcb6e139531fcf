//! Texts of a requested number of tokens.

use anyhow::{Context as _, ensure};
use forebay_text::Tokenizer;
use rand::RngExt as _;
use rand::rngs::ChaCha12Rng;
use rayon::prelude::*;

use crate::Prompt;

/// The smallest number of words with which texts are made of words. With fewer, prompts would be
/// too repetitive, so tokens are used.
const FEWEST_WORDS: usize = 8;
/// The number of rounds of cutting and encoding before a text of nearly the requested length is
/// accepted.
const ROUNDS: usize = 8;

/// A text and its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Text {
    /// The text.
    pub(crate) text: String,
    /// The token ids of the text, without special tokens.
    pub(crate) ids: Vec<u32>,
}

impl Text {
    /// The number of tokens.
    pub(crate) fn tokens(&self) -> u32 {
        // No text has 2^32 tokens, because it would not fit in memory.
        self.ids.len() as u32
    }

    /// Returns the prompt, as text or as token ids.
    pub(crate) fn prompt(self, as_ids: bool) -> Prompt {
        if as_ids { Prompt::Tokens(self.ids) } else { Prompt::Text(self.text) }
    }
}

/// A tokenizer, and words that are always one token each, wherever they occur in a text.
///
/// A word consists of lower-case ASCII letters, and is one token both at the start of a text and
/// after a space. No token of the vocabulary contains a space after a letter, so no token spans two
/// words. So the tokens of a text are the tokens of its words, and words can be joined without
/// encoding. A tokenizer without such words (characters, a tiny vocabulary) gets texts of arbitrary
/// tokens. These are encoded again and cut until the length is right.
#[derive(Debug)]
pub(crate) struct Words<'t> {
    tokenizer: &'t Tokenizer,
    words: Vec<Word>,
    /// All tokens that are whole characters; used if there are no words.
    tokens: Vec<u32>,
}

#[derive(Debug)]
struct Word {
    /// The word with a leading space.
    text: String,
    /// The token of the word at the start of a text.
    first: u32,
    /// The token of the word after a space.
    id: u32,
}

/// Random words (or tokens), as indices that only [`Words`] can interpret.
pub(crate) type Drawn = Vec<u32>;

impl<'t> Words<'t> {
    /// Finds the words in the vocabulary.
    ///
    /// # Errors
    /// If no token of the vocabulary is text.
    pub(crate) fn new(tokenizer: &'t Tokenizer) -> anyhow::Result<Self> {
        let vocabulary: Vec<(u32, String)> = (0..tokenizer.vocab_size() as u32)
            .filter(|&id| !tokenizer.is_special(id.cast_signed()))
            .map(|id| (id, tokenizer.token_text(id.cast_signed())))
            .filter(|(_, text)| !text.is_empty() && !text.contains('\u{fffd}'))
            .collect();
        let words = Self::find(tokenizer, &vocabulary);
        let tokens = if words.is_empty() {
            vocabulary.into_iter().map(|(id, _)| id).collect()
        } else {
            Vec::new()
        };
        ensure!(!words.is_empty() || !tokens.is_empty(), "the tokenizer has no token that is text");
        Ok(Self { tokenizer, words, tokens })
    }

    fn find(tokenizer: &Tokenizer, vocabulary: &[(u32, String)]) -> Vec<Word> {
        if vocabulary.iter().any(|(_, text)| reaches_over_a_space(text)) {
            return Vec::new();
        }
        let mut texts: Vec<&str> = vocabulary
            .iter()
            .map(|(_, text)| text.trim_start_matches(' '))
            .filter(|text| text.len() > 1 && text.bytes().all(|byte| byte.is_ascii_lowercase()))
            .collect();
        texts.sort_unstable();
        texts.dedup();
        let words: Vec<Word> =
            texts.par_iter().filter_map(|text| Word::new(tokenizer, text)).collect();
        if words.len() < FEWEST_WORDS { Vec::new() } else { words }
    }

    /// Draws `count` random words and appends them to `into`.
    pub(crate) fn draw(&self, generator: &mut ChaCha12Rng, count: u32, into: &mut Drawn) {
        let choices = self.words.len().max(self.tokens.len()) as u32;
        into.extend((0..count).map(|_| generator.random_range(0..choices)));
    }

    /// Returns the text of drawn words. It has as many tokens as words, if the tokenizer has words.
    ///
    /// # Errors
    /// If the tokenizer can't encode the text of its own tokens.
    pub(crate) fn text(&self, drawn: &[u32]) -> anyhow::Result<Text> {
        if self.words.is_empty() {
            let ids: Vec<u32> = drawn.iter().map(|&at| self.tokens[at as usize]).collect();
            return self.fit(&ids, drawn.len());
        }
        let length = drawn.iter().map(|&at| self.words[at as usize].text.len()).sum();
        let mut text = String::with_capacity(length);
        let mut ids = Vec::with_capacity(drawn.len());
        for &at in drawn {
            let word = &self.words[at as usize];
            if ids.is_empty() {
                text.push_str(word.text.trim_start());
                ids.push(word.first);
            } else {
                text.push_str(&word.text);
                ids.push(word.id);
            }
        }
        Ok(Text { text, ids })
    }

    /// Draws tokens of `count` words that can follow another word; `None`: there are no words.
    pub(crate) fn draw_ids(&self, generator: &mut ChaCha12Rng, count: usize) -> Option<Vec<u32>> {
        let choices = self.words.len();
        let draw = |_| self.words[generator.random_range(0..choices)].id;
        (choices > 0).then(|| (0..count).map(draw).collect())
    }

    /// Returns the joints: the indices at which the tokens can be split. The token before a joint
    /// ends in an ASCII letter, and the token after it is a space and at least one ASCII letter.
    /// The text of each side encodes to the tokens of that side, also after it is joined to other
    /// text at a joint. Without words there are no joints.
    pub(crate) fn joints(&self, ids: &[u32]) -> Vec<usize> {
        if self.words.is_empty() {
            return Vec::new();
        }
        let texts = ids.iter().map(|id| self.tokenizer.token_bytes(id.cast_signed()));
        let sides: Vec<(bool, bool)> = texts
            .map(|text| {
                let starts = text.len() > 1 && text[0] == b' ' && text[1].is_ascii_alphabetic();
                (starts, text.last().is_some_and(u8::is_ascii_alphabetic))
            })
            .collect();
        (1..ids.len()).filter(|&at| sides[at - 1].1 && sides[at].0).collect()
    }

    /// Decodes tokens to text.
    ///
    /// # Errors
    /// If the tokenizer can't decode them.
    pub(crate) fn decode(&self, ids: &[u32]) -> anyhow::Result<String> {
        let ids: Vec<i32> = ids.iter().map(|id| id.cast_signed()).collect();
        Ok(self.tokenizer.decode(&ids, false)?)
    }

    /// Encodes a text to token ids.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub(crate) fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text, false)?;
        Ok(ids.into_iter().map(i32::cast_unsigned).collect())
    }

    /// Creates a text of `wanted` tokens that begins like `source`. A `source` that is too short is
    /// repeated.
    ///
    /// A cut text does not always encode to the tokens that were kept. So it is encoded again, and
    /// cut or filled up, in a few rounds. [`Text::ids`] is always the text's encoding, also in the
    /// rare case (some tokenizers without words) that the length never becomes exact.
    ///
    /// # Errors
    /// If `source` is empty, or the tokenizer can't encode the text that it decoded.
    pub(crate) fn fit(&self, source: &[u32], wanted: usize) -> anyhow::Result<Text> {
        ensure!(!source.is_empty(), "there is no token to make a text of");
        let mut filler = source.iter().copied().cycle();
        let mut ids: Vec<u32> = filler.by_ref().take(wanted).collect();
        let mut best: Option<Text> = None;
        for _ in 0..ROUNDS {
            let text = self.decode_whole(&mut ids)?;
            let found = Text { ids: self.encode(&text)?, text };
            let missing = wanted.abs_diff(found.ids.len());
            ids.clear();
            ids.extend(found.ids.iter().take(wanted));
            if best.as_ref().is_none_or(|best| missing < wanted.abs_diff(best.ids.len())) {
                best = Some(found);
            }
            if missing == 0 {
                break;
            }
            let lacking = wanted - ids.len();
            if self.words.is_empty() {
                ids.extend(filler.by_ref().take(lacking));
            } else {
                ids.extend(self.words.iter().map(|word| word.id).cycle().take(lacking));
            }
        }
        best.context("no round was made")
    }

    /// Decodes `ids`, after removing tokens at the end that are only part of a character.
    fn decode_whole(&self, ids: &mut Vec<u32>) -> anyhow::Result<String> {
        let mut text = self.decode(ids)?;
        while text.ends_with('\u{fffd}') && ids.len() > 1 {
            ids.pop();
            text = self.decode(ids)?;
        }
        Ok(text)
    }
}

impl Word {
    /// Returns `text` as a word, if it is one token at every position.
    fn new(tokenizer: &Tokenizer, text: &str) -> Option<Self> {
        let ids = tokenizer.encode(&format!("{text} {text} {text}"), false).ok()?;
        match ids[..] {
            [first, id, again] if id == again => Some(Self {
                text: format!(" {text}"),
                first: first.cast_unsigned(),
                id: id.cast_unsigned(),
            }),
            _ => None,
        }
    }
}

/// True if a token contains a space after a letter.
fn reaches_over_a_space(token: &str) -> bool {
    token.as_bytes().windows(2).any(|pair| pair[0].is_ascii_alphabetic() && pair[1] == b' ')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dataset::seed::{Purpose, generator};
    use crate::dataset::tests::{TOKENIZERS, tokenizer};

    fn drawn(words: &Words<'_>, seed: u64, count: u32) -> Drawn {
        let mut drawn = Drawn::new();
        words.draw(&mut generator(seed, Purpose::Words, 0), count, &mut drawn);
        drawn
    }

    const SOURCES: [&str; 5] = [
        "The turbine hall was quiet, and nobody had asked why the lights were off.",
        "def main() -> int:\n    return 0  # nothing\n",
        "日本語のテキストと中文文本。",
        "👍🏽 naïve café — señor",
        "x",
    ];

    #[test]
    fn the_counted_tokens_are_those_of_the_text_for_every_tokenizer() {
        for name in TOKENIZERS {
            let tokenizer = tokenizer(name);
            let words = Words::new(&tokenizer).expect("tokens");
            for seed in 0..20 {
                let text = words.text(&drawn(&words, seed, 50)).expect("a text");
                assert_eq!(words.encode(&text.text).expect("tokens"), text.ids, "{name}");
            }
            for source in SOURCES {
                let ids = words.encode(source).expect("tokens");
                let text = words.fit(&ids, 40).expect("a text");
                assert_eq!(words.encode(&text.text).expect("tokens"), text.ids, "{name}");
            }
        }
    }

    #[test]
    fn a_tokenizer_whose_tokens_span_words_has_none() {
        let mut json = super::super::tests::json("tiny_llama");
        let vocabulary = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
        vocabulary.insert("ofĠthe".to_owned(), 2048.into());
        let spanning = Tokenizer::from_bytes(json.to_string().as_bytes()).expect("a tokenizer");
        let words = Words::new(&spanning).expect("tokens");
        assert!(words.words.is_empty());
        let text = words.text(&drawn(&words, 1, 30)).expect("a text");
        assert_eq!(words.encode(&text.text).expect("tokens"), text.ids);
    }

    #[test]
    fn nothing_cannot_be_repeated() {
        let tokenizer = tokenizer("tiny_llama");
        let words = Words::new(&tokenizer).expect("words");
        assert!(words.fit(&[], 5).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn words_are_one_token_each(seed: u64, count in 1_u32..200) {
            let tokenizer = tokenizer("tiny_llama");
            let words = Words::new(&tokenizer).expect("words");
            let text = words.text(&drawn(&words, seed, count)).expect("a text");
            prop_assert_eq!(text.ids.len(), count as usize);
            prop_assert_eq!(text.text.trim(), &text.text);
            prop_assert_eq!(words.encode(&text.text).expect("tokens"), text.ids);
        }

        #[test]
        fn any_text_is_cut_or_repeated_to_the_wanted_length(
            source in prop_oneof![
                prop::sample::select(SOURCES.to_vec()).prop_map(str::to_owned),
                "\\PC{1,40}",
            ],
            wanted in 8_usize..120,
        ) {
            let tokenizer = tokenizer("tiny_llama");
            let words = Words::new(&tokenizer).expect("words");
            let ids = words.encode(&source).expect("tokens");
            let text = words.fit(&ids, wanted).expect("a text");
            prop_assert_eq!(text.ids.len(), wanted, "{:?}", text.text);
            prop_assert_eq!(words.encode(&text.text).expect("tokens"), text.ids);
        }
    }
}
