//! Encoding in parts: what was encoded before is looked up, what is long is cut.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::cache::TextCache;
use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// Long texts are encoded in parts of at least this many bytes: large enough that cutting costs nothing, small enough
/// that a short text does not wait long behind one part (a few milliseconds). Parts of less than 16 KB are encoded by
/// fastokens on the calling thread alone.
const PART_BYTES: usize = 8 << 10;
/// Texts below this are encoded whole without a look at the cache, and parts of this size are what it keeps: encoding
/// so little costs about as much as finding out that it need not be encoded.
const KEPT_BYTES: usize = 2 << 10;

/// A tokenizer with the memory of what it encoded.
#[derive(Debug)]
pub struct Encoder {
    tokenizer: Arc<Tokenizer>,
    cache: Option<TextCache>,
}

/// Texts on their way to ids: a list of parts, each of which can be encoded by itself, in any order.
#[derive(Debug)]
pub(crate) struct Work {
    texts: Vec<String>,
    add_special_tokens: bool,
    parts: Vec<Part>,
    /// Parts that are encoded one after the other, about [`PART_BYTES`] together.
    pieces: Vec<Range<usize>>,
}

#[derive(Debug)]
struct Part {
    text: usize,
    range: Range<usize>,
    /// It goes into the cache.
    kept: bool,
    ids: OnceLock<Arc<[i32]>>,
}

impl Encoder {
    /// An encoder that keeps at most `cache_bytes` of what it encoded; none with 0.
    pub fn new(tokenizer: Arc<Tokenizer>, cache_bytes: usize) -> Self {
        let cached = cache_bytes > 0 && !tokenizer.cuts().is_empty();
        Self { tokenizer, cache: cached.then(|| TextCache::new(cache_bytes)) }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The ids of `text`, as [`Tokenizer::encode`] gives them.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i32>, TextError> {
        if text.len() < KEPT_BYTES {
            return self.tokenizer.encode(text, add_special_tokens);
        }
        let work = self.plan(vec![text.to_owned()], add_special_tokens);
        for piece in 0..work.pieces() {
            self.encode_piece(&work, piece)?;
        }
        Ok(self.finish(&work)?.pop().unwrap_or_default())
    }

    /// Bytes of text looked up in the cache and found there so far, and bytes that it uses now.
    pub fn cache_counts(&self) -> (u64, u64, usize) {
        self.cache.as_ref().map_or((0, 0, 0), TextCache::counts)
    }

    /// Cuts texts into parts and looks up what is known of them.
    pub(crate) fn plan(&self, texts: Vec<String>, add_special_tokens: bool) -> Work {
        let mut parts = Vec::new();
        let cuttable = !add_special_tokens || self.tokenizer.frame().is_some();
        for (index, text) in texts.iter().enumerate() {
            if cuttable {
                self.cut(index, text, &mut parts);
            } else {
                parts.push(Part::new(index, 0..text.len(), false));
            }
        }
        let mut pieces = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for (at, part) in parts.iter().enumerate() {
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
        Work { texts, add_special_tokens, parts, pieces }
    }

    fn cut(&self, index: usize, text: &str, parts: &mut Vec<Part>) {
        let cuts = self.tokenizer.cuts();
        let (token, anywhere) = match self.cache {
            Some(_) => (KEPT_BYTES, PART_BYTES),
            None => (PART_BYTES, PART_BYTES),
        };
        let from = parts.len();
        let mut start = 0;
        // Where a part ends depends on nothing that comes after it: equal beginnings have equal parts.
        while text.len() - start > token
            && let Some(end) = cuts.next(text, start + token, start + anywhere)
        {
            parts.push(Part::new(index, start..end, self.cache.is_some()));
            start = end;
        }
        // The last part ends where the text does, which the next turn moves.
        parts.push(Part::new(index, start..text.len(), false));
        if let Some(cache) = &self.cache {
            let kept = &parts[from..parts.len() - 1];
            let kept: Vec<&str> = kept.iter().map(|part| &text[part.range.clone()]).collect();
            if kept.is_empty() {
                return;
            }
            for (part, known) in parts[from..].iter_mut().zip(cache.get_all(&kept)) {
                if let Some(ids) = known {
                    part.ids = OnceLock::from(ids);
                }
            }
        }
    }

    /// Encodes what is not known of a piece.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub(crate) fn encode_piece(&self, work: &Work, piece: usize) -> Result<(), TextError> {
        for part in &work.parts[work.pieces[piece].clone()] {
            if part.ids.get().is_some() {
                continue;
            }
            let text = &work.texts[part.text];
            let is_whole = part.range.len() == text.len();
            let special = is_whole && work.add_special_tokens;
            let part_text = &text[part.range.clone()];
            let ids: Arc<[i32]> = self.tokenizer.encode(part_text, special)?.into();
            if let Some(cache) = self.cache.as_ref().filter(|_| part.kept) {
                cache.insert(part_text, Arc::clone(&ids));
            }
            // A piece is encoded once.
            let _ = part.ids.set(ids);
        }
        Ok(())
    }

    /// The ids of each text, all pieces of which have been encoded.
    ///
    /// # Errors
    /// A piece has not been.
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
    /// In how many pieces this is encoded.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces.len()
    }
}

impl Part {
    fn new(text: usize, range: Range<usize>, kept: bool) -> Self {
        Self { text, range, kept, ids: OnceLock::new() }
    }
}
