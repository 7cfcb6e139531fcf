//! Bounds the size of a Lark grammar after its names are expanded.
//!
//! The compiler converts each terminal to one expression, in which every name is replaced by a copy
//! of its definition. So twenty lines can expand to a million. The compiler also follows names
//! recursively, on a limited stack. Size and depth are therefore computed before anything is
//! compiled.

use std::collections::HashMap;

use serde::de::IgnoredAny;

use crate::error::GrammarError;

/// The largest size of a grammar's text in bytes, after conversion to Lark.
const TEXT: usize = 8 << 20;
/// The largest number of bytes that expansion may add to all terminals together. One byte may
/// become an expression of half a kilobyte.
const GROWTH: usize = 512 << 10;
/// The longest chain of names, each used in the definition of the previous one. Nested groups in a
/// definition count too.
const DEPTH: usize = 2048;
/// The largest number of Unicode classes, such as `\w`. Each has hundreds of ranges.
const CLASSES: usize = 2048;

/// Rejects a grammar whose compilation would take too much memory.
pub(crate) fn check(text: &str) -> Result<(), GrammarError> {
    if text.len() > TEXT {
        let reason =
            format!("after expansion it has {} bytes; at most {TEXT} are allowed", text.len());
        return Err(GrammarError::invalid(reason));
    }
    classes(text)?;
    let definitions = Definitions::read(text);
    definitions.walk()
}

/// Rejects a grammar with too many Unicode classes.
pub(crate) fn classes(text: &str) -> Result<(), GrammarError> {
    let escapes = text.as_bytes().windows(2);
    let is_class = |pair: &[u8]| pair[0] == b'\\' && matches!(pair[1], b'w' | b'W' | b'p' | b'P');
    if escapes.filter(|pair| is_class(pair)).count() > CLASSES {
        let reason = format!("more than {CLASSES} classes of characters such as \\w");
        return Err(GrammarError::invalid(reason));
    }
    Ok(())
}

/// The rules and terminals of a grammar. Nested grammars are included, so definitions with the same
/// name are added up.
#[derive(Default)]
struct Definitions<'a> {
    all: Vec<Definition<'a>>,
    places: HashMap<&'a str, usize>,
}

#[derive(Default)]
struct Definition<'a> {
    name: &'a str,
    /// The size of the definition's text in bytes.
    bytes: usize,
    /// The depth of nested groups.
    groups: usize,
    /// The names that the definition uses.
    names: Vec<&'a str>,
    /// True if the definition is compiled to one expression.
    terminal: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    Name(&'a str),
    Mark(u8),
    /// A literal, a regular expression, or a JSON value.
    Literal,
}

impl<'a> Definitions<'a> {
    fn read(text: &'a str) -> Self {
        let tokens = tokens(text);
        let mut found = Self::default();
        let mut current: Option<usize> = None;
        let mut groups = 0_usize;
        let mut at = 0;
        while let Some(&(token, bytes)) = tokens.get(at) {
            if let Token::Name(name) = token
                && let Some(body) = body(&tokens[at + 1..])
            {
                let place = found.place(name);
                // Attributes such as `suffix` make a rule an expression.
                let attributes = body > 1 && tokens[at + 1].0 == Token::Mark(b'[');
                let is_terminal =
                    name.trim_start_matches(['_', '!', '?']).starts_with(char::is_uppercase);
                found.all[place].terminal |= is_terminal || attributes;
                current = Some(place);
                groups = 0;
                at += 1 + body;
                continue;
            }
            if let Some(current) = current {
                let definition = &mut found.all[current];
                definition.bytes += bytes;
                match token {
                    Token::Name(name) => definition.names.push(name),
                    Token::Mark(b'(' | b'[') => {
                        groups += 1;
                        definition.groups = definition.groups.max(groups);
                    }
                    Token::Mark(b')' | b']') => groups = groups.saturating_sub(1),
                    // The complement operator applies only to expressions.
                    Token::Mark(b'~') => definition.terminal = true,
                    _ => {}
                }
            }
            at += 1;
        }
        found
    }

    fn place(&mut self, name: &'a str) -> usize {
        let next = self.all.len();
        let place = *self.places.entry(name).or_insert(next);
        if place == next {
            self.all.push(Definition { name, ..Definition::default() });
        }
        place
    }

