//! Converts token ids to text, one id at a time.

use std::sync::Arc;

use crate::scheme::Scheme;
use crate::tokenizer::{Kind, Tokenizer};

/// The largest number of tokens in a window that has produced no text; then the window is closed.
/// This bounds the cost of a token for decoders that never produce text.
const WINDOW_LIMIT: usize = 64;

/// Converts the ids of one request to text, one id at a time.
///
/// The concatenated pieces equal the output of [`Tokenizer::decode`] for all ids at once. Each id
/// costs amortised O(1). Text is returned as soon as it is final; only the bytes of an incomplete
/// character are held back.
///
/// The pieces can differ from that output for a byte-fallback (SentencePiece style) tokenizer. If a
/// run of byte tokens contains any invalid UTF-8, decoding all at once turns every byte of the run
/// into U+FFFD. A stream has already returned the run's first complete characters, and returns
/// U+FFFD from the first invalid byte on. Ids of real text have no invalid runs. But a model can
/// sample an invalid run, and a length limit can cut a run. Some decoders need more than a single
/// token's text (WordPiece, CTC, ...). For them a window of the last tokens is decoded again at
/// each id. This is exact if a token does not change text before its predecessor.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// Special tokens that are kept in the text even if special tokens are skipped, ascending.
    shown: Arc<[i32]>,
    state: State,
}

#[derive(Debug)]
enum State {
    Bytes(Incomplete),
    Pieces(PiecesState),
    Window(Window),
}

impl Detokenizer {
    /// Creates a detokenizer at the start of a text. With `skip_special_tokens`, special tokens
    /// produce no text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Self::showing(tokenizer, skip_special_tokens, Arc::default())
    }

    /// Creates a detokenizer that keeps the special tokens `shown` (ascending) in the text.
    pub fn showing(
        tokenizer: Arc<Tokenizer>,
        skip_special_tokens: bool,
        shown: Arc<[i32]>,
    ) -> Self {
        let state = match tokenizer.scheme() {
            Scheme::Bytes => State::Bytes(Incomplete::default()),
            Scheme::Pieces(pieces) => State::Pieces(PiecesState {
                at_start: true,
                strip_left: pieces.strip_left,
                run: Vec::new(),
                run_is_broken: false,
            }),
            Scheme::Window => State::Window(Window::default()),
        };
        Self { tokenizer, skip_special_tokens, shown, state }
    }

    /// Appends the text that becomes final with this id to `out`. There may be none if the id adds
    /// only part of a character. An id without a token is ignored.
    pub fn push(&mut self, id: i32, out: &mut String) {
        let Ok(unsigned) = u32::try_from(id) else { return };
        let (kind, bytes) = self.tokenizer.piece(unsigned);
        let skipped = self.skip_special_tokens && self.tokenizer.is_special(id);
        if kind == Kind::Missing || skipped && self.shown.binary_search(&id).is_err() {
            return;
        }
        match &mut self.state {
            State::Bytes(incomplete) => incomplete.push(bytes, out),
            State::Pieces(state) => state.push(&self.tokenizer, unsigned, out),
            State::Window(window) => window.push(&self.tokenizer, unsigned, out),
        }
    }

    /// Appends the bytes that were held back, at the end of the text. An incomplete character
    /// becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        match &mut self.state {
            State::Bytes(incomplete) => incomplete.finish(out),
            State::Pieces(state) => state.end_run(out),
            State::Window(window) => window.flush(&self.tokenizer, out),
        }
    }
}

/// The bytes of an incomplete character: at most three between pushes.
#[derive(Debug, Default)]
struct Incomplete(Vec<u8>);

impl Incomplete {
    /// Reads `bytes` after the bytes that were held back, and replaces invalid ones as
    /// `String::from_utf8_lossy` does. The extent of an invalid sequence does not depend on later
    /// bytes, so reading in parts gives the same result.
    fn push(&mut self, bytes: &[u8], out: &mut String) {
        if self.0.is_empty() {
            let rest = read_lossy(bytes, out);
            self.0.extend_from_slice(rest);
        } else {
            self.0.extend_from_slice(bytes);
            let rest = read_lossy(&self.0, out).len();
            self.0.drain(..self.0.len() - rest);
        }
    }

    fn finish(&mut self, out: &mut String) {
        out.push_str(&String::from_utf8_lossy(&self.0));
        self.0.clear();
    }
}

/// Appends `bytes` as text, and returns the bytes of an incomplete character at their end.
fn read_lossy<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                out.push_str(&String::from_utf8_lossy(valid));
                let Some(wrong) = error.error_len() else { return rest };
                out.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[wrong..];
            }
        }
    }
}

