//! A Hugging Face tokenizer, with a table of the bytes that each token adds to the text.

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{Encoding, Model as _, Token};

use crate::added;
use crate::backend::{Backend, Fast};
use crate::cut::Cuts;
use crate::error::TextError;
use crate::growth::Growth;
use crate::measure::Measure;
use crate::plain::Plain;
use crate::scheme::{Piece, Scheme};

/// The largest allowed id. A larger id means that the file is broken; the table has an entry for
/// each id up to the largest.
const LARGEST_ID: u32 = (1 << 24) - 1;

/// A tokenizer loaded from `tokenizer.json`. Immutable; share it in an [`Arc`](std::sync::Arc).
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The fast encoder, used in place of the encoder of `inner` for texts that it supports.
    fast: Option<Fast>,
    scheme: Scheme,
    table: Table,
    cuts: Cuts,
    frame: Option<Frame>,
    measure: Measure,
    growth: Growth,
    plain: Plain,
}

/// The ids that the post-processor adds before and after the ids of a text.
pub(crate) type Frame = (Vec<i32>, Vec<i32>);

/// The bytes that each id adds to the text: all bytes concatenated, and for each id its end and
/// kind.
#[derive(Debug, Default)]
struct Table {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    special: Vec<bool>,
}

/// The kind of an id in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No token has this id.
    Missing,
    /// A token with its own text.
    Text,
    /// One byte of a byte-fallback run.
    Byte,
}

impl Table {
    fn push(&mut self, kind: Kind, special: bool, bytes: &[u8]) -> Result<(), TextError> {
        self.bytes.extend_from_slice(bytes);
        let end = u32::try_from(self.bytes.len())
            .map_err(|_| TextError::Load("the vocabulary is larger than 4 GiB".to_owned()))?;
        self.ends.push(end);
        self.kinds.push(kind);
        self.special.push(special);
        Ok(())
    }

    fn get(&self, id: u32) -> (Kind, &[u8]) {
        let id = id as usize;
        let Some(&kind) = self.kinds.get(id) else { return (Kind::Missing, &[]) };
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        (kind, &self.bytes[start as usize..self.ends[id] as usize])
    }

    /// Returns the bytes of `id`, or `None` above the largest id.
    fn get_any(&self, id: u32) -> Option<&[u8]> {
        ((id as usize) < self.kinds.len()).then(|| self.get(id).1)
    }
}