    /// Follows names as the compiler does, and checks size and depth.
    fn walk(&self) -> Result<(), GrammarError> {
        /// The expanded size in bytes and the depth of a visited definition.
        #[derive(Clone, Copy)]
        struct Size {
            bytes: usize,
            depth: usize,
        }
        let mut done: Vec<Option<Size>> = vec![None; self.all.len()];
        let mut begun = vec![false; self.all.len()];
        let mut growth = 0_usize;
        let first = self.places.get("start").copied();
        for root in first.into_iter().chain(0..self.all.len()) {
            let mut path = Vec::new();
            if !begun[root] {
                begun[root] = true;
                path.push((root, 0, Size { bytes: 0, depth: 0 }));
            }
            while let Some((place, next, mut size)) = path.pop() {
                let definition = &self.all[place];
                let mut into = None;
                let mut next = next;
                while let Some(name) = definition.names.get(next) {
                    next += 1;
                    let Some(&named) = self.places.get(name) else { continue };
                    if !begun[named] {
                        into = Some(named);
                        next -= 1;
                        break;
                    }
                    // The definition is not done, so it refers to itself. This is an error, or a
                    // recursive rule.
                    let Some(other) = done[named] else { continue };
                    size.depth = size.depth.max(other.depth);
                    if definition.terminal {
                        size.bytes = size.bytes.saturating_add(other.bytes);
                    }
                }
                if let Some(named) = into {
                    begun[named] = true;
                    path.push((place, next, size));
                    path.push((named, 0, Size { bytes: 0, depth: 0 }));
                    continue;
                }
                growth = growth.saturating_add(size.bytes);
                size.depth += 1 + definition.groups;
                size.bytes = size.bytes.saturating_add(definition.bytes);
                if growth > GROWTH {
                    let reason = format!(
                        "expanding the names in {} adds more than {GROWTH} bytes to its terminals",
                        definition.name
                    );
                    return Err(GrammarError::invalid(reason));
                }
                if size.depth > DEPTH {
                    let reason = format!("names and groups are nested more than {DEPTH} deep");
                    return Err(GrammarError::invalid(reason));
                }
                done[place] = Some(size);
            }
        }
        Ok(())
    }
}

