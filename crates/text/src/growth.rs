//! Bounds how much a tokenizer's normaliser may enlarge a text before the text is split into words.
//!
//! A normaliser may replace a character by any text from the tokenizer file. The library's memory
//! grows with the result, so the bound is checked before the library gets the text. Unicode
//! normalisation, which makes a character at most eleven times as long, is not counted.

use serde_json::Value;

use crate::error::TextError;

/// The largest size of a normalised text in bytes.
const MOST: usize = 64 << 20;

/// An upper bound on the size of a text of `n` bytes after some steps: `times * n + plus`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Growth {
    times: f64,
    plus: f64,
}

impl Growth {
    const NONE: Self = Self { times: 1.0, plus: 0.0 };

    /// Computes the growth that the normaliser of a `tokenizer.json` can cause.
    ///
    /// # Errors
    /// [`TextError::Load`] if the added tokens, or the texts of single tokens, can become too long.
    pub(crate) fn new(file: &Value) -> Result<Self, TextError> {
        let growth = Self::from_steps(&file["normalizer"], "normalizers");
        let added = file["added_tokens"].as_array().into_iter().flatten();
        let lengths = added.filter_map(|token| Some(token["content"].as_str()?.len()));
        let (count, bytes) = lengths.fold((0, 0), |(count, all), length| (count + 1, all + length));
        growth.check(bytes + count).map_err(|_| too_large("normalizer"))?;
        let decoded = Self::from_steps(&file["decoder"], "decoders");
        decoded.check(longest_token(file)).map_err(|_| too_large("decoder"))?;
        Ok(growth)
    }

    /// Checks the size of a text in bytes before it is normalised.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the text may become too long.
    pub(crate) fn check(&self, bytes: usize) -> Result<(), TextError> {
        let grown = self.times * bytes as f64 + self.plus;
        if self.times <= 1.0 && self.plus <= bytes as f64 || grown <= MOST as f64 {
            return Ok(());
        }
        Err(TextError::Encode(format!(
            "the tokenizer's normalizer may make {grown:.0} bytes of the text's {bytes}; at most {MOST} are allowed"
        )))
    }

    fn from_steps(step: &Value, inner: &str) -> Self {
        if let Some(steps) = step[inner].as_array() {
            return steps
                .iter()
                .map(|step| Self::from_steps(step, inner))
                .fold(Self::NONE, Self::then);
        }
        let content = step["content"].as_str().map_or(0, str::len) as f64;
        match step["type"].as_str() {
            Some("Replace") => match shortest_match(&step["pattern"]) {
                // An empty pattern matches at every position.
                0 => Self { times: 1.0 + content, plus: content },
                shortest => Self { times: (content / shortest as f64).max(1.0), plus: 0.0 },
            },
            Some("Prepend") => {
                Self { times: 1.0, plus: step["prepend"].as_str().map_or(0, str::len) as f64 }
            }
            _ => Self::NONE,
        }
    }

    fn then(self, next: Self) -> Self {
        Self { times: self.times * next.times, plus: self.plus * next.times + next.plus }
    }
}

fn too_large(part: &str) -> TextError {
    TextError::Load(format!("its {part} may make more than {MOST} bytes of a token"))
}

/// Returns the size of the longest token of the vocabulary in bytes.
fn longest_token(file: &Value) -> usize {
    let vocabulary = &file["model"]["vocab"];
    let names = vocabulary.as_object().into_iter().flat_map(|tokens| tokens.keys());
    let pieces = vocabulary.as_array().into_iter().flatten();
    let pieces = pieces.filter_map(|piece| piece[0].as_str());
    names.map(String::as_str).chain(pieces).map(str::len).max().unwrap_or(0)
}

/// Returns the smallest number of bytes that a pattern can match.
fn shortest_match(pattern: &Value) -> usize {
    if let Some(text) = pattern["String"].as_str() {
        return text.len();
    }
    let regex = pattern["Regex"].as_str().unwrap_or_default();
    // The library may support syntax that this parser does not. Then the result is 0.
    let parsed = regex_syntax::parse(regex).ok();
    parsed.and_then(|parsed| parsed.properties().minimum_len()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Tokenizer;

    fn of(normalizer: &Value) -> Growth {
        Growth::new(&json!({"normalizer": normalizer})).expect("a growth")
    }

    fn replace(pattern: &Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn several(steps: &[Value]) -> Value {
        json!({"type": "Sequence", "normalizers": steps})
    }

    #[test]
    fn growth_is_that_of_all_steps() {
        let llama = several(&[
            json!({"type": "Prepend", "prepend": "\u{2581}"}),
            replace(&json!({"String": " "}), "\u{2581}"),
        ]);
        assert_eq!(of(&llama), Growth { times: 3.0, plus: 9.0 });
        let shorter = replace(&json!({"Regex": " {2,}"}), " ");
        assert_eq!(of(&shorter), Growth::NONE);
        let doubled = several(&vec![replace(&json!({"String": "a"}), "aa"); 10]);
        assert_eq!(of(&doubled), Growth { times: 1024.0, plus: 0.0 });
        let anywhere = replace(&json!({"Regex": "x*"}), "abc");
        assert_eq!(of(&anywhere), Growth { times: 4.0, plus: 3.0 });
        assert_eq!(of(&Value::Null), Growth::NONE);
        assert!(of(&llama).check(4 << 20).is_ok());
        assert!(of(&doubled).check(64 << 10).is_ok());
        assert!(of(&doubled).check((64 << 10) + 1).is_err());
    }

    fn tokenizer(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, TextError> {
        let json = include_bytes!("../tests/data/tokenizers/byte_level.json");
        let mut file: Value = serde_json::from_slice(json).expect("JSON");
        change(&mut file);
        Tokenizer::from_bytes(file.to_string().as_bytes())
    }

    #[test]
    fn a_letter_that_becomes_a_megabyte_is_refused_before_it_does() {
        let huge = "b".repeat(1 << 20);
        let change = |file: &mut Value| {
            file["added_tokens"] = json!([]);
            file["normalizer"] = replace(&json!({"String": "a"}), &huge);
        };
        let tokenizer = tokenizer(change).expect("a tokenizer");
        let text = "a".repeat(100);
        let refused = [
            tokenizer.encode(&text, true).map(drop),
            tokenizer.encode_as_text(&text).map(drop),
            tokenizer.encode_pair("a", &text).map(drop),
        ];
        for refused in refused {
            let Err(TextError::Encode(why)) = refused else { panic!("{refused:?}") };
            assert!(why.contains("normalizer may make 10"), "{why}");
        }
    }

    #[test]
    fn a_file_whose_own_tokens_grow_is_refused() {
        let grows = vec![replace(&json!({"String": "a"}), "aaaaaaaaaa"); 9];
        let refused = tokenizer(|file| file["normalizer"] = several(&grows));
        assert!(matches!(&refused, Err(TextError::Load(why)) if why.contains("normalizer")));
        let steps: Vec<Value> = grows.into_iter().chain([json!({"type": "ByteLevel"})]).collect();
        let refused = tokenizer(|file| {
            file["decoder"] = json!({"type": "Sequence", "decoders": steps});
        });
        assert!(matches!(&refused, Err(TextError::Load(why)) if why.contains("decoder")));
    }
}