/// The state of a SentencePiece-style text.
#[derive(Debug)]
struct PiecesState {
    /// True before the first token.
    at_start: bool,
    /// The character to strip from the start of the text, and how many may still be stripped.
    strip_left: Option<(char, usize)>,
    /// The bytes of a run of byte tokens that do not form a complete character yet.
    run: Vec<u8>,
    /// True if the run had an invalid byte, so each further byte of it becomes U+FFFD.
    run_is_broken: bool,
}

impl PiecesState {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        let first = std::mem::take(&mut self.at_start);
        if first && let Some(text) = first_piece(tokenizer, id) {
            return self.text(&text, out);
        }
        match tokenizer.piece(id) {
            (Kind::Byte, bytes) => bytes.iter().for_each(|&byte| self.byte(byte, out)),
            (_, bytes) => self.text(bytes, out),
        }
    }

    fn text(&mut self, bytes: &[u8], out: &mut String) {
        self.end_run(out);
        self.give(&String::from_utf8_lossy(bytes), out);
    }

    fn byte(&mut self, byte: u8, out: &mut String) {
        self.run.push(byte);
        if self.run_is_broken {
            return self.give_run_as_broken(out);
        }
        match std::str::from_utf8(&self.run) {
            Ok(text) => {
                let text = text.to_owned();
                self.run.clear();
                self.give(&text, out);
            }
            Err(error) if error.error_len().is_none() => {}
            Err(_) => {
                self.run_is_broken = true;
                self.give_run_as_broken(out);
            }
        }
    }

    fn end_run(&mut self, out: &mut String) {
        self.give_run_as_broken(out);
        self.run_is_broken = false;
    }

    fn give_run_as_broken(&mut self, out: &mut String) {
        for _ in 0..self.run.len() {
            self.give("\u{fffd}", out);
        }
        self.run.clear();
    }

    /// Appends final text, without the characters to strip from the start.
    fn give(&mut self, mut text: &str, out: &mut String) {
        while let Some((cut, times @ 1..)) = self.strip_left {
            if text.is_empty() {
                return;
            }
            match text.strip_prefix(cut) {
                Some(rest) => {
                    text = rest;
                    self.strip_left = Some((cut, times - 1));
                }
                None => self.strip_left = None,
            }
        }
        out.push_str(text);
    }
}

/// The bytes that a token adds at the start of a text; `None` if they are the same as elsewhere in
/// a text.
fn first_piece(tokenizer: &Tokenizer, id: u32) -> Option<Vec<u8>> {
    let Scheme::Pieces(pieces) = tokenizer.scheme() else { return None };
    let token = pieces.first_differs().then(|| tokenizer.decoded_token(id))??;
    match pieces.piece(&token, true) {
        crate::scheme::Piece::Text(text) => Some(text),
        crate::scheme::Piece::Byte(_) => None,
    }
}

/// The last tokens of a text, which are decoded again for each new token.
///
/// The text of the leading tokens was returned already. The text of the new tokens depends on them,
/// for instance whether it starts with a space.
#[derive(Debug, Default)]
struct Window {
    ids: Vec<u32>,
    /// The number of leading `ids` whose text was returned.
    given: usize,
}

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        self.ids.push(id);
        let text = self.text(tokenizer, self.ids.len());
        let fresh = self.fresh(tokenizer, &text);
        let incomplete = fresh.is_empty() || fresh.ends_with(char::REPLACEMENT_CHARACTER);
        if !incomplete || self.ids.len() - self.given >= WINDOW_LIMIT {
            out.push_str(fresh);
            self.ids.drain(..self.given);
            self.given = self.ids.len();
        }
    }

    fn flush(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        let text = self.text(tokenizer, self.ids.len());
        out.push_str(self.fresh(tokenizer, &text));
        self.given = self.ids.len();
    }

    /// Decodes the first `count` tokens. The text is empty if the decoder fails.
    fn text(&self, tokenizer: &Tokenizer, count: usize) -> String {
        tokenizer.decode_unsigned(&self.ids[..count], false).unwrap_or_default()
    }

    /// Returns the part of `text` that was not returned yet.
    fn fresh<'a>(&self, tokenizer: &Tokenizer, text: &'a str) -> &'a str {
        let before = self.text(tokenizer, self.given);
        let common = text.char_indices().zip(before.chars()).find(|((_, a), b)| a != b);
        let same = common.map_or_else(|| before.len().min(text.len()), |((at, _), _)| at);
        &text[same..]
    }
}
