//! The search for an earlier occurrence of a request's last tokens.

use std::fmt;
use std::sync::Arc;

use hashbrown::HashTable;

/// The numbers of tokens by which occurrences are found, the longest first.
const LENGTHS: [usize; 3] = [8, 4, 2];
/// The largest length of a match that is told apart from longer ones.
const LONGEST: usize = 32;

/// The origin of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftSource {
    /// The request's own prompt and answer.
    Own,
    /// The answer that the client has predicted.
    Prediction,
    /// The form of the answer, which allows nothing else.
    Form,
}

/// The reason for drafts: tokens that occurred before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftMatch {
    /// The number of last tokens that are equal, from 2 to 32.
    pub length: u32,
    /// The place of the earlier occurrence.
    pub source: DraftSource,
}

/// A way to expect tokens. It may be wrong as often as it likes.
pub trait Proposer: fmt::Debug + Send {
    /// Takes the next token of the request.
    fn push(&mut self, token: i32);

    /// Writes at most `most` tokens that are expected next into `drafts`. `None`: nothing is
    /// expected, and `drafts` is empty.
    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch>;

    /// A copy with the same history.
    fn boxed_clone(&self) -> Box<dyn Proposer>;
}

impl Clone for Box<dyn Proposer> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Places by the tokens before them: one table for each of [`LENGTHS`]. A table has the newest
/// place only.
#[derive(Debug, Clone, Default)]
struct Places([HashTable<u32>; LENGTHS.len()]);

impl Places {
    fn with_capacity(tokens: usize) -> Self {
        Self(std::array::from_fn(|_| HashTable::with_capacity(tokens)))
    }

    /// Notes the place `end`, and the tokens before it.
    fn note(&mut self, end: usize, tokens: &impl Tokens) {
        for (table, length) in self.0.iter_mut().zip(LENGTHS) {
            if end < length {
                continue;
            }
            let equal = |&other: &u32| tokens.equal(other as usize, end, length);
            let rehash = |&place: &u32| tokens.hash(place as usize, length);
            match table.find_mut(tokens.hash(end, length), equal) {
                Some(place) => *place = end as u32,
                None => {
                    table.insert_unique(tokens.hash(end, length), end as u32, rehash);
                }
            }
        }
    }

    /// The newest place with the same `LENGTHS[which]` tokens before it as before `end`.
    fn find(&self, which: usize, end: usize, tokens: &impl Tokens) -> Option<usize> {
        let length = LENGTHS[which];
        let equal = |&other: &u32| tokens.equal(other as usize, end, length);
        self.0[which].find(tokens.hash(end, length), equal).map(|&place| place as usize)
    }
}

/// Tokens by position.
trait Tokens {
    fn at(&self, position: usize) -> i32;

    /// True if the `length` tokens before two places are equal.
    fn equal(&self, one: usize, other: usize, length: usize) -> bool {
        (1..=length).all(|back| self.at(one - back) == self.at(other - back))
    }

    /// A number of the `length` tokens before a place.
    fn hash(&self, end: usize, length: usize) -> u64 {
        let mut hash = 0_u64;
        for position in end - length..end {
            let mixed = hash ^ u64::from(self.at(position).cast_unsigned());
            hash = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        hash.wrapping_mul(0xd6e8_feb8_6659_fd93)
    }
}

impl Tokens for &[i32] {
    fn at(&self, position: usize) -> i32 {
        self[position]
    }
}

/// A predicted answer and a prompt, with an index of their tokens. The choices of a prompt share
/// it.
#[derive(Debug)]
pub struct History {
    /// The prediction, then the prompt.
    tokens: Vec<i32>,
    predicted: usize,
    places: Places,
}

impl History {
    /// Indexes a prediction, which may be empty, and a prompt.
    #[must_use]
    pub fn new(prediction: &[i32], prompt: &[i32]) -> Self {
        let tokens = [prediction, prompt].concat();
        let mut places = Places::with_capacity(tokens.len());
        // What follows the last place is not known. A lookup notes it when it is.
        for end in 2..tokens.len() {
            places.note(end, &&tokens[..]);
        }
        Self { tokens, predicted: prediction.len(), places }
    }

    /// Bytes of memory that the index of so many tokens takes, at most.
    #[must_use]
    pub fn bytes(tokens: usize) -> usize {
        // A table has up to 16/7 places an entry, each of 4 bytes and one of control.
        tokens.saturating_mul(4 + LENGTHS.len() * 12)
    }
}

/// Finds the last occurrence of a request's last tokens, in its own tokens and in a predicted
/// answer.
#[derive(Debug, Clone)]
pub struct Lookup {
    history: Arc<History>,
    /// The tokens behind the history.
    tokens: Vec<i32>,
    places: Places,
}

/// All tokens of a lookup.
struct All<'a>(&'a [i32], &'a [i32]);

impl Tokens for All<'_> {
    fn at(&self, position: usize) -> i32 {
        let shared = self.0.len();
        if position < shared { self.0[position] } else { self.1[position - shared] }
    }
}

