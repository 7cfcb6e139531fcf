//! Encodes text in parts. Cached parts are looked up, and long texts are cut.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::cache::TextCache;
use crate::cut::Cuts;
use crate::error::TextError;
use crate::plain::{LONGEST_WORD, overlap};
use crate::tokenizer::Tokenizer;

/// The least size in bytes of the parts of a long text. Cutting into parts of this size costs
/// nothing, and a short text waits only a few milliseconds for one part.
const PART_BYTES: usize = 8 << 10;
/// The least size in bytes of a text that is cut, and of a part that is cached. Encoding a smaller
/// text costs about as much as a lookup.
const KEPT_BYTES: usize = 2 << 10;

/// A tokenizer with a cache of encoded parts.
#[derive(Debug)]
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    cache: Option<TextCache>,
    /// Bytes of text whose encoding has started.
    encoded: AtomicU64,
}

/// A part of more bytes is long: it has no position for a cut. It would delay other texts, so it is
/// encoded word by word on a separate thread.
const LONG_BYTES: usize = 64 << 10;

/// Texts to encode, with the parameters for cutting them.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    pub(crate) texts: Vec<String>,
    pub(crate) add_special_tokens: bool,
    /// The largest number of tokens of each text, without special tokens around it. Encoding stops
    /// beyond it. `None` for no limit.
    pub(crate) most: Option<usize>,
    /// The salt. Only texts with the same salt share encoded parts.
    pub(crate) salt: u64,
    /// The special tokens in a chat's single text that are to be encoded as ordinary text, as
    /// sorted ranges.
    pub(crate) plain: Vec<Range<usize>>,
}

/// The encoding of texts as a job: a list of parts, which can be encoded in any order.
#[derive(Debug)]
pub(crate) struct Work {
    texts: Vec<String>,
    add_special_tokens: bool,
    most: Option<usize>,
    salt: u64,
    plain: Vec<Range<usize>>,
    /// The number of ids of each text so far.
    counts: Vec<AtomicUsize>,
    parts: Vec<Part>,
    /// The groups of parts that are encoded consecutively, with about [`PART_BYTES`] per group.
    pieces: Vec<Range<usize>>,
}

#[derive(Debug)]
struct Part {
    text: usize,
    range: Range<usize>,
    /// True if the part is added to the cache.
    kept: bool,
    ids: OnceLock<Arc<[i32]>>,
}

impl Encoder {
    /// Creates an encoder that caches at most `cache_bytes` bytes; 0 disables the cache.
    pub fn new(tokenizer: Arc<Tokenizer>, cache_bytes: usize) -> Self {
        let cached = cache_bytes > 0 && !tokenizer.cuts().is_empty();
        let cache = cached.then(|| TextCache::new(cache_bytes));
        Self { tokenizer, cache, encoded: AtomicU64::new(0) }
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the ids of `text`, which equal those of [`Tokenizer::encode`].
    ///
    /// # Errors
    /// The same errors as [`Tokenizer::encode`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i32>, TextError> {
        if text.len() < KEPT_BYTES {
            self.note_encoded(text.len());
            return self.tokenizer.encode(text, add_special_tokens);
        }
        let texts = vec![text.to_owned()];
        let work = self.plan(Texts { texts, add_special_tokens, ..Texts::default() })?;
        for piece in 0..work.pieces() {
            self.encode_piece(&work, piece, &|| true)?;
        }
        Ok(self.finish(&work)?.pop().unwrap_or_default())
    }

