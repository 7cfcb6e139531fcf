//! Reads JSON as Python writes it, which is the form of model files.

use std::borrow::Cow;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// The size limit of JSON files beside the weights. A tokenizer's file has tens of MiB.
const MOST_JSON: u64 = 256 << 20;

/// Reads JSON as Python does: accepts a byte order mark, `NaN` and `Infinity`. `NaN` and infinite
/// values become strings, so code that needs a number there reports the key.
///
/// # Errors
/// Python would not accept the text either.
pub fn read_json(text: &[u8]) -> Result<Value, serde_json::Error> {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    serde_json::from_slice(text).or_else(|error| match quote_infinite(text) {
        Cow::Borrowed(_) => Err(error),
        Cow::Owned(quoted) => serde_json::from_slice(&quoted),
    })
}

/// Reads the JSON object in a file. If the file is `optional` and does not exist, the object is
/// empty.
pub(crate) fn read_object(path: &Path, optional: bool) -> Result<Map<String, Value>, ModelError> {
    let text = match fs::File::open(path) {
        Ok(file) => {
            let mut text = Vec::new();
            let read = file.take(MOST_JSON).read_to_end(&mut text);
            read.map_err(|error| ModelError::unreadable(path, &error))?;
            text
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if optional {
                return Ok(Map::new());
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let folder = path.parent().unwrap_or(path).display();
            return Err(ModelError::broken(format!("{folder} has no {name}")));
        }
        Err(error) => return Err(ModelError::unreadable(path, &error)),
    };
    match read_json(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ModelError::broken(format!("{} is not a JSON object", path.display()))),
        Err(error) => Err(ModelError::broken(format!("{} is not JSON: {error}", path.display()))),
    }
}

/// Returns the text of a token in a tokenizer's configuration. The entry may be an object with
/// further fields.
pub(crate) fn token_text(config: &Map<String, Value>, key: &str) -> Option<String> {
    let value = config.get(key)?;
    let value = if value.is_object() { value.get("content")? } else { value };
    value.as_str().map(str::to_owned)
}

/// Puts quotation marks around `NaN` and infinite numbers.
fn quote_infinite(text: &[u8]) -> Cow<'_, [u8]> {
    let mut quoted = Vec::new();
    let (mut at, mut copied) = (0, 0);
    while let Some(&byte) = text.get(at) {
        let rest = &text[at..];
        let length = match byte {
            b'"' => text_length(rest),
            b'-' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => word_length(rest),
            _ => 1,
        };
        let word = &rest[..length];
        if is_infinite(word) {
            quoted.extend_from_slice(&text[copied..at]);
            quoted.push(b'"');
            quoted.extend_from_slice(word);
            quoted.push(b'"');
            copied = at + length;
        }
        at += length;
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    quoted.extend_from_slice(&text[copied..]);
    Cow::Owned(quoted)
}

/// The length of a string, quotation marks included. The closing mark may be missing.
fn text_length(text: &[u8]) -> usize {
    let mut escaped = false;
    let end = text.iter().skip(1).position(|&byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// The length of a number or a bare word such as `NaN`.
fn word_length(text: &[u8]) -> usize {
    let within = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    text.iter().position(|byte| !within(byte)).unwrap_or(text.len())
}

fn is_infinite(word: &[u8]) -> bool {
    if matches!(word, b"NaN" | b"Infinity" | b"-Infinity") {
        return true;
    }
    let number = str::from_utf8(word).ok().filter(|_| word.last().is_some_and(u8::is_ascii_digit));
    number.and_then(|number| number.parse::<f64>().ok()).is_some_and(f64::is_infinite)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_are_read_as_python_reads_them() {
        let text = "\u{feff}{\"limits\": [0.0, Infinity, -Infinity, 1e999], \"nan\":NaN, \"Infinity\": 1.5, \
                    \"text\": \"a \\\" NaN, Infinity\", \"end\": -0.5e-3}";
        let expected = json!({
            "limits": [0.0, "Infinity", "-Infinity", "1e999"], "nan": "NaN", "Infinity": 1.5,
            "text": "a \" NaN, Infinity", "end": -0.0005,
        });
        assert_eq!(read_json(text.as_bytes()).expect("JSON"), expected);
        assert_eq!(read_json(b"NaN").expect("JSON"), json!("NaN"));
        for wrong in
            ["", "nan", "Inf", "+Infinity", "[NaN", "{\"a\": NaN,}", "\"NaN", "NaNs", "- Infinity"]
        {
            assert!(read_json(wrong.as_bytes()).is_err(), "{wrong}");
        }
        let error = read_json(b"{\"a\": NaN,\n \"b\" 1}").expect_err("no colon");
        assert_eq!(error.line(), 2, "the position is that of the fault");
    }
}