impl Lookup {
    /// A lookup for a request that has generated nothing.
    #[must_use]
    pub fn new(history: Arc<History>) -> Self {
        Self { history, tokens: Vec::new(), places: Places::default() }
    }

    /// The newest earlier place behind the same tokens as the end, and the number of those tokens
    /// that led to it.
    fn find(&self, tokens: &All<'_>, end: usize) -> Option<(usize, usize)> {
        LENGTHS.iter().enumerate().find_map(|(which, &length)| {
            let found = |places: &Places| places.find(which, end, tokens);
            let newest = || found(&self.places).or_else(|| found(&self.history.places));
            if end > length { Some((newest()?, length)) } else { None }
        })
    }
}

impl Proposer for Lookup {
    fn push(&mut self, token: i32) {
        let Self { history, tokens, places } = self;
        let end = history.tokens.len() + tokens.len();
        // The place before the token, whose last tokens were looked up until now.
        if end >= 2 {
            places.note(end, &All(&history.tokens, tokens));
        }
        tokens.push(token);
    }

    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
        drafts.clear();
        let tokens = All(&self.history.tokens, &self.tokens);
        let end = self.history.tokens.len() + self.tokens.len();
        let (place, mut length) = self.find(&tokens, end)?;
        while length < LONGEST
            && length < place
            && tokens.at(place - length - 1) == tokens.at(end - length - 1)
        {
            length += 1;
        }
        // Where the occurrence reaches to the end, it repeats itself.
        let period = end - place;
        drafts.extend((0..most).map(|at| tokens.at(place + at % period)));
        let predicted = place < self.history.predicted;
        let source = if predicted { DraftSource::Prediction } else { DraftSource::Own };
        Some(DraftMatch { length: length as u32, source })
    }

    fn boxed_clone(&self) -> Box<dyn Proposer> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same by looking at every place.
    fn slow(all: &[i32], most: usize) -> Option<(usize, Vec<i32>)> {
        let end = all.len();
        let same = |place: usize| {
            (1..=place.min(LONGEST)).take_while(|back| all[place - back] == all[end - back]).count()
        };
        let place = LENGTHS.iter().find_map(|&length| {
            (length..end).rev().find(|&place| end > length && same(place) >= length)
        })?;
        let drafts = (0..most).map(|at| all[place + at % (end - place)]).collect();
        Some((same(place), drafts))
    }

    proptest! {
        #[test]
        fn the_newest_of_the_longest_is_found(
            prediction in proptest::collection::vec(0..3_i32, 0..30),
            prompt in proptest::collection::vec(0..3_i32, 1..40),
            answer in proptest::collection::vec(0..3_i32, 0..40),
            most in 0..12_usize,
        ) {
            let mut lookup = Lookup::new(Arc::new(History::new(&prediction, &prompt)));
            let mut all = [prediction, prompt].concat();
            let mut drafts = Vec::new();
            for token in answer {
                let found = lookup.propose(most, &mut drafts);
                let expected = slow(&all, most);
                prop_assert_eq!(found.map(|found| found.length as usize), expected.as_ref().map(|it| it.0));
                prop_assert_eq!(&drafts, &expected.map(|it| it.1).unwrap_or_default());
                lookup.push(token);
                all.push(token);
            }
        }
    }

    #[test]
    fn a_prediction_is_history_in_front() {
        let history = Arc::new(History::new(&[7, 8, 9, 10], &[1, 2]));
        let mut lookup = Lookup::new(Arc::clone(&history));
        let mut drafts = Vec::new();
        assert_eq!(lookup.propose(4, &mut drafts), None);
        [7, 8].into_iter().for_each(|token| lookup.push(token));
        let found = lookup.boxed_clone().propose(2, &mut drafts);
        assert_eq!(found, Some(DraftMatch { length: 2, source: DraftSource::Prediction }));
        assert_eq!(drafts, [9, 10]);
        // Another choice has a history of its own.
        let mut other = Lookup::new(history);
        [1, 2].into_iter().for_each(|token| other.push(token));
        let found = other.propose(3, &mut drafts);
        assert_eq!(found, Some(DraftMatch { length: 2, source: DraftSource::Own }));
        assert_eq!(drafts, [1, 2, 1], "what repeats itself goes on so");
    }
}