    /// Returns the bytes of text whose encoding has started so far, without text found in the
    /// cache.
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded.load(Ordering::Relaxed)
    }

    /// Counts bytes before they are encoded.
    pub(crate) fn note_encoded(&self, bytes: usize) {
        self.encoded.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the bytes looked up in the cache so far, the bytes found there so far, and the bytes
    /// that the cache uses now.
    pub fn cache_counts(&self) -> (u64, u64, usize) {
        self.cache.as_ref().map_or((0, 0, 0), TextCache::counts)
    }

    /// Cuts texts into parts, and looks up the parts in the cache.
    ///
    /// # Errors
    /// [`TextError::TooLong`] if a text certainly has too many tokens, [`TextError::Undivided`] if
    /// a word is too long. In both cases nothing was encoded.
    pub(crate) fn plan(&self, texts: Texts) -> Result<Work, TextError> {
        let Texts { texts, add_special_tokens, most, salt, plain } = texts;
        for (index, text) in texts.iter().enumerate() {
            self.check_length(index, self.tokenizer.fewest_ids(text), most)?;
        }
        let mut parts = Vec::new();
        let cuttable = !add_special_tokens || self.tokenizer.frame().is_some();
        for (index, text) in texts.iter().enumerate() {
            if cuttable {
                self.cut(index, text, salt, &plain, &mut parts);
            } else {
                parts.push(Part::new(index, 0..text.len(), false));
            }
        }
        if self.tokenizer.cuts().between_words() {
            let unknown = parts.iter().filter(|part| part.ids.get().is_none());
            let longest = unknown.map(|part| part.range.len()).max().unwrap_or(0);
            check_divided(longest)?;
        }
        let mut pieces = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for (at, part) in parts.iter().enumerate() {
            if part.is_long() && start < at {
                pieces.push(start..at);
                (start, bytes) = (at, 0);
            }
            if part.ids.get().is_none() {
                bytes += part.range.len();
            }
            if bytes >= PART_BYTES {
                pieces.push(start..at + 1);
                (start, bytes) = (at + 1, 0);
            }
        }
        if start < parts.len() {
            pieces.push(start..parts.len());
        }
        let counts = texts.iter().map(|_| AtomicUsize::new(0)).collect();
        let work = Work { texts, add_special_tokens, most, salt, plain, counts, parts, pieces };
        for part in &work.parts {
            if let Some(ids) = part.ids.get() {
                self.count(&work, part.text, ids.len())?;
            }
        }
        Ok(work)
    }

    /// Checks that a text that is not cut has no word that is too long.
    ///
    /// # Errors
    /// [`TextError::Undivided`] for a word that is too long. Long words are not detected if the
    /// tokenizer's word boundaries are unknown.
    pub(crate) fn check_words(&self, text: &str) -> Result<(), TextError> {
        let cuts = self.tokenizer.cuts();
        let mut start = 0;
        while cuts.between_words() && text.len() - start > LONGEST_WORD {
            let after = start + PART_BYTES;
            let end = cuts.next(text, after, after).unwrap_or(text.len());
            check_divided(end - start)?;
            start = end;
        }
        Ok(())
    }

    /// Adds to the number of ids of a text, and checks the limit.
    fn count(&self, work: &Work, text: usize, ids: usize) -> Result<(), TextError> {
        let before = work.counts[text].fetch_add(ids, Ordering::Relaxed);
        self.check_length(text, before + ids, work.most)
    }

    /// Checks `at_least`, a lower bound on a text's number of tokens, against the limit `most`.
    ///
    /// # Errors
    /// The text has more than `most` tokens.
    pub(crate) fn check_length(
        &self,
        text: usize,
        at_least: usize,
        most: Option<usize>,
    ) -> Result<(), TextError> {
        match most {
            Some(limit) if at_least > limit => Err(TextError::TooLong { text, at_least, limit }),
            _ => Ok(()),
        }
    }

    fn cut(
        &self,
        index: usize,
        text: &str,
        salt: u64,
        plain: &[Range<usize>],
        parts: &mut Vec<Part>,
    ) {
        let cuts = self.tokenizer.cuts();
        let (token, anywhere) = match self.cache {
            Some(_) => (KEPT_BYTES, PART_BYTES),
            None => (PART_BYTES, PART_BYTES),
        };
        let from = parts.len();
        let mut start = 0;
        // Where a part ends does not depend on the text after it, so texts with the same beginning
        // have the same parts.
        while text.len() - start > token
            && let Some(end) = next_cut(cuts, text, plain, start + token, start + anywhere)
        {
            // The cache is keyed by the part's text alone, but the encoding of a part with plain
            // ranges also depends on these ranges.
            let kept = self.cache.is_some() && !overlap(plain, &(start..end));
            parts.push(Part::new(index, start..end, kept));
            start = end;
        }
        // The last part is not cached, because its end moves with the next turn.
        parts.push(Part::new(index, start..text.len(), false));
        if let Some(cache) = &self.cache {
            let kept = &parts[from..parts.len() - 1];
            let kept: Vec<&str> = kept
                .iter()
                .filter(|part| part.kept)
                .map(|part| &text[part.range.clone()])
                .collect();
            if kept.is_empty() {
                return;
            }
            let looked_up = parts[from..].iter_mut().filter(|part| part.kept);
            for (part, known) in looked_up.zip(cache.get_all(salt, &kept)) {
                if let Some(ids) = known {
                    part.ids = OnceLock::from(ids);
                }
            }
        }
    }

    /// Encodes the parts of a piece that were not found in the cache. `go_on` is called at
    /// intervals.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`], [`TextError::TooLong`] as soon as a text has too many
    /// ids, and [`TextError::Closed`] if `go_on` returns false.
    pub(crate) fn encode_piece(
        &self,
        work: &Work,
        piece: usize,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), TextError> {
        for part in &work.parts[work.pieces[piece].clone()] {
            if part.ids.get().is_some() {
                continue;
            }
            if !go_on() {
                return Err(TextError::Closed);
            }
            let ids: Arc<[i32]> = self.encode_part(work, part, go_on)?.into();
            if let Some(cache) = self.cache.as_ref().filter(|_| part.kept) {
                let text = &work.texts[part.text][part.range.clone()];
                cache.insert(work.salt, text, Arc::clone(&ids));
            }
            self.count(work, part.text, ids.len())?;
            // A piece is encoded only once, so the value is not set yet.
            let _ = part.ids.set(ids);
        }
        Ok(())
    }

    fn encode_part(
        &self,
        work: &Work,
        part: &Part,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Vec<i32>, TextError> {
        let text = &work.texts[part.text];
        let part_text = &text[part.range.clone()];
        self.note_encoded(part_text.len());
        let plain: Vec<Range<usize>> = work
            .plain
            .iter()
            .filter(|range| overlap(std::slice::from_ref(range), &part.range))
            // No cut is inside a plain range, so the range lies within the part.
            .map(|range| range.start - part.range.start..range.end - part.range.start)
            .collect();
        let special = work.add_special_tokens && part.range.len() == text.len();
        let in_words = part.is_long() && (!special || self.tokenizer.frame().is_some());
        if plain.is_empty() && !in_words {
            return self.tokenizer.encode(part_text, special);
        }
        let before = work.counts[part.text].load(Ordering::Relaxed);
        let most = work.most.map(|most| most.saturating_sub(before));
        // The number of ids for the error.
        let reached = std::cell::Cell::new(0);
        let within = |ids: usize| {
            reached.set(ids);
            most.is_none_or(|most| ids <= most) && go_on()
        };
        let encoded = self.tokenizer.encode_plain(part_text, &plain, &within);
        if matches!(encoded, Err(TextError::Closed)) {
            self.check_length(part.text, before + reached.get(), work.most)?;
        }
        let ids = encoded?;
        Ok(match self.tokenizer.frame().filter(|_| special) {
            Some((first, last)) => [first.as_slice(), &ids, last].concat(),
            None => ids,
        })
    }

    /// Returns the ids of each text. All pieces must have been encoded.
    ///
    /// # Errors
    /// A piece was not encoded.
    pub(crate) fn finish(&self, work: &Work) -> Result<Vec<Vec<i32>>, TextError> {
        let missing = || TextError::Encode("a part of the text was not encoded".to_owned());
        let frame = work.add_special_tokens.then(|| self.tokenizer.frame()).flatten();
        let mut parts = work.parts.iter().peekable();
        let mut all = Vec::with_capacity(work.texts.len());
        for (index, text) in work.texts.iter().enumerate() {
            let mut ids = Vec::new();
            let mut in_parts = false;
            while let Some(part) = parts.next_if(|part| part.text == index) {
                in_parts = part.range.len() < text.len();
                if let Some((before, _)) = frame.filter(|_| in_parts && part.range.start == 0) {
                    ids.extend_from_slice(before);
                }
                ids.extend_from_slice(part.ids.get().ok_or_else(missing)?);
            }
            if let Some((_, after)) = frame.filter(|_| in_parts) {
                ids.extend_from_slice(after);
            }
            all.push(ids);
        }
        Ok(all)
    }
}

impl Work {
    /// The number of pieces, which can be encoded one by one.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// True if encoding this piece takes so long that it needs a separate thread, so that it delays
    /// no other text.
    pub(crate) fn is_long(&self, piece: usize) -> bool {
        self.parts[self.pieces[piece].clone()].iter().any(Part::is_long)
    }
}

fn check_divided(bytes: usize) -> Result<(), TextError> {
    match bytes {
        0..=LONGEST_WORD => Ok(()),
        bytes => Err(TextError::Undivided { bytes, limit: LONGEST_WORD }),
    }
}

/// Finds the next cut like [`Cuts::next`], but not inside or next to a range of `plain`, where the
/// text only looks like a special token.
fn next_cut(
    cuts: &Cuts,
    text: &str,
    plain: &[Range<usize>],
    mut token: usize,
    mut anywhere: usize,
) -> Option<usize> {
    loop {
        let place = cuts.next(text, token, anywhere)?;
        let at = plain.partition_point(|range| range.end <= place);
        match plain.get(at) {
            Some(range) if range.start <= place => {
                (token, anywhere) = (range.end, anywhere.max(range.end));
            }
            _ => return Some(place),
        }
    }
}

impl Part {
    fn new(text: usize, range: Range<usize>, kept: bool) -> Self {
        Self { text, range, kept, ids: OnceLock::new() }
    }

    fn is_long(&self) -> bool {
        self.range.len() >= LONG_BYTES && self.ids.get().is_none()
    }
}
