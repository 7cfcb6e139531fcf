//! JSON in Python's form. Names of files on disk are hashes of such texts, and both hands need the
//! same names.

use std::fmt::Write;

use serde_json::{Map, Number, Value};

/// The text that `json.dumps(value, sort_keys=sorted)` gives.
#[must_use]
pub fn python_json(value: &Value, sorted: bool) -> String {
    let mut out = String::new();
    write_value(value, sorted, &mut out);
    out
}

fn write_value(value: &Value, sorted: bool, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(number, out),
        Value::String(text) => write_text(text, out),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_value(item, sorted, out);
            }
            out.push(']');
        }
        Value::Object(object) => write_object(object, sorted, out),
    }
}

fn write_object(object: &Map<String, Value>, sorted: bool, out: &mut String) {
    let mut entries: Vec<(&String, &Value)> = object.iter().collect();
    if sorted {
        // Bytes of UTF-8 are in the order of code points, as Python's strings are.
        entries.sort_by_key(|&(name, _)| name);
    }
    out.push('{');
    for (index, (name, value)) in entries.into_iter().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        write_text(name, out);
        out.push_str(": ");
        write_value(value, sorted, out);
    }
    out.push('}');
}

fn write_text(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(character),
            other => {
                for unit in other.encode_utf16(&mut [0; 2]) {
                    // A String takes everything.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

fn write_number(number: &Number, out: &mut String) {
    match number.as_f64() {
        Some(value) if number.is_f64() => out.push_str(&python_float(value)),
        _ => out.push_str(&number.to_string()),
    }
}

/// `repr` of a float: the shortest digits that give it back, with an exponent below -4 and from 16
/// on.
fn python_float(value: f64) -> String {
    let short = format!("{value:e}");
    let Some((digits, exponent)) = short.split_once('e') else { return short };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn floats_are_pythons() {
        for (value, text) in [
            (1e-5, "1e-05"),
            (1e-4, "0.0001"),
            (10000.0, "10000.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (-0.02, "-0.02"),
            (0.0, "0.0"),
            (1.25e-7, "1.25e-07"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }

    #[test]
    fn texts_are_pythons() {
        let value = json!({"z": [1, 2.0, null, true], "a": "é\"\\\n\u{7f}\u{1f600}/", "b": {}});
        assert_eq!(
            python_json(&value, true),
            r#"{"a": "\u00e9\"\\\n\u007f\ud83d\ude00/", "b": {}, "z": [1, 2.0, null, true]}"#
        );
        assert!(python_json(&value, false).starts_with(r#"{"z": [1, "#));
    }
}
