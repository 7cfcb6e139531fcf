//! The texts that requests of the same salt have generated, in which other requests find drafts.
//!
//! This resembles SGLang's n-gram trie, but keeps whole texts with tables of their n-grams, and
//! evicts the least recently used text. A request never finds a text of another salt, because the
//! speed of an answer would reveal the text that its drafts come from.

use std::fmt;
use std::sync::Arc;

use hashbrown::HashTable;
use lru::LruCache;
use parking_lot::Mutex;

use crate::lookup::LONGEST;
use crate::ngram;

/// The n-gram lengths by which positions are found, the longest first.
const LENGTHS: [usize; 2] = [8, 4];
/// If the match in a request's own text has at least this length, other texts are not searched.
pub(crate) const ENOUGH: u32 = LENGTHS[0] as u32;
/// The number of tokens that a request publishes at a time.
const BATCH: usize = 16;
/// The number of tokens kept from before a text, so that lookups also find matches at the text's
/// beginning.
const CONTEXT: usize = LENGTHS[0];
/// Bytes of a token: its id in a vector with as much spare room, and an entry in each table. A
/// table has at most 32/7 buckets per entry, each of 8 bytes and one control byte, so that it never
/// grows.
const TOKEN_BYTES: usize = 8 + LENGTHS.len() * 42;
/// Bytes of a text in the list of texts, apart from its tokens.
const TEXT_BYTES: usize = 160;

/// A position in a text, after its first `end` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    text: u32,
    end: u32,
}

#[derive(Debug)]
struct Text {
    salt: u64,
    tokens: Vec<i32>,
}

impl Text {
    /// The `length` tokens before position `end`.
    fn before(&self, end: u32, length: usize) -> Option<&[i32]> {
        let end = end as usize;
        self.tokens.get(end.checked_sub(length)?..end)
    }
}

struct Texts {
    /// Texts by number, in order of last use.
    texts: LruCache<u32, Text>,
    /// The newest position after each n-gram of a salt, for each of [`LENGTHS`].
    places: [HashTable<Place>; LENGTHS.len()],
    next: u32,
    bytes: usize,
}

impl Texts {
    /// Indexes position `end` of a text by the n-grams before it.
    fn note(&mut self, place: Place) {
        let texts = &self.texts;
        let hashed = |place: Place, length: usize| {
            let text = texts.peek(&place.text)?;
            Some((text.salt, text.before(place.end, length)?))
        };
        for (table, length) in self.places.iter_mut().zip(LENGTHS) {
            let Some((salt, gram)) = hashed(place, length) else { continue };
            let number = |(salt, gram): (u64, &[i32])| ngram::hash(salt, gram.iter().copied());
            let equal = |&other: &Place| hashed(other, length) == Some((salt, gram));
            let rehash = |&other: &Place| hashed(other, length).map_or(0, number);
            match table.find_mut(number((salt, gram)), equal) {
                Some(newest) => *newest = place,
                None => {
                    table.insert_unique(number((salt, gram)), place, rehash);
                }
            }
        }
    }

    /// Appends tokens to a text. A text that was evicted starts again, after `context`. Returns the
    /// text's number.
    fn extend(&mut self, number: Option<u32>, salt: u64, context: &[i32], tokens: &[i32]) -> u32 {
        let number = number.filter(|it| self.texts.peek(it).is_some_and(|it| it.salt == salt));
        let number = number.unwrap_or_else(|| {
            while self.texts.contains(&self.next) {
                self.next = self.next.wrapping_add(1);
            }
            self.texts.push(self.next, Text { salt, tokens: context.to_vec() });
            self.bytes += TEXT_BYTES + context.len() * TOKEN_BYTES;
            self.next = self.next.wrapping_add(1);
            self.next.wrapping_sub(1)
        });
        let Some(text) = self.texts.get_mut(&number) else { return number };
        let before = text.tokens.len();
        text.tokens.extend_from_slice(tokens);
        // The last n-gram has no continuation yet. It is indexed with the next tokens.
        let ends = before.max(1)..text.tokens.len();
        self.bytes += tokens.len() * TOKEN_BYTES;
        ends.for_each(|end| self.note(Place { text: number, end: end as u32 }));
        number
    }

    fn remove_unused(&mut self) {
        let Some((&number, text)) = self.texts.peek_lru() else { return };
        for (table, length) in self.places.iter_mut().zip(LENGTHS) {
            for end in length..text.tokens.len() {
                let gram = &text.tokens[end - length..end];
                let place = Place { text: number, end: end as u32 };
                let hash = ngram::hash(text.salt, gram.iter().copied());
                if let Ok(found) = table.find_entry(hash, |&other| other == place) {
                    found.remove();
                }
            }
        }
        self.bytes -= TEXT_BYTES + text.tokens.len() * TOKEN_BYTES;
        self.texts.pop_lru();
    }