impl Tokenizer {
    /// Loads a `tokenizer.json` for [`Backend::Hf`].
    ///
    /// # Errors
    /// [`TextError::Load`] if the file cannot be read or is not a tokenizer.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        Self::from_file_for(path, Backend::Hf)
    }

    /// Loads a `tokenizer.json`.
    ///
    /// The padding and truncation in the file are switched off, as transformers does for a single
    /// text.
    ///
    /// # Errors
    /// [`TextError::Load`] if the file cannot be read, is not a tokenizer, or is not supported by
    /// this backend.
    pub fn from_file_for(path: &Path, backend: Backend) -> Result<Self, TextError> {
        Self::from_file_with(path, backend, &Map::new())
    }

    /// Loads a `tokenizer.json`, and adds the tokens that are only in `config`, the content of the
    /// model's `tokenizer_config.json`. They get the same ids as in transformers.
    ///
    /// # Errors
    /// The same errors as [`Tokenizer::from_file_for`].
    pub fn from_file_with(
        path: &Path,
        backend: Backend,
        config: &Map<String, Value>,
    ) -> Result<Self, TextError> {
        let json = std::fs::read(path)
            .map_err(|error| TextError::Load(format!("{}: {error}", path.display())))?;
        Self::from_bytes_with(&json, backend, config).map_err(|error| match error {
            TextError::Load(why) => TextError::Load(format!("{}: {why}", path.display())),
            other => other,
        })
    }

    /// Loads a tokenizer for [`Backend::Hf`] from the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Load`] if this is not a tokenizer.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        Self::from_bytes_with(json, Backend::Hf, &Map::new())
    }

    /// Loads a tokenizer from the contents of a `tokenizer.json` and a `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TextError::Load`] if this is not a tokenizer, or is not supported by this backend.
    pub fn from_bytes_with(
        json: &[u8],
        backend: Backend,
        config: &Map<String, Value>,
    ) -> Result<Self, TextError> {
        let load = |error: &dyn std::fmt::Display| TextError::Load(error.to_string());
        let json = json.strip_prefix("\u{feff}".as_bytes()).unwrap_or(json);
        let mut file: Value = serde_json::from_slice(json).map_err(|error| load(&error))?;
        let mut growth = Growth::new(&file)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| load(&error))?;
        inner.with_truncation(None).map_err(|error| load(&error))?;
        inner.with_padding(None);
        if added::add(&mut inner, config)? {
            let tokens = serde_json::to_value(inner.get_added_vocabulary());
            file["added_tokens"] = tokens.map_err(|error| load(&error))?;
            growth = Growth::new(&file)?;
        }

        let decoder = inner.get_decoder().map(serde_json::to_value).transpose();
        let scheme = Scheme::of_decoder(decoder.map_err(|error| load(&error))?.as_ref());

        let vocabulary = inner.get_vocab(true);
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let largest = vocabulary.values().chain(added.keys()).copied().max();
        if largest > Some(LARGEST_ID) {
            return Err(TextError::Load(format!("a token has an id above {LARGEST_ID}")));
        }
        let mut table = Table::default();
        for id in 0..largest.map_or(0, |id| id + 1) {
            let Some(token) = decoded_token(&inner, id) else {
                table.push(Kind::Missing, false, &[])?;
                continue;
            };
            let special = inner.get_added_vocabulary().is_special_token(&token);
            match scheme.piece(&token) {
                Piece::Text(bytes) => table.push(Kind::Text, special, &bytes)?,
                Piece::Byte(byte) => table.push(Kind::Byte, special, &[byte])?,
            }
        }
        let cuts = Cuts::of(&file);
        let pieces = (0..).map_while(|id| table.get_any(id)).filter(|piece| !piece.is_empty());
        let measure = Measure::of(&file, &scheme, pieces);
        let plain = Plain::new(&inner)?;
        let fast = match backend {
            Backend::Hf => None,
            Backend::Fastokens if scheme == Scheme::Bytes => Some(Fast::new(file, &inner)?),
            Backend::Fastokens => {
                // fastokens treats text that looks like a byte token as that byte.
                let why = "fastokens supports only byte-level tokenizers";
                return Err(TextError::Load(why.to_owned()));
            }
        };
        let frame = frame(&inner)?;
        Ok(Self { inner, fast, scheme, table, cuts, frame, measure, growth, plain })
    }

    /// Returns the ids of `text`. Special tokens in the text are recognised, as in Hugging Face's
    /// library. `add_special_tokens` runs the post-processor, which adds a leading bos token, for
    /// example.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the vocabulary has neither a token for a part of the text nor an
    /// unknown token, or if the normaliser may make the text too long.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<i32>, TextError> {
        self.growth.check(text.len())?;
        if let Some(fast) = self.fast.as_ref().filter(|fast| fast.takes(text)) {
            return fast.encode(text, add_special_tokens);
        }
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TextError::Encode(error.to_string()))?;
        // No id is above `LARGEST_ID`, so the cast does not overflow.
        Ok(encoding.get_ids().iter().map(|id| id.cast_signed()).collect())
    }

    /// Returns a lower bound on the number of ids of `text`, without the post-processor's ids. It
    /// takes one pass over the bytes. It is 0 for a tokenizer that may drop text.
    ///
    /// If each byte has a token (byte-level BPE, and SentencePiece's BPE with byte fallback), each
    /// byte counts as one over the length of the longest token that contains it. If the normaliser
    /// composes characters (NFC), characters outside ASCII count only a quarter. For a Unigram
    /// tokenizer only ASCII letters and digits count, each as one over the length of the longest
    /// token. For WordPiece and WordLevel each word counts as one.
    pub fn fewest_ids(&self, text: &str) -> usize {
        self.measure.fewest(text)
    }

    /// Returns the ids of `text` like [`Tokenizer::encode`], but without the post-processor's ids.
    /// Special tokens that touch one of the ranges in `plain` (of bytes, sorted, not overlapping)
    /// are encoded as ordinary text.
    pub(crate) fn encode_plain(
        &self,
        text: &str,
        plain: &[Range<usize>],
        go_on: &dyn Fn(usize) -> bool,
    ) -> Result<Vec<i32>, TextError> {
        self.growth.check(text.len())?;
        self.plain.encode(&self.inner, text, plain, go_on)
    }

    /// Returns the ids of `text` like [`Tokenizer::encode`], but without the post-processor's ids,
    /// and with special tokens encoded as ordinary text.
    ///
    /// # Errors
    /// The same errors as [`Tokenizer::encode`].
    pub fn encode_as_text(&self, text: &str) -> Result<Vec<i32>, TextError> {
        self.encode_plain(text, std::slice::from_ref(&(0..text.len())), &|_| true)
    }

    /// True if each token adds its [`Tokenizer::token_bytes`] to the text, except possibly at the
    /// start of a text.
    pub fn adds_bytes(&self) -> bool {
        !matches!(self.scheme, Scheme::Window)
    }

    /// Returns the ranges of `text` that spell a special token and touch one of `client` (sorted
    /// ranges).
    pub(crate) fn spelled(&self, text: &str, client: &[Range<usize>]) -> Vec<Range<usize>> {
        self.plain.spelled(text, client)
    }

    /// Returns the ids of the special tokens for whose text `wanted` returns true, ascending.
    pub fn special_ids(&self, wanted: impl Fn(&str) -> bool) -> Vec<i32> {
        let ids = 0..i32::try_from(self.vocab_size()).unwrap_or(i32::MAX);
        let special = ids.filter(|&id| self.is_special(id));
        special.filter(|&id| self.id_to_token(id).is_some_and(|token| wanted(&token))).collect()
    }

    /// Returns the texts of all special tokens.
    pub(crate) fn special_texts(&self) -> Vec<String> {
        let added = self.inner.get_added_vocabulary();
        let tokens = added.get_added_tokens_decoder().values().map(|token| &token.content);
        tokens.filter(|content| added.is_special_token(content)).cloned().collect()
    }

    /// Returns the ids that are at least `limit`, in ascending order, with their tokens. A model
    /// whose embedding has `limit` rows has no rows for these ids.
    pub fn ids_from(&self, limit: u32) -> Vec<(i32, String)> {
        let all = limit..u32::try_from(self.vocab_size()).unwrap_or(u32::MAX);
        let token = |id: u32| Some((id.cast_signed(), self.inner.id_to_token(id)?));
        all.filter_map(token).collect()
    }

    /// Returns the ids of two texts as one prompt, and the index at which the second text begins.
    /// The post-processor's ids around and between the texts are included.
    ///
    /// # Errors
    /// The same errors as [`Tokenizer::encode`].
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<(Vec<i32>, u32), TextError> {
        self.growth.check(first.len() + second.len())?;
        let encoding = self
            .inner
            .encode_fast((first, second), true)
            .map_err(|error| TextError::Encode(error.to_string()))?;
        let types = encoding.get_type_ids();
        let begins = types.iter().position(|&kind| kind == 1).unwrap_or(types.len());
        let ids = encoding.get_ids().iter().map(|id| id.cast_signed()).collect();
        Ok((ids, u32::try_from(begins).unwrap_or(u32::MAX)))
    }

    /// Returns the text of `ids`, which equals the output of Hugging Face's `decode`. Ids without a
    /// token are ignored.
    ///
    /// # Errors
    /// [`TextError::Decode`] if the decoder rejects the tokens.
    pub fn decode(&self, ids: &[i32], skip_special_tokens: bool) -> Result<String, TextError> {
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        self.decode_unsigned(&ids, skip_special_tokens)
    }

    pub(crate) fn decode_unsigned(&self, ids: &[u32], skip: bool) -> Result<String, TextError> {
        self.inner.decode(ids, skip).map_err(|error| TextError::Decode(error.to_string()))
    }

    /// Returns the text of this single token, for log-probabilities. A part of a character is shown
    /// as U+FFFD. The text is empty for an id without a token.
    pub fn token_text(&self, id: i32) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }

    /// Returns the bytes of this single token, for log-probabilities. For a special token these are
    /// the bytes of its name. There are none for an id without a token.
    pub fn token_bytes(&self, id: i32) -> Vec<u8> {
        let Ok(id) = u32::try_from(id) else { return Vec::new() };
        match self.scheme {
            Scheme::Bytes | Scheme::Pieces(_) => self.table.get(id).1.to_vec(),
            Scheme::Window => self.decode_unsigned(&[id], false).unwrap_or_default().into_bytes(),
        }
    }

    /// Returns the token with this id, as the vocabulary spells it.
    pub fn id_to_token(&self, id: i32) -> Option<String> {
        self.inner.id_to_token(u32::try_from(id).ok()?)
    }

    /// Returns the id of a token, which is given as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<i32> {
        self.inner.token_to_id(token).map(u32::cast_signed)
    }

    /// Returns the largest id plus 1. The model's own vocabulary may be larger (padded).
    pub fn vocab_size(&self) -> usize {
        self.table.kinds.len()
    }

    /// True if this is a special token, which decoding can skip.
    pub fn is_special(&self, id: i32) -> bool {
        let id = usize::try_from(id).ok();
        id.and_then(|id| self.table.special.get(id)).copied().unwrap_or(false)
    }

    /// Returns the positions at which texts may be cut.
    pub(crate) fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    /// Returns the ids that the post-processor adds, if they are the same for every text.
    pub(crate) fn frame(&self) -> Option<&Frame> {
        self.frame.as_ref()
    }

    #[cfg(test)]
    pub(crate) fn measure(&self) -> &Measure {
        &self.measure
    }

    pub(crate) fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// Returns the token that decoding uses for `id`.
    pub(crate) fn decoded_token(&self, id: u32) -> Option<String> {
        decoded_token(&self.inner, id)
    }

    /// Returns the kind of `id`, and the bytes that it adds to the text.
    pub(crate) fn piece(&self, id: u32) -> (Kind, &[u8]) {
        self.table.get(id)
    }
}

