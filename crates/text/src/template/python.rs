//! Python features in jinja2 templates: printing of values, and methods of strings and
//! dictionaries.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat;

use super::json;
use super::program::TooMuch;

/// The default indentation, in spaces.
const WIDTH: i64 = 4;
/// The largest indentation, in spaces.
const MOST_WIDTH: i64 = 64;

thread_local! {
    /// The number of bytes that the template on this thread may still print, including into
    /// variables.
    static PRINTABLE: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Limits the output of templates on this thread until the value is dropped.
#[derive(Debug)]
pub(super) struct PrintLimit(usize);

impl PrintLimit {
    pub(super) fn limited(bytes: usize) -> Self {
        Self(PRINTABLE.replace(bytes))
    }
}

impl Drop for PrintLimit {
    fn drop(&mut self) {
        PRINTABLE.set(self.0);
    }
}

fn print(out: &mut Output, text: &str) -> Result<(), Error> {
    let left = PRINTABLE.get().checked_sub(text.len()).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, "too much output").with_source(TooMuch)
    })?;
    PRINTABLE.set(left);
    out.write_str(text).map_err(Error::from)
}

/// Creates an environment that renders like transformers' jinja2 environment.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let mut syntax = environment.syntax().to_builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    environment.set_syntax(syntax.build()?);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out: &mut Output, _: &mut State, value: &Value| {
        print(out, &soft_string(value))
    });
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("string", |value: &Value| Value::from(str(value)));
    environment.add_filter("trim", |value: &Value, characters: Option<&str>| {
        let text = soft_string(value);
        Value::from(strip(&text, characters, true, true))
    });
    environment.add_filter("indent", indent);
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.len() {
            None if !value.is_undefined() => Err(invalid("the value has no length")),
            length => Ok(length.unwrap_or(0)),
        });
    }
    // jinja2's test is whether a value has a length and item access, so Python's strings and
    // dictionaries pass too.
    environment.add_test("sequence", |value: &Value| {
        use ValueKind::{Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Map | String | Undefined)
    });
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && (value.kind() == ValueKind::String || value.try_iter().is_ok())
    });
    Ok(environment)
}

/// `text | indent(width=4, first=False, blank=False)`. Keeps a line break at the end of the text,
/// which minijinja's own filter would remove.
fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let width = width.or(options.get("width")?).unwrap_or_else(|| Value::from(WIDTH));
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let indent = match width.as_str() {
        Some(text) => text.to_owned(),
        None => {
            " ".repeat(usize::try_from(i64::try_from(width)?.clamp(0, MOST_WIDTH)).unwrap_or(0))
        }
    };
    let text = soft_string(value).replace("\r\n", "\n").replace('\r', "\n");
    let mut indented = String::new();
    for (number, line) in text.split('\n').enumerate() {
        if number > 0 {
            indented.push('\n');
        }
        let indents = if number == 0 { first } else { blank || !line.is_empty() };
        if indents {
            indented.push_str(&indent);
        }
        indented.push_str(line);
    }
    Ok(Value::from(indented))
}

/// Converts a filter's input to text: a string stays unchanged, and other values are converted by
/// Python's `str`.
fn soft_string(value: &Value) -> Cow<'_, str> {
    match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None => Cow::Owned(str(value)),
    }
}

/// Python's `str(value)`; empty for an undefined value.
pub(super) fn str(value: &Value) -> String {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => value.to_string(),
        _ => repr(value),
    }
}

/// Python's `repr(value)`.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(value, 0, &mut out);
    out
}

