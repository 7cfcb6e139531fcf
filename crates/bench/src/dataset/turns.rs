//! Text from turns of real conversations, cut or repeated to the requested length.

use anyhow::ensure;
use rand::rngs::ChaCha12Rng;
use rayon::prelude::*;

use super::sharegpt::Exchange;
use super::words::{Text, Words};

/// The largest number of random words that are appended to reach the requested length, if a turn
/// can't be cut exactly there.
const MOST_FILLING: usize = 32;
/// Before encoding, turns are cut to this many bytes per requested token: few tokens are longer,
/// and some turns are as long as books.
const BYTES_A_TOKEN: usize = 8;

/// The first turns of conversations, with their tokens.
#[derive(Debug)]
pub(crate) struct Turns(Vec<Turn>);

#[derive(Debug)]
struct Turn {
    ids: Vec<u32>,
    joints: Vec<usize>,
}

impl Turns {
    /// Encodes the first `count` turns that are not blank, or all if there are fewer. Each turn is
    /// cut to a length that suffices for a text of `longest` tokens.
    ///
    /// # Errors
    /// If a turn can't be encoded, or all turns are blank.
    pub(crate) fn new(
        words: &Words<'_>,
        exchanges: &[Exchange],
        count: usize,
        longest: u32,
    ) -> anyhow::Result<Self> {
        let texts = exchanges.iter().map(|exchange| exchange.prompt.trim());
        let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).take(count).collect();
        ensure!(!texts.is_empty(), "the first turns of all conversations are blank");
        let turns = texts.par_iter().map(|text| {
            let ids = words.encode(beginning(text, BYTES_A_TOKEN * longest as usize))?;
            ensure!(!ids.is_empty(), "the tokenizer makes no token of {text:?}");
            Ok(Turn { joints: words.joints(&ids), ids })
        });
        Ok(Self(turns.collect::<anyhow::Result<_>>()?))
    }

    /// Creates text number `index`, which has `tokens` tokens.
    ///
    /// # Errors
    /// If the tokenizer can't decode its own tokens, or can't encode the decoded text again.
    pub(crate) fn text(
        &self,
        words: &Words<'_>,
        generator: &mut ChaCha12Rng,
        index: usize,
        tokens: u32,
    ) -> anyhow::Result<Text> {
        let turn = &self.0[index % self.0.len()];
        match turn.joined(words, generator, tokens as usize) {
            Some(ids) => Ok(Text { text: words.decode(&ids)?, ids }),
            None => words.fit(&turn.ids, tokens as usize),
        }
    }
}

impl Turn {
    /// Creates `wanted` tokens from the turn's tokens. They are cut and repeated at joints, so that
    /// no text has to be encoded again, and random words fill the rest. `None`: the turn has too
    /// few joints.
    fn joined(
        &self,
        words: &Words<'_>,
        generator: &mut ChaCha12Rng,
        wanted: usize,
    ) -> Option<Vec<u32>> {
        let (&first, &last) = (self.joints.first()?, self.joints.last()?);
        let joint_within = |end: usize| {
            self.joints[..self.joints.partition_point(|&at| at <= end)].last().copied()
        };
        let mut ids = Vec::with_capacity(wanted);
        ids.extend(&self.ids[..joint_within(wanted)?]);
        if last > first && ids.len() == last {
            let again = &self.ids[first..last];
            while again.len() <= wanted - ids.len() {
                ids.extend(again);
            }
            let end = joint_within(first + wanted - ids.len())?;
            ids.extend(&self.ids[first..end]);
        }
        let lacking = wanted - ids.len();
        if lacking > MOST_FILLING {
            return None;
        }
        ids.extend(words.draw_ids(generator, lacking)?);
        Some(ids)
    }
}

/// Returns the longest prefix of `text` that has at most `bytes` bytes and ends between characters.
fn beginning(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dataset::seed::{Purpose, generator};
    use crate::dataset::tests::tokenizer;

    fn exchange(prompt: &str) -> Exchange {
        Exchange { prompt: prompt.to_owned(), answer: String::new() }
    }

    #[test]
    fn a_cut_turn_begins_as_the_turn_does() {
        let tokenizer = tokenizer("tiny_llama");
        let words = Words::new(&tokenizer).expect("words");
        let turn = "Please tell me how the pumps of a small water plant are kept running.";
        let turns = Turns::new(&words, &[exchange(turn)], 1, 100).expect("turns");
        let mut generator = generator(1, Purpose::Words, 0);
        let short = turns.text(&words, &mut generator, 0, 12).expect("a text");
        assert_eq!(short.tokens(), 12);
        assert!(turn.starts_with(&short.text[..10]), "{short:?}");
        let long = turns.text(&words, &mut generator, 7, 100).expect("a text");
        assert_eq!(long.tokens(), 100);
        assert!(long.text.matches(" water").count() > 1, "{long:?}");
    }

    #[test]
    fn blank_turns_are_left_out() {
        let tokenizer = tokenizer("tiny_llama");
        let words = Words::new(&tokenizer).expect("words");
        assert!(Turns::new(&words, &[exchange(" \n")], 3, 10).is_err());
        let turns = Turns::new(&words, &[exchange(" \n"), exchange("hello")], 3, 10);
        assert_eq!(turns.expect("turns").0.len(), 1);
    }

    #[test]
    fn a_beginning_is_whole_characters() {
        assert_eq!(beginning("añb", 2), "a");
        assert_eq!(beginning("añb", 3), "añ");
        assert_eq!(beginning("añb", 9), "añb");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn turns_are_cut_and_repeated_to_tokens_that_the_text_encodes_to(
            turn in "([A-Za-z]{1,6}[ ,.?!\n]{1,2}|[0-9]{1,3}| [a-z]{1,9}|é|日本){1,40}",
            wanted in 8_u32..200,
        ) {
            let tokenizer = tokenizer("tiny_llama");
            let words = Words::new(&tokenizer).expect("words");
            let turns = Turns::new(&words, &[exchange(&turn)], 1, 200);
            prop_assume!(!turn.trim().is_empty());
            let mut generator = generator(1, Purpose::Words, 0);
            let text = turns.expect("turns").text(&words, &mut generator, 0, wanted);
            let text = text.expect("a text");
            prop_assert_eq!(text.tokens(), wanted, "{:?}", text.text);
            prop_assert_eq!(words.encode(&text.text).expect("tokens"), text.ids);
        }
    }
}
