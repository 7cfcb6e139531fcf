//! The input of a custom tool, which the model writes as the only argument of a function.

use forebay_api::CUSTOM_INPUT;
use serde_json::Value;

/// Extracts the text from `{"input": "…"}` as it arrives in chunks.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// The arguments that have arrived.
    arguments: String,
    /// The position up to which the arguments are read; `None` if the text has not begun.
    at: Option<usize>,
    /// The text so far.
    text: String,
}

impl Input {
    /// Adds the next chunk of arguments. Returns the new text.
    pub(super) fn push(&mut self, piece: &str) -> &str {
        self.arguments.push_str(piece);
        let before = self.text.len();
        if self.at.is_none() {
            self.at = begin(&self.arguments);
        }
        if let Some(at) = &mut self.at {
            *at += read(&self.arguments[*at..], &mut self.text);
        }
        &self.text[before..]
    }

    /// Returns the whole text after the end of the call, and the part that [`Input::push`] has not
    /// returned. Arguments of another form, which are possible without a grammar, are themselves
    /// the text.
    pub(super) fn finish(self) -> (String, String) {
        let whole = match serde_json::from_str(&self.arguments) {
            Ok(Value::Object(mut fields)) => match fields.remove(CUSTOM_INPUT) {
                Some(Value::String(text)) => text,
                _ => self.arguments,
            },
            // The arguments were truncated within the text.
            _ if self.at.is_some() => self.text.clone(),
            _ => self.arguments,
        };
        let rest = whole.strip_prefix(&*self.text).unwrap_or_default().to_owned();
        (whole, rest)
    }
}

/// Returns the position at which the text begins, after its opening quote.
fn begin(arguments: &str) -> Option<usize> {
    let mut rest = arguments.trim_start();
    for expected in ["{", "\"input\"", ":", "\""] {
        rest = rest.strip_prefix(expected)?;
        if expected != "\"" {
            rest = rest.trim_start();
        }
    }
    Some(arguments.len() - rest.len())
}

/// Appends the content of a JSON string, up to its end or an incomplete escape. Returns the number
/// of bytes read.
fn read(json: &str, text: &mut String) -> usize {
    let mut at = 0;
    while let Some(next) = json[at..].find(['"', '\\']) {
        text.push_str(&json[at..at + next]);
        at += next;
        let Some((length, escaped)) = escape(&json[at..]) else { return at };
        text.push(escaped);
        at += length;
    }
    text.push_str(&json[at..]);
    json.len()
}

/// Decodes the escape at the beginning: returns its length in bytes and its character. Returns
/// `None` if the escape is incomplete, or if the string ends here.
fn escape(json: &str) -> Option<(usize, char)> {
    let kind = json.strip_prefix('\\')?.chars().next()?;
    let simple = match kind {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => return unicode(json),
        other => other,
    };
    Some((1 + kind.len_utf8(), simple))
}

/// Decodes `\uXXXX`, or a surrogate pair of two such escapes.
fn unicode(json: &str) -> Option<(usize, char)> {
    let unit = |from: usize| u32::from_str_radix(json.get(from..from + 4)?, 16).ok();
    let first = unit(2)?;
    if !(0xd800..0xdc00).contains(&first) {
        return Some((6, char::from_u32(first).unwrap_or(char::REPLACEMENT_CHARACTER)));
    }
    // The first half of a surrogate pair: wait for the second half.
    let rest = &json[6..];
    if !rest.starts_with("\\u") && !"\\u".starts_with(rest) {
        return Some((6, char::REPLACEMENT_CHARACTER));
    }
    let second = unit(8)?;
    let both = char::decode_utf16([first as u16, second as u16]).next()?;
    Some(both.map_or((6, char::REPLACEMENT_CHARACTER), |both| (12, both)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn in_pieces(arguments: &str, cuts: &[usize]) -> (String, String) {
        let (mut input, mut said, mut from) = (Input::default(), String::new(), 0);
        for &cut in cuts.iter().chain([&arguments.len()]) {
            let to = arguments.floor_char_boundary(cut.min(arguments.len())).max(from);
            said.push_str(input.push(&arguments[from..to]));
            from = to;
        }
        let (whole, rest) = input.finish();
        (whole, said + &rest)
    }

    proptest! {
        #[test]
        fn any_text_comes_as_it_is_whatever_the_pieces(
            text in "\\PC{0,20}[\n\"\\\\\u{1}😀é]{0,6}\\PC{0,9}",
            mut cuts in prop::collection::vec(0..80_usize, 0..12),
        ) {
            cuts.sort_unstable();
            let arguments = serde_json::json!({CUSTOM_INPUT: text}).to_string();
            let (whole, said) = in_pieces(&arguments, &cuts);
            prop_assert_eq!(&whole, &text);
            prop_assert_eq!(&said, &text);
        }

        #[test]
        fn nothing_makes_it_panic(
            arguments in "[{\"input:\\\\ud83de0n}é ]{0,40}",
            mut cuts in prop::collection::vec(0..40_usize, 0..12),
        ) {
            cuts.sort_unstable();
            in_pieces(&arguments, &cuts);
        }
    }

    #[test]
    fn escapes_of_both_halves_are_one_character() {
        let arguments = r#" { "input" : "a\ud83d\ude00\u00e9\/\n" }"#;
        for cut in 0..arguments.len() {
            let (whole, said) = in_pieces(arguments, &[cut]);
            assert_eq!((&*whole, &*said), ("a😀é/\n", "a😀é/\n"));
        }
    }

    #[test]
    fn what_has_another_form_is_the_text() {
        for arguments in ["ls -l", "[1]", r#"{"command":"ls"}"#] {
            assert_eq!(in_pieces(arguments, &[1]).0, arguments);
        }
        assert_eq!(in_pieces(r#"{"input":"cut o"#, &[3, 11]), ("cut o".into(), "cut o".into()));
    }
}
