//! Converts Python's literals, and those of Gemma, to JSON.

use serde_json::{Map, Number, Value};

/// The deepest nesting of a literal.
const DEPTH: usize = 64;

/// Returns the value of a complete Python literal; `None` if it is invalid or has no JSON
/// equivalent.
pub(crate) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text.trim(), quote: None };
    let value = reader.value(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

/// Parses the arguments of a call, `a=1, b="x"`. `name` returns the name of a positional argument,
/// given its index.
pub(crate) fn arguments(text: &str, name: &dyn Fn(usize) -> Option<String>) -> Option<Value> {
    let mut reader = Reader { rest: text, quote: None };
    let mut fields = Map::new();
    let mut index = 0;
    loop {
        reader.blank();
        if reader.rest.is_empty() {
            return Some(Value::Object(fields));
        }
        let word = reader.rest.len() - reader.rest.trim_start_matches(is_word).len();
        let named = reader.rest[word..].trim_start().strip_prefix('=').map(|rest| (word, rest));
        let key = match named {
            Some((word, rest)) if word > 0 => {
                let key = reader.rest[..word].to_owned();
                reader.rest = rest;
                key
            }
            _ => name(index).unwrap_or_else(|| format!("arg{index}")),
        };
        fields.insert(key, reader.value(0)?);
        index += 1;
        reader.blank();
        if !reader.take(',') && !reader.rest.is_empty() {
            return None;
        }
    }
}

/// Parses an object with unquoted keys and with strings between `quote`s, as Gemma writes it.
pub(crate) fn unquoted(text: &str, quote: &'static str) -> Option<Value> {
    let mut reader = Reader { rest: text.trim(), quote: Some(quote) };
    let value = reader.value(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

struct Reader<'a> {
    rest: &'a str,
    /// The text that quotes strings, if it is not one of Python's quotes.
    quote: Option<&'static str>,
}

impl Reader<'_> {
    fn blank(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, c: char) -> bool {
        let rest = self.rest.strip_prefix(c);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH {
            return None;
        }
        self.blank();
        if let Some(quote) = self.quote
            && let Some(rest) = self.rest.strip_prefix(quote)
        {
            let (text, rest) = rest.split_once(quote)?;
            self.rest = rest;
            return Some(Value::String(text.to_owned()));
        }
        match self.rest.chars().next()? {
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.fields(depth),
            '"' | '\'' => self.string(),
            _ => self.word(),
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.take(open);
        let mut values = Vec::new();
        loop {
            self.blank();
            if self.take(close) {
                return Some(Value::Array(values));
            }
            values.push(self.value(depth + 1)?);
            self.blank();
            if !self.take(',') && !self.rest.starts_with(close) {
                return None;
            }
        }
    }

    fn fields(&mut self, depth: usize) -> Option<Value> {
        self.take('{');
        let mut fields = Map::new();
        loop {
            self.blank();
            if self.take('}') {
                return Some(Value::Object(fields));
            }
            let bare = self.quote.filter(|quote| !self.rest.starts_with(quote));
            let key = if bare.is_some() && !self.rest.starts_with(['"', '\'']) {
                let (key, _) = self.rest.split_once(':')?;
                self.rest = &self.rest[key.len()..];
                key.trim().to_owned()
            } else {
                match self.value(depth + 1)? {
                    Value::String(key) => key,
                    key => key.to_string(),
                }
            };
            self.blank();
            if !self.take(':') {
                return None;
            }
            fields.insert(key, self.value(depth + 1)?);
            self.blank();
            if !self.take(',') && !self.rest.starts_with('}') {
                return None;
            }
        }
    }

    fn string(&mut self) -> Option<Value> {
        let triple = ["\"\"\"", "'''"].into_iter().find(|quote| self.rest.starts_with(quote));
        let quote = triple.unwrap_or(&self.rest[..1]).to_owned();
        let mut rest = &self.rest[quote.len()..];
        let mut text = String::new();
        loop {
            if let Some(after) = rest.strip_prefix(quote.as_str()) {
                self.rest = after;
                return Some(Value::String(text));
            }
            let c = rest.chars().next()?;
            rest = &rest[c.len_utf8()..];
            if c != '\\' {
                text.push(c);
                continue;
            }
            let c = rest.chars().next()?;
            rest = &rest[c.len_utf8()..];
            let digits = match c {
                'x' => 2,
                'u' => 4,
                'U' => 8,
                _ => 0,
            };
            if digits > 0 {
                let (character, length) = escape(rest, digits)?;
                text.push(character);
                rest = &rest[length..];
                continue;
            }
            match c {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                '0' => text.push('\0'),
                'a' => text.push('\x07'),
                'b' => text.push('\x08'),
                'f' => text.push('\x0c'),
                'v' => text.push('\x0b'),
                '\n' => {}
                '\\' | '\'' | '"' => text.push(c),
                // Python keeps a backslash before any other character.
                other => text.extend(['\\', other]),
            }
        }
    }

    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find([',', '}', ']', ')', ':']).unwrap_or(self.rest.len());
        let word = self.rest[..end].trim();
        let value = match word {
            "" => return None,
            "True" | "true" => Value::Bool(true),
            "False" | "false" => Value::Bool(false),
            "None" | "null" | "nil" => Value::Null,
            word => match number(word) {
                Some(number) => Value::Number(number),
                // Text without quotes is taken as a string.
                None if self.quote.is_some() => Value::String(word.to_owned()),
                None => return None,
            },
        };
        self.rest = &self.rest[end..];
        Some(value)
    }
}

/// Returns the character of an escape with `digits` hexadecimal digits, and the length of the
/// escape. A surrogate pair, as in JSON, is one character.
fn escape(rest: &str, digits: usize) -> Option<(char, usize)> {
    let code = |at: usize| u32::from_str_radix(rest.get(at..at + digits)?, 16).ok();
    let first = code(0)?;
    if (0xd800..0xdc00).contains(&first) && rest.get(digits..digits + 2) == Some("\\u") {
        let second = code(digits + 2).filter(|second| (0xdc00..0xe000).contains(second))?;
        let whole = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
        return Some((char::from_u32(whole)?, 2 * digits + 2));
    }
    Some((char::from_u32(first)?, digits))
}

fn number(word: &str) -> Option<Number> {
    let plain = word.strip_prefix('+').unwrap_or(word).replace('_', "");
    let plain = match plain.strip_suffix('.') {
        Some(whole) => format!("{whole}.0"),
        None => plain,
    };
    serde_json::from_str(&plain).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_are_read_as_python_reads_them() {
        for (text, expected) in [
            ("{'a': (1, 2), \"b\": None,}", json!({"a": [1, 2], "b": null})),
            (r#"'it\'s \u00e9\n\d'"#, json!("it's é\n\\d")),
            (r#""""two "quotes" in it""""#, json!("two \"quotes\" in it")),
            (r#""\ud83d\ude00 \b\f""#, json!("😀 \u{8}\u{c}")),
            ("-1_000", json!(-1000)),
            ("2.", json!(2.0)),
            ("[True, False, []]", json!([true, false, []])),
            ("{1: 'x'}", json!({"1": "x"})),
        ] {
            assert_eq!(literal(text), Some(expected), "{text}");
        }
        for text in ["", "x", "[1", "{'a'}", "'a", "1 2", "f(1)", "[1 2]", &"[".repeat(10_000)] {
            assert_eq!(literal(text), None, "{text:.20}");
        }
    }

    #[test]
    fn arguments_have_names_or_get_them() {
        let name = |index: usize| (index == 0).then(|| "city".to_owned());
        let read = |text: &str| arguments(text, &name);
        assert_eq!(read("city='Paris', days=3"), Some(json!({"city": "Paris", "days": 3})));
        assert_eq!(read("'a=b', 5"), Some(json!({"city": "a=b", "arg1": 5})));
        assert_eq!(read(""), Some(json!({})));
        assert_eq!(read("a=1 b=2"), None);
    }

    #[test]
    fn gemma_writes_keys_without_quotes() {
        const QUOTE: &str = "<|\"|>";
        let text =
            "{city:<|\"|>Pa, ris}<|\"|>,days:3,deep:{list:[<|\"|>a<|\"|>,true]},unit:metric}";
        let expected =
            json!({"city": "Pa, ris}", "days": 3, "deep": {"list": ["a", true]}, "unit": "metric"});
        assert_eq!(unquoted(text, QUOTE), Some(expected));
    }
}
