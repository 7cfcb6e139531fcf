//! The libraries that encode text.

use std::fmt;

use serde_json::Value;

use crate::error::TextError;

/// Text that tokenizers tend to encode differently. A fast backend is used only if it encodes the
/// text like the reference.
const SAMPLE: &str = "Hello, world! It's 12345.67 o'clock; we'LL see... \
\n\n\t def f(x):\r\n        return {'é': \"ñ\", 'ﬁ': ½}  # 100%\n\n\n\
日本語のテキスト。中文文本，也在这里！한국어 텍스트 नमस्ते दुनिया สวัสดี مرحبا שלום Привет Ωμέγα\n\
e\u{301}\u{323} \u{a0}\u{3000}\u{200b}👩\u{200d}👩\u{200d}👧 🇨🇭 𝔘𝔫𝔦 \u{fffd}\u{0} <|im_start|>user\n<s></s> <unk> [MASK] ▁Ġ##ing";

/// The library that encodes text. Decoding always uses Hugging Face's library.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Backend {
    /// Hugging Face's `tokenizers`, the reference.
    #[default]
    Hf,
    /// `fastokens`, which is many times faster, for byte-level BPE tokenizers.
    Fastokens,
}

/// A character that the two libraries classify differently. Older Unicode versions count it as a
/// space, newer ones do not.
const DISPUTED: char = '\u{180e}';

/// The fast backend.
pub(crate) struct Fast(Box<fastokens::Tokenizer>);

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fast").finish_non_exhaustive()
    }
}

impl Fast {
    /// Loads the content of a `tokenizer.json`, and compares the encoding of a sample text with
    /// that of the `reference`.
    pub(crate) fn new(file: Value, reference: &tokenizers::Tokenizer) -> Result<Self, TextError> {
        let refuse = |why: &dyn fmt::Display| TextError::Load(format!("fastokens: {why}"));
        let mut tokenizer =
            fastokens::Tokenizer::from_json(file).map_err(|error| refuse(&error))?;
        tokenizer.set_truncation(None);
        tokenizer.set_padding(None);
        let fast = Self(Box::new(tokenizer));
        for special in [false, true] {
            let expected =
                reference.encode_fast(SAMPLE, special).map_err(|error| refuse(&error))?;
            let ids = fast.encode(SAMPLE, special)?;
            if !ids.iter().map(|id| id.cast_unsigned()).eq(expected.get_ids().iter().copied()) {
                return Err(refuse(&"it encodes a sample otherwise than tokenizers does"));
            }
        }
        Ok(fast)
    }

    /// True if this backend encodes the text like the reference: the text lacks [`DISPUTED`].
    pub(crate) fn takes(&self, text: &str) -> bool {
        !text.contains(DISPUTED)
    }

    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Vec<i32>, TextError> {
        let ids = self.0.encode_with_special_tokens(text, special);
        let ids = ids.map_err(|error| TextError::Encode(error.to_string()))?;
        Ok(ids.into_iter().map(u32::cast_signed).collect())
    }
}