fn write_repr(value: &Value, depth: usize, out: &mut String) {
    match value.kind() {
        _ if depth > json::DEEPEST => out.push_str("..."),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => string_repr(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(float) => out.push_str(&float_repr(float)),
            Err(_) => out.push_str(&value.to_string()),
        },
        // A tuple has other brackets than a list. Tuples are printed by minijinja below, since
        // templates rarely print tuples.
        ValueKind::Seq if value.downcast_object_ref::<minijinja::value::Tuple>().is_none() => {
            out.push('[');
            for (at, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(&item, depth + 1, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(&key, depth + 1, out);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), depth + 1, out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Quotes a string as Python does: with single quotes, unless the text has single quotes and no
/// double quotes. Unprintable characters are escaped.
fn string_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            ' ' => out.push(' '),
            // Rust's `escape_debug` treats the same characters as printable as Python does, but
            // writes other escapes. It also escapes a combining mark at the start of a string, so
            // `prints` puts a letter before the character.
            c if !c.is_control() && prints(c) => out.push(c),
            c => {
                let code = u32::from(c);
                // Writing to a String cannot fail.
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

fn prints(c: char) -> bool {
    let mut text = ['a', c].iter().collect::<String>();
    text = text.escape_debug().collect();
    !text.contains("\\u{") || c == '\\'
}

/// Formats a float with the fewest digits that read back as the same float, in Python's format.
fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{float:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// True if Python's `str.strip` and `str.split` treat this character as a space: Unicode spaces and
/// four separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip<'a>(mut text: &'a str, characters: Option<&str>, left: bool, right: bool) -> &'a str {
    let cut = |c: char| characters.map_or_else(|| is_space(c), |set| set.contains(c));
    if left {
        text = text.trim_start_matches(cut);
    }
    if right {
        text = text.trim_end_matches(cut);
    }
    text
}

/// Python's `str.split()`: splits at runs of spaces. After `limit` splits the rest is one part.
fn split_spaces(text: &str, limit: Option<usize>) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = match limit {
            Some(limit) if parts.len() >= limit => rest.len(),
            _ => rest.find(is_space).unwrap_or(rest.len()),
        };
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    parts
}

/// Python's `str.title()`: a letter after a letter becomes lower case, any other letter upper case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        in_word = c.is_lowercase() || c.is_uppercase();
    }
    out
}

/// Python's methods: first those implemented here, which minijinja-contrib lacks or implements
/// differently, then those of minijinja-contrib.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => match string_method(text, name, args)? {
            Some(result) => Ok(result),
            None => pycompat::unknown_method_callback(state, value, name, args),
        },
        (ValueKind::Seq, _) if name == "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *what);
            at.map(Value::from).ok_or_else(|| invalid("the item is not in the list"))
        }
        (ValueKind::Map, _) if name == "copy" => Ok(value.clone()),
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, characters, name != "rstrip", name != "lstrip"))
        }
        "split" if args.first().is_none_or(Value::is_none) => {
            let (_, limit): (Option<&Value>, Option<i64>) = from_args(args)?;
            strings(split_spaces(text, limit.and_then(|limit| usize::try_from(limit).ok())))
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let first = name == "partition";
            let split =
                if first { text.split_once(separator) } else { text.rsplit_once(separator) };
            strings(match split {
                Some((before, after)) => [before, separator, after],
                None if first => [text, "", ""],
                None => ["", "", text],
            })
        }
        "rsplit" => {
            let (separator, limit): (&str, Option<usize>) = from_args(args)?;
            if separator.is_empty() {
                return Err(invalid("empty separator"));
            }
            let most = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
            let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
            parts.reverse();
            strings(parts)
        }
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let at = if name == "index" { text.find(what) } else { text.rfind(what) };
            let at = at.ok_or_else(|| invalid("substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        _ => return Ok(None),
    }))
}

fn strings<'a>(parts: impl IntoIterator<Item = &'a str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        let cases = [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (2.5e-7, "2.5e-07"),
            (0.1 + 0.2, "0.30000000000000004"),
            (f64::INFINITY, "inf"),
        ];
        for (float, expected) in cases {
            assert_eq!(float_repr(float), expected);
        }
    }

    #[test]
    fn strings_print_as_python_prints_them() {
        let cases = [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("'\"", "'\\'\"'"),
            ("\n\u{1}\u{7f}é\u{301}", "'\\n\\x01\\x7fé\u{301}'"),
            ("\u{ad}\u{200b}\u{e000}\u{e0001}", "'\\xad\\u200b\\ue000\\U000e0001'"),
        ];
        for (text, expected) in cases {
            assert_eq!(repr(&Value::from(text)), expected);
        }
    }
}
