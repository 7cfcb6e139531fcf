//! Converts GBNF, the notation of llama.cpp's grammars that xgrammar reads too, to Lark.
//!
//! Example: `root ::= "a" [0-9]+ (item | "b"){2,3}`. It has literals, character classes, groups,
//! alternatives and repetitions.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;
use std::str::CharIndices;

use llguidance::regex_to_lark;

use crate::error::GrammarError;
use crate::lark::literal;

/// The deepest nesting of groups.
const DEPTH: usize = 64;

/// Converts the grammar to Lark.
pub(crate) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut reader = Reader { text, chars: text.char_indices().peekable(), used: BTreeSet::new() };
    let mut rules: BTreeMap<String, String> = BTreeMap::new();
    let mut order = Vec::new();
    loop {
        reader.skip(true);
        if reader.chars.peek().is_none() {
            break;
        }
        let name = reader.name()?;
        reader.skip(true);
        for expected in "::=".chars() {
            if reader.next() != Some(expected) {
                return Err(reader.error("expected `::=` after a rule's name"));
            }
        }
        let body = reader.alternatives(0)?;
        if rules.insert(name.clone(), body).is_some() {
            return Err(GrammarError::invalid(format!("the rule {name} is there twice")));
        }
        order.push(name);
    }
    if !rules.contains_key("root") {
        return Err(GrammarError::invalid("there is no rule `root`"));
    }
    if let Some(missing) = reader.used.iter().find(|name| !rules.contains_key(*name)) {
        return Err(GrammarError::invalid(format!("there is no rule `{missing}`")));
    }
    let lines = order.iter().map(|name| format!("{}: {}\n", mangled(name), rules[name]));
    Ok(std::iter::once("start: r_root\n".to_owned()).chain(lines).collect())
}

/// Converts a name to a valid Lark rule name. Different names stay different.
fn mangled(name: &str) -> String {
    name.chars().fold("r_".to_owned(), |mut out, c| {
        match c {
            'a'..='z' | '0'..='9' => out.push(c),
            c => out.push_str(&format!("_{:x}_", u32::from(c))),
        }
        out
    })
}