/// Returns the number of tokens between a name and its definition; `None` if the name is not
/// defined here.
fn body(rest: &[(Token<'_>, usize)]) -> Option<usize> {
    let mark =
        |at: usize, byte: u8| rest.get(at).is_some_and(|(found, _)| *found == Token::Mark(byte));
    let mut at = 0;
    // A priority such as `.3` is read as a mark and a name of digits. A parameter is written `::_`.
    if mark(at, b'.') {
        at += 2;
    }
    if mark(at, b':') && mark(at + 1, b':') {
        at += 3;
    }
    if mark(at, b'[') {
        at += 1 + rest[at..].iter().position(|(token, _)| *token == Token::Mark(b']'))?;
    }
    (mark(at, b':') && !mark(at + 1, b':')).then_some(at + 1)
}

/// Splits a grammar into tokens, each with its size in bytes. Unknown text becomes marks, because
/// the compiler reports syntax errors.
fn tokens(text: &str) -> Vec<(Token<'_>, usize)> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let begin = at;
        let in_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        at += 1;
        let token = match byte {
            b' ' | b'\t' | b'\r' | b'\n' => continue,
            b'#' => {
                at = end_of_line(bytes, at);
                continue;
            }
            b'/' if bytes.get(at) == Some(&b'/') => {
                at = end_of_line(bytes, at);
                continue;
            }
            b'"' | b'/' => {
                at = end_of_literal(bytes, at, byte);
                Token::Literal
            }
            b'%' => {
                while bytes.get(at).copied().is_some_and(in_name) {
                    at += 1;
                }
                if matches!(&text[begin..at], "%json" | "%regex" | "%llguidance") {
                    let mut values =
                        serde_json::Deserializer::from_str(&text[at..]).into_iter::<IgnoredAny>();
                    if values.next().is_some_and(|value| value.is_ok()) {
                        at += values.byte_offset();
                    }
                    Token::Literal
                } else {
                    Token::Mark(byte)
                }
            }
            byte if in_name(byte) || matches!(byte, b'!' | b'?') => {
                while bytes.get(at).copied().is_some_and(in_name) {
                    at += 1;
                }
                Token::Name(&text[begin..at])
            }
            // A multi-byte character becomes one mark per byte.
            byte => Token::Mark(byte),
        };
        tokens.push((token, at - begin));
    }
    tokens
}

fn end_of_line(bytes: &[u8], from: usize) -> usize {
    let end = bytes[from..].iter().position(|&byte| byte == b'\n');
    end.map_or(bytes.len(), |end| from + end)
}

/// Returns the end of the literal whose content starts at `from`.
fn end_of_literal(bytes: &[u8], from: usize, quote: u8) -> usize {
    let mut at = from;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'\\' => at += 1,
            byte if byte == quote => break,
            _ => {}
        }
    }
    at.min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a grammar of `lines` terminals. Each terminal is `times` copies of the next one.
    fn doubled(lines: usize, times: usize) -> String {
        let mut text = String::from("start: T0\n");
        for line in 0..lines {
            let next = format!(" T{}", line + 1).repeat(times);
            text.push_str(&format!("T{line}:{next}\n"));
        }
        text + &format!("T{lines}: /[ab]/\n")
    }

    #[test]
    fn terminals_that_double_are_counted_before_they_are_written_out() {
        check(&doubled(10, 2)).unwrap();
        for (lines, times) in [(19, 2), (60, 2), (3, 1000), (2, 100_000)] {
            let error = check(&doubled(lines, times)).unwrap_err().to_string();
            assert!(error.contains("expanding the names in T"), "{error}");
        }
        // Rules are not expanded, unless attributes make them expressions.
        let rules = doubled(60, 2).replace('T', "t");
        check(&rules).unwrap();
        let suffix = format!("{}r[suffix=\"x\"]:{}\n", doubled(9, 2), " T0".repeat(300));
        assert!(check(&suffix).is_err());
        check(&suffix.replace("[suffix=\"x\"]", "")).unwrap();
        assert!(check(&format!("{}r: ~({})\n", doubled(9, 2), " T0".repeat(300))).is_err());
    }

    #[test]
    fn what_is_no_name_does_not_count() {
        let text = r#"
start: %json {"a": "T0 T0", "b": [": T0"]} a // T0 T0
a.3: "T0 : T0 \" T0" /T0 \/ T0/i
b[capture]: a (b | "x"){2,3} # T0: T0
T0: "x"
"#;
        let found = Definitions::read(text);
        let names: Vec<_> = found.all.iter().map(|one| (one.name, one.names.clone())).collect();
        let expected: [(&str, Vec<&str>); 4] = [
            ("start", vec!["a"]),
            ("a", vec!["i"]),
            ("b", vec!["a", "b", "2", "3"]),
            ("T0", vec![]),
        ];
        assert_eq!(names, expected);
        assert_eq!(found.all[2].groups, 1);
        check(text).unwrap();
    }

    #[test]
    fn long_chains_are_refused_and_recursion_is_none() {
        let chain = |names: usize| -> String {
            let line = |at: usize| format!("r{at}: \"a\" r{}\n", at + 1);
            let lines: String = (0..names).map(line).collect();
            // The definitions are reversed, since their order makes no difference.
            let mut lines: Vec<&str> = lines.lines().collect();
            lines.reverse();
            format!("r{names}: \"b\"\n{}\nstart: r0\n", lines.join("\n"))
        };
        check(&chain(1500)).unwrap();
        assert!(check(&chain(2500)).unwrap_err().to_string().contains("nested"));
        let grouped =
            chain(200).replace("\"a\"", &format!("{}\"a\"{}", "(".repeat(20), ")".repeat(20)));
        assert!(check(&grouped).unwrap_err().to_string().contains("nested"));
        check("start: \"(\" start \")\" | start start | \"x\"\n").unwrap();
    }

    #[test]
    fn classes_of_unicode_and_texts_are_bounded() {
        check(&format!("start: /{}/", r"\w".repeat(1000))).unwrap();
        assert!(check(&format!("start: /{}/", r"\w".repeat(3000))).is_err());
        assert!(check(&format!("start: \"{}\"", "a".repeat(TEXT))).is_err());
    }
}
