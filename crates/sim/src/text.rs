//! Generates the answers of simulated requests: words chosen by a hash of all preceding tokens, and
//! an end.

use std::fmt;
use std::sync::Arc;

/// Constants of a multiply-and-fold hash. Any odd numbers with about half of their bits set will
/// do.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
const FOLD: u64 = 0xd6e8_feb8_6659_fd93;

/// A source of scripted answers.
pub trait Script: fmt::Debug + Send + Sync {
    /// Returns the tokens of the answer to this prompt, including the end token; `None` if the
    /// answer is generated. The same prompt always gets the same answer.
    fn answer(&self, prompt: &[i32]) -> Option<Arc<[i32]>>;
}

/// The rule by which simulated text is generated.
#[derive(Debug, Clone)]
pub struct SimText {
    words: Arc<[i32]>,
    end: Option<i32>,
    mean_tokens: u32,
    vector_size: usize,
    script: Option<Arc<dyn Script>>,
}

impl SimText {
    /// Generates tokens from `words`, all equally likely, without an end token.
    ///
    /// # Panics
    /// `words` is empty.
    #[must_use]
    pub fn endless(mut words: Vec<i32>) -> Self {
        assert!(!words.is_empty(), "there is nothing to say");
        words.sort_unstable();
        Self { words: words.into(), end: None, mean_tokens: 0, vector_size: 1, script: None }
    }

    /// Generates answers that end with the token `end`. Answers have `mean_tokens` tokens on
    /// average, including `end`. Their lengths are uniform over `1 ..= 2 * mean_tokens - 1`, chosen
    /// by a hash of the prompt.
    #[must_use]
    pub fn ending(words: Vec<i32>, end: i32, mean_tokens: u32) -> Self {
        Self { end: Some(end), mean_tokens: mean_tokens.max(1), ..Self::endless(words) }
    }

    /// Simulates a pooling model with embeddings of `size` dimensions.
    #[must_use]
    pub fn with_vectors(self, size: u32) -> Self {
        Self { vector_size: size.max(1) as usize, ..self }
    }

    /// Uses the answers of `script` for the prompts that it covers.
    #[must_use]
    pub fn scripted(self, script: Arc<dyn Script>) -> Self {
        Self { script: Some(script), ..self }
    }

    /// Returns the scripted answer to a prompt; `None` if there is none.
    pub(crate) fn script(&self, prompt: &[i32]) -> Option<Arc<[i32]>> {
        self.script.as_ref()?.answer(prompt)
    }

    /// Returns the simulated alternative to `token` of this rank, for lists of likely tokens: the
    /// word that is `rank` positions after `token` in the list of words.
    pub(crate) fn alternative(&self, token: i32, rank: usize) -> i32 {
        match self.words.binary_search(&token) {
            Ok(at) => self.words[(at + rank) % self.words.len()],
            Err(_) if rank == 0 => token,
            Err(at) => self.words[(at + rank) % self.words.len()],
        }
    }

    /// Returns the number of tokens of the answer to a prompt, including `end`.
    fn answer_length(&self, prompt: Mix) -> u32 {
        let lengths = 2 * u64::from(self.mean_tokens) - 1;
        1 + prompt.draw(SPREAD, lengths) as u32
    }
}

/// Returns the token that follows `tokens` if nothing is suppressed. The first `prompt_len` tokens
/// are the prompt.
#[must_use]
pub fn next_token(text: &SimText, tokens: &[i32], prompt_len: usize) -> i32 {
    let mut sequence = Sequence::new(text, tokens, prompt_len, 0);
    sequence.say(text, &[], &[])
}

/// Returns the embedding of a prompt, normalised to length 1, or a single number between -1 and 1.
/// It is a hash of all tokens.
#[must_use]
pub fn vector(text: &SimText, prompt: &[i32]) -> Vec<f32> {
    let mut vector = Vec::with_capacity(text.vector_size);
    Sequence::new(text, prompt, prompt.len(), 0).pool(text, &mut vector);
    vector
}

/// A 64-bit hash of all tokens of a slot.
#[derive(Debug, Clone, Copy)]
struct Mix(u64);

impl Mix {
    const EMPTY: Self = Self(SPREAD);

    fn push(&mut self, token: i32) {
        self.0 = fold(self.0 ^ u64::from(token.cast_unsigned()), FOLD).rotate_left(23) ^ FOLD;
    }

