//! How a tokenizer's decoder converts tokens to text. The scheme is detected once, when the
//! tokenizer is loaded.
//!
//! Hugging Face's decoders take the whole list of tokens. For the common decoders, the same text
//! can be built token by token from a table, whose entries this module computes. Tokens of other
//! decoders are decoded in windows; see [`crate::Detokenizer`].

use serde_json::Value;

/// How tokens become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Byte level: a token is a sequence of bytes. The text is all bytes together, decoded as lossy
    /// UTF-8.
    Bytes,
    /// SentencePiece style: a token is a piece of text, or one byte of a character that has no
    /// token.
    Pieces(Pieces),
    /// Any other decoder.
    Window,
}

/// A SentencePiece-style decoder: changes of each token, then of the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// Literal replacements in each token, in order.
    replace: Vec<(String, String)>,
    /// The character that replaces spaces, if the decoder is a `Metaspace`.
    metaspace: Option<char>,
    /// True if the `Metaspace` decoder drops that character from the first token.
    metaspace_drops_first: bool,
    /// True if tokens of the form `<0x0A>` are bytes.
    byte_fallback: bool,
    /// The character to strip from the start of the text, and how often it is stripped at most.
    pub(crate) strip_left: Option<(char, usize)>,
}

/// The bytes that one token adds to the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// The token's own text. For [`Scheme::Bytes`], bytes that may be part of a character.
    Text(Vec<u8>),
    /// One byte of a run of byte-fallback tokens.
    Byte(u8),
}

impl Scheme {
    /// Detects the scheme from the decoder in `tokenizer.json`.
    pub(crate) fn of_decoder(decoder: Option<&Value>) -> Self {
        let mut steps = Vec::new();
        if let Some(decoder) = decoder {
            flatten(decoder, &mut steps);
        }
        match steps.as_slice() {
            [] => Self::Window,
            [only] if kind(only) == "ByteLevel" => Self::Bytes,
            steps => Pieces::of_steps(steps).map_or(Self::Window, Self::Pieces),
        }
    }

    /// Returns the bytes that `token` adds to the text, unless it is the first token.
    pub(crate) fn piece(&self, token: &str) -> Piece {
        match self {
            Self::Bytes => Piece::Text(byte_level_bytes(token)),
            Self::Pieces(pieces) => pieces.piece(token, false),
            Self::Window => Piece::Text(token.as_bytes().to_vec()),
        }
    }
}

impl Pieces {
    /// Returns the decoder with these steps, if its text can be built token by token.
    fn of_steps(steps: &[&Value]) -> Option<Self> {
        let mut pieces = Self::default();
        let mut fused = false;
        for (at, step) in steps.iter().enumerate() {
            match kind(step) {
                // Before the byte fallback, a replacement applies to each token separately, so the
                // table can include it.
                "Replace" if !fused && !pieces.byte_fallback => {
                    let pattern = step["pattern"]["String"].as_str().filter(|p| !p.is_empty())?;
                    let content = step["content"].as_str()?;
                    pieces.replace.push((pattern.to_owned(), content.to_owned()));
                }
                "Metaspace" if at == 0 => {
                    let mut chars = step["replacement"].as_str()?.chars();
                    pieces.metaspace = Some(chars.next().filter(|_| chars.next().is_none())?);
                    pieces.metaspace_drops_first = step["prepend_scheme"] != "never";
                }
                "ByteFallback" if !fused => pieces.byte_fallback = true,
                "Fuse" => fused = true,
                "Strip" if fused && pieces.strip_left.is_none() && step["stop"] == 0 => {
                    let content = step["content"].as_str()?.chars().next()?;
                    let start = usize::try_from(step["start"].as_u64()?).ok()?;
                    pieces.strip_left = Some((content, start));
                }
                _ => return None,
            }
        }
        Some(pieces)
    }

    /// Returns the bytes that `token` adds to the text. The `first` token of a text may add other
    /// bytes than a later one.
    pub(crate) fn piece(&self, token: &str, first: bool) -> Piece {
        let mut text = token.to_owned();
        if let Some(space) = self.metaspace {
            let drop = first && self.metaspace_drops_first;
            text = text.replace(space, if drop { "" } else { " " });
        }
        for (pattern, content) in &self.replace {
            text = text.replace(pattern, content);
        }
        match fallback_byte(&text).filter(|_| self.byte_fallback) {
            Some(byte) => Piece::Byte(byte),
            None => Piece::Text(text.into_bytes()),
        }
    }

    /// True if [`Pieces::piece`] must be used instead of the table for the first token of a text.
    pub(crate) fn first_differs(&self) -> bool {
        self.metaspace.is_some() && self.metaspace_drops_first
    }
}

fn flatten<'a>(decoder: &'a Value, steps: &mut Vec<&'a Value>) {
    match decoder["decoders"].as_array().filter(|_| kind(decoder) == "Sequence") {
        Some(inner) => inner.iter().for_each(|step| flatten(step, steps)),
        None => steps.push(decoder),
    }
}

fn kind(decoder: &Value) -> &str {
    decoder["type"].as_str().unwrap_or_default()
}

/// Returns the byte that a byte-fallback token such as `<0x0A>` represents.
///
/// As lenient as the reference: accepts any two characters that `from_str_radix` reads, even `+A`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Returns the bytes of a byte-level token. If a character of the token represents no byte, returns
/// the UTF-8 bytes of the token instead: added tokens may contain a space or `｜`.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into())
}

/// Returns the byte that a character of the byte-level alphabet represents (the inverse of GPT-2's
/// `bytes_to_unicode`). Printable Latin-1 characters represent themselves. The other 68 bytes are
/// represented by the characters from U+0100 on, in order.
pub(crate) fn byte_of_char(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_byte_alphabet_is_a_bijection_onto_all_bytes() {
        let mut bytes: Vec<u8> =
            (0..0x400).filter_map(char::from_u32).filter_map(byte_of_char).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
    }

    #[test]
    fn llama_and_gemma_decoders_are_pieces() {
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let llama = json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]});
        let Scheme::Pieces(pieces) = Scheme::of_decoder(Some(&llama)) else {
            panic!("not recognised")
        };
        assert_eq!(pieces.strip_left, Some((' ', 1)));
        assert_eq!(pieces.piece("▁a▁", true), Piece::Text(b" a ".to_vec()));
        assert_eq!(pieces.piece("<0x0A>", false), Piece::Byte(10));
        assert_eq!(pieces.piece("<0xZZ>", false), Piece::Text(b"<0xZZ>".to_vec()));
    }

    #[test]
    fn steps_that_need_the_whole_text_are_left_to_windows() {
        let fuse = json!({"type": "Fuse"});
        let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b"});
        let regex = json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"});
        let cut_end = json!({"type": "Strip", "content": " ", "start": 0, "stop": 1});
        for steps in [vec![&fuse, &replace], vec![&regex], vec![&fuse, &cut_end], vec![&cut_end]] {
            let decoder = json!({"type": "Sequence", "decoders": steps});
            assert_eq!(Scheme::of_decoder(Some(&decoder)), Scheme::Window, "{decoder}");
        }
        assert_eq!(Scheme::of_decoder(None), Scheme::Window);
        assert_eq!(Scheme::of_decoder(Some(&json!({"type": "WordPiece"}))), Scheme::Window);
    }
}
