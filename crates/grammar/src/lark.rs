//! Writes parts of grammars in llguidance's dialect of Lark.

use std::fmt::Write as _;

use crate::error::GrammarError;

/// Returns `text` as a string literal.
pub(crate) fn literal(text: &str) -> String {
    // Every JSON string is a valid string literal of Lark.
    serde_json::Value::from(text).to_string()
}

/// Returns the regular expression that matches exactly `text`, without enclosing slashes.
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

/// Returns a grammar that allows one of `choices`.
pub(crate) fn choice(choices: &[String]) -> String {
    let literals: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
    format!("start: {}", literals.join(" | "))
}

/// Rejects grammar features that are not allowed: options of nested schemas, and temperatures,
/// which have no effect.
pub(crate) fn no_options(text: &str) -> Result<(), GrammarError> {
    if text.contains("x-guidance") {
        return Err(GrammarError::invalid("clients may not set x-guidance"));
    }
    let squeezed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    if squeezed.contains("[temperature=") || squeezed.contains(",temperature=") {
        return Err(GrammarError::invalid("the attribute temperature is not supported"));
    }
    Ok(())
}