    /// Returns a pseudorandom number below `below`.
    fn draw(self, purpose: u64, below: u64) -> u64 {
        let mixed = fold(self.0 ^ purpose, SPREAD);
        ((u128::from(mixed) * u128::from(below)) >> 64) as u64
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ SPREAD) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

/// The state of a slot that determines the next token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    mix: Mix,
    /// The number of tokens so far.
    pub(crate) length: u32,
    /// The position of the end token; `u32::MAX` if there is none.
    end_at: u32,
}

impl Default for Sequence {
    fn default() -> Self {
        Self { mix: Mix::EMPTY, length: 0, end_at: u32::MAX }
    }
}

impl Sequence {
    /// Creates the state after `tokens`. No stop id may come before position `min_total`.
    pub(crate) fn new(text: &SimText, tokens: &[i32], prompt_len: usize, min_total: u32) -> Self {
        let (prompt, said) = tokens.split_at(prompt_len.min(tokens.len()));
        let mut sequence = Self::default();
        sequence.extend(prompt);
        if text.end.is_some() {
            let end_at = sequence.length + text.answer_length(sequence.mix) - 1;
            sequence.end_at = end_at.max(min_total);
        }
        sequence.extend(said);
        sequence
    }

    fn extend(&mut self, tokens: &[i32]) {
        for &token in tokens {
            self.mix.push(token);
        }
        self.length += tokens.len() as u32;
    }

    /// Appends the embedding of all tokens so far to `out`.
    pub(crate) fn pool(&self, text: &SimText, out: &mut Vec<f32>) {
        const STEPS: u64 = 1 << 24;
        let from = out.len();
        out.extend((0..text.vector_size as u64).map(|at| {
            let drawn = self.mix.draw(fold(at + 1, FOLD), STEPS);
            drawn as f32 / (STEPS / 2) as f32 - 1.0
        }));
        if text.vector_size > 1 {
            let length = out[from..].iter().map(|x| x * x).sum::<f32>().sqrt();
            out[from..].iter_mut().for_each(|x| *x /= length);
        }
    }

    /// Returns the number of tokens that a row returns, from 1 to `most`, chosen by a hash of all
    /// tokens so far.
    pub(crate) fn count(&self, most: u32) -> u32 {
        1 + self.mix.draw(FOLD, u64::from(most.max(1))) as u32
    }

    /// Appends and returns a token that is prescribed by a script.
    pub(crate) fn repeat(&mut self, token: i32) -> i32 {
        self.extend(&[token]);
        token
    }

    /// Generates the next token among those that `mask` allows: the end token if it is allowed,
    /// otherwise any allowed token with equal probability.
    pub(crate) fn say_masked(&mut self, text: &SimText, mask: &[u32]) -> i32 {
        let token = text.end.filter(|&end| has(mask, end)).unwrap_or_else(|| {
            let count: u64 = mask.iter().map(|word| u64::from(word.count_ones())).sum();
            nth(mask, self.mix.draw(u64::from(self.length), count.max(1)))
        });
        self.mix.push(token);
        self.length += 1;
        token
    }

    /// Generates the next token: none of `suppressed`, and one of `allowed` unless that is empty.
    pub(crate) fn say(&mut self, text: &SimText, suppressed: &[i32], allowed: &[i32]) -> i32 {
        let words = if allowed.is_empty() { &text.words } else { allowed };
        let token = match text.end {
            Some(end)
                if self.length == self.end_at && (allowed.is_empty() || allowed.contains(&end)) =>
            {
                end
            }
            _ => {
                let count = words.len();
                let mut at = self.mix.draw(u64::from(self.length), count as u64) as usize;
                // If every word is suppressed, the loop ends, and a suppressed word is used.
                for _ in 0..suppressed.len() {
                    if !suppressed.contains(&words[at]) {
                        break;
                    }
                    at = (at + 1) % count;
                }
                words[at]
            }
        };
        self.mix.push(token);
        self.length += 1;
        token
    }
}

/// True if a mask allows the token `id`.
pub(crate) fn has(mask: &[u32], id: i32) -> bool {
    let at = id as usize;
    mask.get(at / 32).is_some_and(|word| word >> (at % 32) & 1 == 1)
}

