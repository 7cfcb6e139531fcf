//! Pieces of Lark text, in llguidance's dialect.

use std::fmt::Write as _;

/// A string literal.
pub(crate) fn literal(text: &str) -> String {
    // Lark's strings are JSON's.
    serde_json::Value::from(text).to_string()
}

/// The regular expression of `text` and nothing else, without the slashes around it.
pub(crate) fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            c if c.is_alphanumeric() || matches!(c, ' ' | '_') => out.push(c),
            c => {
                // Writing to a string cannot fail.
                let _ = write!(out, r"\x{{{:x}}}", u32::from(c));
            }
        }
        out
    })
}

/// A grammar of one of `choices`.
pub(crate) fn choice(choices: &[String]) -> String {
    let literals: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
    format!("start: {}", literals.join(" | "))
}