    /// The newest position that follows the same last tokens in a text of this salt other than
    /// `own`, and the length of the match.
    fn find(&self, salt: u64, last: &[i32], own: Option<u32>) -> Option<(Place, usize)> {
        let places = self.places.iter().zip(LENGTHS);
        let (place, mut length) =
            places.filter(|&(_, length)| last.len() >= length).find_map(|(table, length)| {
                let gram = &last[last.len() - length..];
                let equal = |place: &Place| {
                    let text = self.texts.peek(&place.text);
                    text.is_some_and(|it| {
                        it.salt == salt && it.before(place.end, length) == Some(gram)
                    })
                };
                let place = *table.find(ngram::hash(salt, gram.iter().copied()), equal)?;
                (Some(place.text) != own).then_some((place, length))
            })?;
        let tokens = &self.texts.peek(&place.text)?.tokens;
        let end = place.end as usize;
        while length < LONGEST.min(end).min(last.len())
            && tokens[end - length - 1] == last[last.len() - length - 1]
        {
            length += 1;
        }
        Some((place, length))
    }
}

/// Texts by salt, with a bound on their memory. All requests of a model share it.
pub struct SharedHistory {
    texts: Mutex<Texts>,
    most_bytes: usize,
}

impl fmt::Debug for SharedHistory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Texts are private, and not printed.
        f.debug_struct("SharedHistory")
            .field("most_bytes", &self.most_bytes)
            .finish_non_exhaustive()
    }
}

impl SharedHistory {
    /// Creates an empty history. Texts and tables take at most `most_bytes` bytes. The tables are
    /// allocated at once, but their memory is touched only as they fill.
    #[must_use]
    pub fn new(most_bytes: usize) -> Self {
        // With twice the room, a table never grows because of removed entries.
        let room = 2 * (most_bytes / TOKEN_BYTES + BATCH);
        let places = std::array::from_fn(|_| HashTable::with_capacity(room));
        let texts = Texts { texts: LruCache::unbounded(), places, next: 0, bytes: 0 };
        Self { texts: Mutex::new(texts), most_bytes }
    }

    /// The number of bytes that texts and their index entries take now.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.texts.lock().bytes
    }

    /// The shared text of a new request of this salt.
    #[must_use]
    pub fn text(self: &Arc<Self>, salt: u64) -> SharedText {
        SharedText { history: Arc::clone(self), salt, number: None, kept: 0 }
    }
}

/// A request's text among the other texts of its salt.
#[derive(Debug)]
pub struct SharedText {
    history: Arc<SharedHistory>,
    salt: u64,
    /// The text's number in the history; `None`: the text was evicted, or has no tokens yet.
    number: Option<u32>,
    /// The number of the request's tokens that have been published.
    kept: usize,
}

impl SharedText {
    /// The shared text of a restarted request, of which `kept` tokens are published already.
    pub(crate) fn restarted(&self, kept: usize) -> Self {
        Self { history: Arc::clone(&self.history), salt: self.salt, number: None, kept }
    }

    /// True if `generated` has a full batch to publish.
    pub(crate) fn is_due(&self, generated: &[i32]) -> bool {
        generated.len() >= self.kept + BATCH
    }

    /// Publishes the tokens of `generated` since the last call. `prompt` has the tokens before
    /// `generated`.
    pub(crate) fn hand_over(&mut self, prompt: &[i32], generated: &[i32]) {
        let fresh = &generated[self.kept..];
        if fresh.is_empty() {
            return;
        }
        let own = &generated[self.kept.saturating_sub(CONTEXT)..self.kept];
        let more = CONTEXT - own.len();
        let context = [&prompt[prompt.len().saturating_sub(more)..], own].concat();
        let mut texts = self.history.texts.lock();
        self.number = Some(texts.extend(self.number, self.salt, &context, fresh));
        while texts.bytes > self.history.most_bytes {
            texts.remove_unused();
        }
        self.kept = generated.len();
    }