/// Returns the token with index `nth` among those that a mask allows.
fn nth(mask: &[u32], mut nth: u64) -> i32 {
    for (at, &word) in mask.iter().enumerate() {
        let count = u64::from(word.count_ones());
        if nth < count {
            let mut rest = word;
            (0..nth).for_each(|_| rest &= rest - 1);
            return at as i32 * 32 + rest.trailing_zeros() as i32;
        }
        nth -= count;
    }
    debug_assert!(false, "a mask allows something");
    0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: i32 = 7;

    fn words() -> Vec<i32> {
        (100..200).collect()
    }

    /// Generates the tokens after `prompt`, until the end token or `most` tokens.
    fn answer(text: &SimText, prompt: &[i32], most: usize) -> Vec<i32> {
        let mut tokens = prompt.to_vec();
        while tokens.len() < prompt.len() + most && tokens.last() != Some(&END) {
            tokens.push(next_token(text, &tokens, prompt.len()));
        }
        tokens.split_off(prompt.len())
    }

    #[test]
    fn the_mean_length_is_as_asked() {
        let text = SimText::ending(words(), END, 20);
        let lengths: Vec<usize> = (0..2000).map(|i| answer(&text, &[i, 3], 100).len()).collect();
        assert!(lengths.iter().all(|n| (1..=39).contains(n)));
        let mean = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
        // The standard error is 11.3 / sqrt(2000) = 0.25.
        assert!((mean - 20.0).abs() < 1.25, "{mean}");
    }

    #[test]
    fn words_are_about_equally_frequent() {
        let text = SimText::endless(words());
        let mut seen = [0_u32; 100];
        for token in answer(&text, &[1], 20_000) {
            seen[(token - 100) as usize] += 1;
        }
        // A Poisson distribution with mean 200, so this allows more than 7 standard deviations on
        // either side.
        assert!(seen.iter().all(|n| (100..300).contains(n)), "{seen:?}");
    }

    proptest! {
        #[test]
        fn a_replay_at_any_place_says_the_same(
            prompt in prop::collection::vec(0..50_i32, 1..20),
            cut in 0..30_usize,
            min_tokens in 0..40_u32,
        ) {
            let text = SimText::ending(words(), END, 15);
            let min_total = prompt.len() as u32 + min_tokens;
            let mut whole = Sequence::new(&text, &prompt, prompt.len(), min_total);
            let said: Vec<i32> = (0..40).map(|_| whole.say(&text, &[], &[])).collect();
            let so_far: Vec<i32> = prompt.iter().chain(&said[..cut]).copied().collect();
            let mut again = Sequence::new(&text, &so_far, prompt.len(), min_total);
            let rest: Vec<i32> = (cut..40).map(|_| again.say(&text, &[], &[])).collect();
            prop_assert_eq!(&said[cut..], &rest);
            let ends = said.iter().filter(|&&token| token == END).count();
            prop_assert!(ends <= 1);
            prop_assert!(!said[..min_tokens as usize].contains(&END));
        }

        #[test]
        fn a_mask_is_obeyed_and_the_end_comes_when_it_can(
            mask in prop::collection::vec(any::<u32>(), 3..4).prop_filter("some", |m| m.iter().any(|&w| w > 0)),
            prompt in prop::collection::vec(0..50_i32, 1..20),
        ) {
            let has = |id: i32| mask[id as usize / 32] >> (id % 32) & 1 == 1;
            let mut endless = Sequence::new(&SimText::endless(words()), &prompt, prompt.len(), 0);
            let token = endless.say_masked(&SimText::endless(words()), &mask);
            prop_assert!(has(token));
            let text = SimText::ending(words(), END, 20);
            let mut ending = Sequence::new(&text, &prompt, prompt.len(), 0);
            let token = ending.say_masked(&text, &mask);
            prop_assert!(has(token) && (token == END || !has(END)));
        }

        #[test]
        fn vectors_have_length_1_and_tell_prompts_apart(
            prompt in prop::collection::vec(0..50_i32, 1..20), at in any::<prop::sample::Index>(),
        ) {
            let text = SimText::endless(words()).with_vectors(64);
            let one = vector(&text, &prompt);
            prop_assert_eq!(one.len(), 64);
            prop_assert!((one.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
            prop_assert_eq!(&vector(&text, &prompt), &one);
            let mut other = prompt.clone();
            other[at.index(prompt.len())] += 1;
            let cosine: f32 = one.iter().zip(vector(&text, &other)).map(|(x, y)| x * y).sum();
            prop_assert!(cosine < 0.9, "{}", cosine);
        }

        #[test]
        fn nothing_suppressed_is_said(
            prompt in prop::collection::vec(0..50_i32, 1..20),
            suppressed in prop::collection::vec(100..110_i32, 0..9),
        ) {
            let text = SimText::endless((100..110).collect::<Vec<_>>());
            let mut sequence = Sequence::new(&text, &prompt, prompt.len(), 0);
            for _ in 0..20 {
                prop_assert!(!suppressed.contains(&sequence.say(&text, &suppressed, &[])));
                let allowed = [5, 100, 105];
                prop_assert!(allowed.contains(&sequence.say(&text, &suppressed, &allowed)));
            }
        }
    }
}
