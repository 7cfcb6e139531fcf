//! The search for an earlier occurrence of a request's last tokens.

use std::fmt;
use std::sync::Arc;

use hashbrown::HashTable;

use crate::ngram;
use crate::shared::{ENOUGH, SharedText};

/// The n-gram lengths by which occurrences are found, the longest first.
const LENGTHS: [usize; 3] = [8, 4, 2];
/// The largest match length that is counted; longer matches count as this length.
pub(crate) const LONGEST: usize = 32;

/// The origin of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftSource {
    /// The request's own prompt and answer.
    Own,
    /// The answer that the client has predicted.
    Prediction,
    /// Answers to other requests of the same salt.
    Shared,
    /// The required form of the answer, which allows no other tokens.
    Form,
}

/// The match that drafts come from: last tokens that also occurred before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftMatch {
    /// The number of last tokens that also occurred before, from 2 to 32.
    pub length: u32,
    /// The text that contains the earlier occurrence.
    pub source: DraftSource,
}

/// A source of expected tokens, which may be wrong.
pub trait Proposer: fmt::Debug + Send {
    /// Adds the next token of the request.
    fn push(&mut self, token: i32);

    /// Writes at most `most` tokens that are expected next into `drafts`. `None`: nothing is
    /// expected, and `drafts` is empty.
    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch>;

    /// Returns a copy with the same history.
    fn boxed_clone(&self) -> Box<dyn Proposer>;
}

impl Clone for Box<dyn Proposer> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Tables that find a position by the n-gram before it, one for each of [`LENGTHS`]. A table keeps
/// only the newest position of each n-gram.
#[derive(Debug, Clone, Default)]
struct Places([HashTable<u32>; LENGTHS.len()]);

impl Places {
    fn with_capacity(tokens: usize) -> Self {
        Self(std::array::from_fn(|_| HashTable::with_capacity(tokens)))
    }

    /// Indexes position `end` by the n-grams before it.
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

    /// The newest position whose preceding `LENGTHS[which]` tokens equal those before `end`.
    fn find(&self, which: usize, end: usize, tokens: &impl Tokens) -> Option<usize> {
        let length = LENGTHS[which];
        let equal = |&other: &u32| tokens.equal(other as usize, end, length);
        self.0[which].find(tokens.hash(end, length), equal).map(|&place| place as usize)
    }
}

/// Tokens by position.
trait Tokens {
    fn at(&self, position: usize) -> i32;

    /// True if the same `length` tokens precede two positions.
    fn equal(&self, one: usize, other: usize, length: usize) -> bool {
        (1..=length).all(|back| self.at(one - back) == self.at(other - back))
    }

    /// Returns a hash of the `length` tokens before a position.
    fn hash(&self, end: usize, length: usize) -> u64 {
        ngram::hash(0, (end - length..end).map(|position| self.at(position)))
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
        // The last n-gram has no continuation yet. A lookup indexes it once a token follows.
        for end in 2..tokens.len() {
            places.note(end, &&tokens[..]);
        }
        Self { tokens, predicted: prediction.len(), places }
    }

    /// The most memory that an index of `tokens` tokens takes, in bytes.
    #[must_use]
    pub fn bytes(tokens: usize) -> usize {
        // A table has up to 16/7 buckets per entry, each of 4 bytes and one control byte.
        tokens.saturating_mul(4 + LENGTHS.len() * 12)
    }
}

/// Finds the last occurrence of a request's last tokens: in its own tokens, in a predicted answer,
/// and in other requests' texts of the same salt.
#[derive(Debug)]
pub struct Lookup {
    history: Arc<History>,
    /// The tokens after the history.
    tokens: Vec<i32>,
    places: Places,
    /// The request's text in the shared history; `None`: the request neither publishes tokens there
    /// nor drafts from it.
    shared: Option<SharedText>,
}

impl Clone for Lookup {
    fn clone(&self) -> Self {
        let Self { history, tokens, places, shared } = self;
        Self {
            history: Arc::clone(history),
            tokens: tokens.clone(),
            places: places.clone(),
            // Both the original and the copy publish their later tokens.
            shared: shared.as_ref().map(|shared| shared.restarted(tokens.len())),
        }
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        self.hand_over();
    }
}

/// All tokens of a lookup: those of its history, then those after it.
struct All<'a>(&'a [i32], &'a [i32]);

impl Tokens for All<'_> {
    fn at(&self, position: usize) -> i32 {
        let shared = self.0.len();
        if position < shared { self.0[position] } else { self.1[position - shared] }
    }
}

impl Lookup {
    /// Creates a lookup for a request that has generated nothing.
    #[must_use]
    pub fn new(history: Arc<History>) -> Self {
        Self { history, tokens: Vec::new(), places: Places::default(), shared: None }
    }