    /// Appends at most `most` tokens that followed the same last tokens in another text. Returns
    /// the length of the match, if it is longer than `least`.
    pub(crate) fn propose(
        &self,
        last: &[i32],
        (least, most): (u32, usize),
        drafts: &mut Vec<i32>,
    ) -> Option<u32> {
        let mut texts = self.history.texts.lock();
        let (place, length) = texts.find(self.salt, last, self.number)?;
        if length as u32 <= least {
            return None;
        }
        let text = texts.texts.get(&place.text)?;
        drafts.clear();
        drafts.extend(text.tokens[place.end as usize..].iter().take(most));
        Some(length as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn proposed(text: &SharedText, last: &[i32]) -> Option<(u32, Vec<i32>)> {
        let mut drafts = Vec::new();
        let length = text.propose(last, (0, 4), &mut drafts)?;
        Some((length, drafts))
    }

    #[test]
    fn a_text_is_found_by_others_of_its_salt_only() {
        let history = Arc::new(SharedHistory::new(1 << 20));
        let (mut one, two, other) = (history.text(7), history.text(7), history.text(8));
        let generated: Vec<i32> = (10..40).collect();
        one.hand_over(&[1, 2, 3, 4], &generated);
        assert_eq!(proposed(&two, &[14, 15, 16, 17]), Some((4, vec![18, 19, 20, 21])));
        assert_eq!(
            proposed(&two, &[1, 2, 3, 4]),
            Some((4, vec![10, 11, 12, 13])),
            "the text's beginning matches"
        );
        assert_eq!(proposed(&two, &[15, 16, 17]), None, "the match is too short");
        assert_eq!(proposed(&two, &[36, 37, 38, 39]), None, "nothing follows the text's end");
        assert_eq!(proposed(&other, &[14, 15, 16, 17]), None, "another salt shares no history");
        assert_eq!(
            proposed(&one, &[14, 15, 16, 17]),
            None,
            "a text is not proposed to its own request"
        );
        let long: Vec<i32> = (9..30).collect();
        assert_eq!(proposed(&two, &long), Some((20, vec![30, 31, 32, 33])));
        // The end of the text is indexed with the next tokens.
        let more = [&generated[..], &[90; 2]].concat();
        one.hand_over(&[1, 2, 3, 4], &more);
        assert_eq!(proposed(&two, &[36, 37, 38, 39]), Some((4, vec![90, 90])));
    }

    #[test]
    fn the_longest_unused_text_goes_first() {
        let bytes = 3 * (TEXT_BYTES + 24 * TOKEN_BYTES);
        let history = Arc::new(SharedHistory::new(bytes));
        let tokens = |number: i32| (0..16).map(|at| 100 * number + at).collect::<Vec<_>>();
        let mut texts: Vec<SharedText> = (0..4).map(|_| history.text(0)).collect();
        let asks = history.text(0);
        for (number, text) in (0..3).zip(&mut texts) {
            text.hand_over(&[0; 8], &tokens(number));
        }
        assert!(proposed(&asks, &tokens(0)[..4]).is_some(), "the text is found, and so used");
        texts[3].hand_over(&[0; 8], &tokens(3));
        let there = |number| proposed(&asks, &tokens(number)[..4]).is_some();
        assert_eq!([0, 1, 2, 3].map(there), [true, false, true, true]);
        // A text that was evicted continues as a new one.
        let longer = [&tokens(1)[..], &[7; 8]].concat();
        texts[1].hand_over(&[0; 8], &longer);
        assert_eq!(proposed(&asks, &tokens(1)[8..16]), Some((8, vec![7; 4])));
        let whole: Vec<i32> = (0..200).collect();
        texts[2].hand_over(&[0; 8], &[&tokens(2)[..], &whole].concat());
        assert!(history.bytes() <= bytes, "a text that does not fit is not kept");
        assert_eq!(proposed(&asks, &whole[..8]), None);
    }

    proptest! {
        #[test]
        fn every_draft_stood_in_a_text_of_the_salt(
            bytes in 2000..20_000_usize,
            steps in proptest::collection::vec(
                (0..6_usize, proptest::collection::vec(0..3_i32, 1..20)), 1..60),
        ) {
            let history = Arc::new(SharedHistory::new(bytes));
            let mut texts: Vec<_> = (0..6_u64).map(|at| (history.text(at % 2), vec![])).collect();
            for (at, tokens) in steps {
                let (text, generated) = &mut texts[at];
                generated.extend(tokens);
                text.hand_over(&[], generated);
                let (text, generated) = &texts[at];
                prop_assert!(history.bytes() <= bytes);
                if let Some((length, drafts)) = proposed(text, generated) {
                    let last = &generated[generated.len() - length as usize..];
                    let all = [last, &drafts].concat();
                    let mut others = texts.iter().enumerate().filter(|(it, _)| it % 2 == at % 2);
                    prop_assert!(others.any(|(_, (_, it))| it.windows(all.len()).any(|it| it == all)));
                }
            }
            // All index entries point into stored texts.
            let mut texts = history.texts.lock();
            while !texts.texts.is_empty() {
                texts.remove_unused();
            }
            prop_assert_eq!(texts.bytes, 0);
            prop_assert!(texts.places.iter().all(HashTable::is_empty));
        }
    }
}