struct Reader<'a> {
    text: &'a str,
    chars: Peekable<CharIndices<'a>>,
    /// The names of rules that are used by other rules.
    used: BTreeSet<String>,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<char> {
        self.chars.next().map(|(_, c)| c)
    }

    fn peek(&mut self) -> Option<char> {
        self.chars.peek().map(|&(_, c)| c)
    }

    fn error(&mut self, reason: &str) -> GrammarError {
        let at = self.chars.peek().map_or(self.text.len(), |&(at, _)| at);
        let line = 1 + self.text[..at].matches('\n').count();
        GrammarError::invalid(format!("line {line}: {reason}"))
    }

    /// Skips spaces and comments, and also line ends if `lines`.
    fn skip(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                '\n' | '\r' if !lines => return,
                '#' => while self.chars.next_if(|&(_, c)| c != '\n').is_some() {},
                c if c.is_whitespace() => drop(self.next()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let mut name = String::new();
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        while let Some((_, c)) = self.chars.next_if(|&(_, c)| fits(c)) {
            name.push(c);
        }
        if name.is_empty() { Err(self.error("expected a rule's name")) } else { Ok(name) }
    }

    /// Reads alternatives, up to the end of a rule or of a group.
    fn alternatives(&mut self, depth: usize) -> Result<String, GrammarError> {
        if depth > DEPTH {
            return Err(self.error("groups are nested too deep"));
        }
        let mut alternatives = Vec::new();
        loop {
            alternatives.push(self.sequence(depth)?);
            // The next alternative may be on the next line.
            let before = self.chars.clone();
            self.skip(true);
            if self.peek() == Some('|') {
                self.next();
                continue;
            }
            if depth == 0 {
                self.chars = before;
            }
            return Ok(alternatives.join(" | "));
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<String, GrammarError> {
        let mut items = Vec::new();
        loop {
            self.skip(depth > 0 || items.is_empty());
            let Some(c) = self.peek() else { break };
            let item = match c {
                '"' => literal(&self.string()?),
                '[' => self.class()?,
                '.' => {
                    self.next();
                    "/(?s:.)/".to_owned()
                }
                '(' => {
                    self.next();
                    let inner = self.alternatives(depth + 1)?;
                    self.skip(true);
                    if self.next() != Some(')') {
                        return Err(self.error("expected `)`"));
                    }
                    format!("({inner})")
                }
                c if c.is_ascii_alphanumeric() || c == '_' => {
                    if items.is_empty() && self.begins_rule() {
                        break;
                    }
                    let name = self.name()?;
                    let mangled = mangled(&name);
                    self.used.insert(name);
                    mangled
                }
                '|' | ')' | '\n' | '\r' => break,
                _ => return Err(self.error("unexpected character")),
            };
            let repeated = self.repetition()?;
            items.push(item + &repeated);
        }
        // An empty sequence is allowed too.
        Ok(if items.is_empty() { literal("") } else { items.join(" ") })
    }

    /// True if the next name starts a new rule. The rule before it may have an empty right side.
    fn begins_rule(&mut self) -> bool {
        let before = self.chars.clone();
        let begins = self.name().is_ok() && {
            self.skip(true);
            self.peek() == Some(':')
        };
        self.chars = before;
        begins
    }

    fn repetition(&mut self) -> Result<String, GrammarError> {
        match self.peek() {
            Some(c @ ('*' | '+' | '?')) => {
                self.next();
                Ok(c.to_string())
            }
            Some('{') => {
                let mut range = String::new();
                for c in self.chars.by_ref().map(|(_, c)| c) {
                    range.push(c);
                    if c == '}' || range.len() > 32 {
                        break;
                    }
                }
                let inner = range.strip_prefix('{').and_then(|range| range.strip_suffix('}'));
                let fits =
                    |part: &str| part.trim().is_empty() || part.trim().parse::<u32>().is_ok();
                match inner {
                    Some(inner) if inner.split(',').count() <= 2 && inner.split(',').all(fits) => {
                        let trimmed: Vec<&str> = inner.split(',').map(str::trim).collect();
                        Ok(format!("{{{}}}", trimmed.join(",")))
                    }
                    _ => Err(self.error("expected `{n}`, `{n,}` or `{n,m}`")),
                }
            }
            _ => Ok(String::new()),
        }
    }

    fn string(&mut self) -> Result<String, GrammarError> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escape()?),
                Some('\n') | None => return Err(self.error("a string has no end")),
                Some(c) => text.push(c),
            }
        }
    }

    fn escape(&mut self) -> Result<char, GrammarError> {
        let Some(c) = self.next() else { return Err(self.error("nothing after a backslash")) };
        let digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Ok(other),
        };
        let hex: String = (0..digits).filter_map(|_| self.next()).collect();
        let code = u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32);
        code.ok_or_else(|| self.error("an escape names no character"))
    }

    /// Reads a character class and returns it as a regular expression.
    fn class(&mut self) -> Result<String, GrammarError> {
        self.next();
        let mut class = String::from("[");
        if self.peek() == Some('^') {
            self.next();
            class.push('^');
        }
        loop {
            match self.next() {
                Some(']') => break,
                Some('-') => class.push('-'),
                Some('\\') => {
                    let c = self.escape()?;
                    class.push_str(&format!(r"\x{{{:x}}}", u32::from(c)));
                }
                Some('\n') | None => return Err(self.error("a class has no end")),
                Some(c @ ('[' | '&' | '~' | '^')) => class.extend(['\\', c]),
                Some(c) => class.push(c),
            }
        }
        if class.len() <= 1 || class == "[^" {
            return Err(self.error("a class is empty"));
        }
        class.push(']');
        Ok(format!("/{}/", regex_to_lark(&class, "")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_translated() {
        let text = "# a comment\nroot ::= \"a\\n\" ws [^0-9\\]]{2,3} (item | \"b\")*\n  | .\nws ::= [ \\t]*\nItem-2 ::=\nitem ::= Item-2 \"x\"?";
        let lark = to_lark(text).unwrap();
        let expected = [
            "start: r_root",
            r#"r_root: "a\n" r_ws /[^0-9\x{5d}]/{2,3} (r_item | "b")* | /(?s:.)/"#,
            r"r_ws: /[ \x{9}]/*",
            r#"r__49_tem_2d_2: """#,
            r#"r_item: r__49_tem_2d_2 "x"?"#,
        ];
        assert_eq!(lark.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn faults_are_named() {
        for (text, reason) in [
            ("", "there is no rule `root`"),
            ("a ::= \"x\"", "there is no rule `root`"),
            ("root ::= b", "there is no rule `b`"),
            ("root ::= \"x", "line 1: a string has no end"),
            ("root = \"x\"", "line 1: expected `::=` after a rule's name"),
            ("root ::= (\"x\"", "line 1: expected `)`"),
            ("root ::= \"x\"{a}", "line 1: expected `{n}`, `{n,}` or `{n,m}`"),
            ("root ::= \"x\"\nroot ::= \"y\"", "the rule root is there twice"),
            ("root ::= \"x\"\n\n$", "line 3: expected a rule's name"),
            ("root ::= []", "line 1: a class is empty"),
            ("root ::= \"x\" !", "line 1: unexpected character"),
        ] {
            assert_eq!(to_lark(text), Err(GrammarError::invalid(reason)), "{text}");
        }
        let deep = format!("root ::= {}\"x\"{}", "(".repeat(10_000), ")".repeat(10_000));
        assert!(to_lark(&deep).is_err());
    }
}