    /// Publishes this request's tokens in the shared history, a batch at a time, and drafts from
    /// other requests' texts too.
    #[must_use]
    pub fn sharing(mut self, text: SharedText) -> Self {
        self.shared = Some(text);
        self
    }

    fn hand_over(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.hand_over(&self.history.tokens[self.history.predicted..], &self.tokens);
        }
    }

    /// Looks in other requests' texts for a longer match than `own`, and writes its drafts.
    fn propose_shared(
        &self,
        own: Option<DraftMatch>,
        most: usize,
        drafts: &mut Vec<i32>,
    ) -> Option<DraftMatch> {
        let least = own.map_or(0, |own| own.length);
        let shared = self.shared.as_ref().filter(|_| least < ENOUGH)?;
        let tokens = All(&self.history.tokens, &self.tokens);
        let end = self.history.tokens.len() + self.tokens.len();
        let mut last = [0; LONGEST];
        let last = &mut last[..LONGEST.min(end - self.history.predicted)];
        let begin = end - last.len();
        last.iter_mut().enumerate().for_each(|(at, token)| *token = tokens.at(begin + at));
        let length = shared.propose(last, (least, most), drafts)?;
        Some(DraftMatch { length, source: DraftSource::Shared })
    }

    fn propose_own(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
        let tokens = All(&self.history.tokens, &self.tokens);
        let end = self.history.tokens.len() + self.tokens.len();
        let (place, mut length) = self.find(&tokens, end)?;
        while length < LONGEST
            && length < place
            && tokens.at(place - length - 1) == tokens.at(end - length - 1)
        {
            length += 1;
        }
        // Drafts beyond the last known token repeat the tokens since the earlier occurrence.
        let period = end - place;
        drafts.extend((0..most).map(|at| tokens.at(place + at % period)));
        let predicted = place < self.history.predicted;
        let source = if predicted { DraftSource::Prediction } else { DraftSource::Own };
        Some(DraftMatch { length: length as u32, source })
    }

    /// Returns the newest earlier position with the same last tokens before it, and the n-gram
    /// length that found it.
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
        let Self { history, tokens, places, shared } = self;
        let end = history.tokens.len() + tokens.len();
        // Index the position before the new token. Earlier lookups could not use it: no token
        // followed it.
        if end >= 2 {
            places.note(end, &All(&history.tokens, tokens));
        }
        tokens.push(token);
        if shared.as_ref().is_some_and(|shared| shared.is_due(tokens)) {
            self.hand_over();
        }
    }

    fn propose(&self, most: usize, drafts: &mut Vec<i32>) -> Option<DraftMatch> {
        drafts.clear();
        let own = self.propose_own(most, drafts);
        self.propose_shared(own, most, drafts).or(own)
    }

    fn boxed_clone(&self) -> Box<dyn Proposer> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::SharedHistory;

    /// The reference: a search over every position.
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
        // Another choice has a separate history.
        let mut other = Lookup::new(history);
        [1, 2].into_iter().for_each(|token| other.push(token));
        let found = other.propose(3, &mut drafts);
        assert_eq!(found, Some(DraftMatch { length: 2, source: DraftSource::Own }));
        assert_eq!(drafts, [1, 2, 1], "a repetition continues");
    }

    #[test]
    fn drafts_come_from_others_where_the_own_text_has_none() {
        let shared = Arc::new(SharedHistory::new(1 << 20));
        let open = |salt| {
            let history = Arc::new(History::new(&[], &[1, 2, 3, 4]));
            Lookup::new(history).sharing(shared.text(salt))
        };
        let mut drafts = Vec::new();
        let (mut first, mut second, mut other) = (open(0), open(0), open(1));
        (10..26).for_each(|token| first.push(token));
        let found = second.propose(3, &mut drafts);
        let expected = DraftMatch { length: 4, source: DraftSource::Shared };
        assert_eq!(
            (found, &drafts[..]),
            (Some(expected), &[10, 11, 12][..]),
            "found while the other text grows"
        );
        for lookup in [&mut second, &mut other] {
            (10..20).for_each(|token| lookup.push(token));
        }
        let found = second.propose(8, &mut drafts).expect("14 tokens are equal");
        assert_eq!((found.length, drafts.len()), (14, 6), "drafts end with the other text");
        assert_eq!(other.propose(8, &mut drafts), None, "another salt shares no history");
        assert!(drafts.is_empty());
        first.push(77);
        drop(first);
        (20..26).for_each(|token| second.push(token));
        second.propose(8, &mut drafts).expect("the end was handed over");
        assert_eq!(drafts, [77]);
        // A longer match in the request's own text takes precedence.
        (10..20).for_each(|token| second.push(token));
        let found = second.propose(2, &mut drafts).expect("the text has it twice");
        assert_eq!((found.source, &drafts[..]), (DraftSource::Own, &[20, 21][..]));
    }
}
