//! Finds the end of a JSON value in text that arrives in parts.

/// The state of scanning a value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// The kind of the value, determined by its first character; `None` before that.
    kind: Option<Kind>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Nested,
    String,
    Scalar,
}

/// How a character relates to the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    /// The character belongs to the value, which continues.
    Inside,
    /// The character is the last one of the value.
    Last,
    /// The value, a number or a word, has ended before this character.
    Before,
}

impl Scan {
    /// True if the scan is within a string.
    pub(crate) fn in_string(&self) -> bool {
        self.in_string
    }

    /// Reads the next character. The first call reads the first character of the value.
    pub(crate) fn read(&mut self, c: char) -> Read {
        let kind = *self.kind.get_or_insert(match c {
            '{' | '[' => Kind::Nested,
            '"' => Kind::String,
            _ => Kind::Scalar,
        });
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.in_string = false;
                    if kind == Kind::String {
                        return Read::Last;
                    }
                }
                _ => {}
            }
            return Read::Inside;
        }
        match c {
            '"' if kind != Kind::Scalar => self.in_string = true,
            '{' | '[' => self.depth += 1,
            ',' | '}' | ']' if kind == Kind::Scalar => return Read::Before,
            c if kind == Kind::Scalar && c.is_whitespace() => return Read::Before,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Read::Last;
                }
            }
            _ => {}
        }
        Read::Inside
    }
}

/// True if `text` is a JSON object.
pub(crate) fn is_object(text: &str) -> bool {
    matches!(serde_json::from_str(text), Ok(serde_json::Value::Object(_)))
}

/// Escapes `text` as JSON does, without the quotes.
pub(crate) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::String(text.to_owned()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Formats a value as Python prints JSON, with spaces after commas and colons. Templates format
/// earlier calls like this.
pub(crate) fn spaced(value: &serde_json::Value) -> String {
    use serde_json::Value::{Array, Object};
    match value {
        Array(values) => {
            let values: Vec<String> = values.iter().map(spaced).collect();
            format!("[{}]", values.join(", "))
        }
        Object(fields) => {
            let field = |(name, value): (&String, &serde_json::Value)| {
                format!("\"{}\": {}", escaped(name), spaced(value))
            };
            let fields: Vec<String> = fields.iter().map(field).collect();
            format!("{{{}}}", fields.join(", "))
        }
        scalar => scalar.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Splits `text` after its first value.
    fn split(text: &str) -> Option<(&str, &str)> {
        let mut scan = Scan::default();
        for (at, c) in text.char_indices() {
            match scan.read(c) {
                Read::Inside => {}
                Read::Last => return Some(text.split_at(at + c.len_utf8())),
                Read::Before => return Some(text.split_at(at)),
            }
        }
        None
    }

    #[test]
    fn values_end_where_json_says() {
        for (value, rest) in [
            (r#"{"a": ["}", {"b": "\"]}"}]}"#, " }"),
            (r#""a\\""#, "\""),
            ("[]", "]"),
            ("-1.5e3", ", 2"),
            ("true", "\n"),
            ("null", "}"),
            ("\"é{\"", "x"),
        ] {
            let text = format!("{value}{rest}");
            assert_eq!(split(&text), Some((value, rest)), "{text}");
        }
        assert_eq!(split("{\"a\": \"}"), None);
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"a": [1, "x\"y", null], "b": {}});
        assert_eq!(spaced(&value), r#"{"a": [1, "x\"y", null], "b": {}}"#);
    }
}