/// Returns the token that decoding uses for `id`. If an added token is matched in normalised text,
/// its normalised form is returned here, unlike in `id_to_token`.
fn decoded_token(inner: &tokenizers::Tokenizer, id: u32) -> Option<String> {
    let added = inner.get_added_vocabulary().simple_id_to_token(id);
    added.or_else(|| inner.get_model().id_to_token(id))
}

/// Returns the ids that the post-processor adds around the ids of a text, found by processing an id
/// that no token has. `None` if the post-processor changes the ids in any other way.
fn frame(inner: &tokenizers::Tokenizer) -> Result<Option<Frame>, TextError> {
    const TEXT: u32 = u32::MAX;
    let text = Encoding::from_tokens(vec![Token::new(TEXT, "a".to_owned(), (0, 1))], 0);
    let framed = inner
        .post_process(text, None, true)
        .map_err(|error| TextError::Load(format!("the post-processor: {error}")))?;
    let ids = framed.get_ids();
    let signed = |ids: &[u32]| ids.iter().map(|id| id.cast_signed()).collect::<Vec<i32>>();
    let mut around = ids.split(|&id| id == TEXT).map(signed);
    Ok(match (around.next(), around.next(), around.next()) {
        (Some(before), Some(after), None) => Some((before, after)),
        _ => None,
    })
}
