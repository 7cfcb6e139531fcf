//! Converts a grammar to a single terminal, for text that is the only argument of a call.
//!
//! Text in a JSON string is escaped. So the literals and regular expressions of the grammar, which
//! describe unescaped characters, are rewritten to match escaped text. Rules become terminals:
//! llguidance's lexer does not look ahead for the end of a lexeme, and the characters that follow
//! the text may look like more of it. A recursive grammar cannot be converted and is rejected.

use std::collections::HashMap;
use std::fmt::Write as _;

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind};
use serde_json::Value;

use crate::error::GrammarError;
use crate::expansion;
use crate::lark;
use crate::source::Form;
use crate::work::Work;

type Written = Result<String, GrammarError>;

/// The deepest nesting of a regular expression.
const DEPTH: u32 = 128;

/// Lark's common terminals, as regular expressions.
const COMMON: &[(&str, &str)] = &[
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("FLOAT", r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
    ("SIGNED_FLOAT", r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)"),
    ("NUMBER", r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", r#""([^"\\\n]|\\.)*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
    ("WS_INLINE", "[ \t]+"),
    ("WS", "[ \t\x0c\r\n]+"),
    ("CR", "\r"),
    ("LF", "\n"),
    ("NEWLINE", "(\r?\n)+"),
    ("SH_COMMENT", "#[^\n]*"),
    ("CPP_COMMENT", "//[^\n]*"),
    ("SQL_COMMENT", "--[^\n]*"),
];

/// Where the text is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Inside a JSON string.
    Json,
    /// Between tags, without escapes.
    Tags,
}

/// Returns the right side of a terminal for texts of `form`, and the definitions of further
/// terminals that it uses. The names of these start with `prefix`.
pub(crate) fn terminal(
    form: &Form,
    place: Place,
    prefix: &str,
    work: &mut Work,
) -> Result<(String, String), GrammarError> {
    let writer = Writer { place };
    match form {
        Form::Regex(pattern) => {
            expansion::classes(pattern)?;
            Ok((format!("/{}/", writer.regex(pattern, "")?), String::new()))
        }
        Form::Lark(text) => {
            lark::no_options(text)?;
            expansion::classes(text)?;
            let names = HashMap::from([("start", 0)]);
            let mut rewriter = Rewriter { rest: text, out: String::new(), names, prefix, writer };
            while !rewriter.rest.is_empty() {
                work.visit()?;
                rewriter.next()?;
            }
            work.write(rewriter.out.len())?;
            Ok((format!("{prefix}_0"), rewriter.out))
        }
        _ => Err(GrammarError::invalid("the form of a text is a grammar or an expression")),
    }
}

struct Rewriter<'a> {
    rest: &'a str,
    out: String,
    /// The indices of rules and terminals, by name.
    names: HashMap<&'a str, usize>,
    /// The prefix of the new names of rules and terminals.
    prefix: &'a str,
    writer: Writer,
}

impl<'a> Rewriter<'a> {
    /// Removes the bytes up to `end` from the unread text and returns them.
    fn take(&mut self, end: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len());
        self.take(end)
    }

    /// Rewrites the next token.
    fn next(&mut self) -> Result<(), GrammarError> {
        let Some(first) = self.rest.chars().next() else { return Ok(()) };
        if self.rest.starts_with("//") || first == '#' {
            self.take_while(|c| c != '\n');
            return Ok(());
        }
        match first {
            '"' => self.literal(),
            '/' => self.regex(),
            '%' => self.directive(),
            '-' if self.rest.starts_with("->") => {
                // Names of alternatives do not affect the text.
                self.take(2);
                self.take_while(char::is_whitespace);
                self.take_while(in_name);
                Ok(())
            }
            '<' => Err(GrammarError::invalid("special tokens can't stand in the text of a call")),
            c if in_name(c) => {
                self.name();
                Ok(())
            }
            // Lark's tree modifiers do not change the text that a rule matches.
            '!' | '?' if self.begins_line() => {
                self.take(1);
                Ok(())
            }
            c => {
                self.take(c.len_utf8());
                self.out.push(c);
                Ok(())
            }
        }
    }

    /// True if nothing but spaces precedes on this line.
    fn begins_line(&self) -> bool {
        self.out.trim_end_matches([' ', '\t']).ends_with(['\n']) || self.out.trim().is_empty()
    }

    /// Writes the new name of a rule or terminal.
    fn name(&mut self) {
        let defines = self.begins_line();
        let name = self.take_while(in_name);
        // This is the count of a repetition: `~2..4`.
        if name.starts_with(|c: char| c.is_ascii_digit()) {
            self.out.push_str(name);
            return;
        }
        self.renamed(name);
        if defines && self.rest.starts_with('.') {
            // A priority has no effect on a single lexeme.
            self.take(1);
            self.take_while(|c| c.is_ascii_digit());
        }
    }

    fn renamed(&mut self, name: &'a str) {
        let next = self.names.len();
        let number = *self.names.entry(name).or_insert(next);
        let _ = write!(self.out, "{}_{number}", self.prefix);
    }

    /// Reads a literal in quotes and returns its text.
    fn quoted(&mut self) -> Result<String, GrammarError> {
        let end =
            end_of(self.rest, '"').ok_or_else(|| GrammarError::invalid("a string has no end"))?;
        let literal = self.take(end);
        // Lark's escape `\xHH` does not exist in JSON.
        let json = literal.replace(r"\x", r"\u00").replace(r"\'", "'");
        let text: String = serde_json::from_str(&json)
            .map_err(|_| GrammarError::invalid(format!("{literal}: not a string of Lark")))?;
        Ok(text)
    }

    fn literal(&mut self) -> Result<(), GrammarError> {
        let text = self.quoted()?;
        let range = self.rest.trim_start().strip_prefix("..").map(str::trim_start);
        if let Some(rest) = range.filter(|rest| rest.starts_with('"')) {
            self.rest = rest;
            let last = self.quoted()?;
            let (Some(first), Some(last)) = (only(&text), only(&last)) else {
                return Err(GrammarError::invalid("a range goes from one character to another"));
            };
            if first > last {
                return Err(GrammarError::invalid("a range goes upwards"));
            }
            let class = ClassUnicode::new([ClassUnicodeRange::new(first, last)]);
            self.out.push('/');
            self.writer.class(&class, &mut self.out);
            self.out.push('/');
            return Ok(());
        }
        let json = self.writer.text(&text);
        if self.rest.starts_with('i') && !self.rest[1..].starts_with(in_name) {
            self.take(1);
            if json != text {
                let why = "the flag `i` is not supported on a string with escapes";
                return Err(GrammarError::invalid(why));
            }
            self.out.push_str(&lark::literal(&json));
            self.out.push('i');
            return Ok(());
        }
        self.out.push_str(&lark::literal(&json));
        Ok(())
    }

    fn regex(&mut self) -> Result<(), GrammarError> {
        let end = end_of(self.rest, '/')
            .ok_or_else(|| GrammarError::invalid("a regular expression has no end"))?;
        let whole = self.take(end);
        let flags = self.take_while(|c| c.is_ascii_lowercase());
        let pattern = whole[1..whole.len() - 1].replace(r"\/", "/");
        let written = self.writer.regex(&pattern, flags)?;
        let _ = write!(self.out, "/{written}/");
        Ok(())
    }

    fn directive(&mut self) -> Result<(), GrammarError> {
        self.take(1);
        let name = self.take_while(in_name);
        match name {
            "import" => self.import(),
            name => {
                Err(GrammarError::invalid(format!("%{name} can't stand in the text of a call")))
            }
        }
    }

    /// Reads `%import common.LF`, `%import common.LF -> END` or `%import common (LF, WS)`.
    fn import(&mut self) -> Result<(), GrammarError> {
        let line = self.take_while(|c| c != '\n').trim();
        let line = line.split("//").next().unwrap_or_default().trim();
        let wrong = || GrammarError::invalid(format!("%import {line}: only common terminals"));
        let rest = line.strip_prefix("common").ok_or_else(wrong)?.trim_start();
        let names: Vec<(&'a str, &'a str)> = match rest.strip_prefix('.') {
            Some(one) => {
                let (name, known) = one.split_once("->").unwrap_or((one, one));
                vec![(name.trim(), known.trim())]
            }
            None => {
                let list = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
                let names = list.ok_or_else(wrong)?.split(',');
                names.map(|name| (name.trim(), name.trim())).collect()
            }
        };
        for (name, known) in names {
            let (_, pattern) = COMMON.iter().find(|(c, _)| *c == name).ok_or_else(wrong)?;
            let pattern = self.writer.regex(pattern, "")?;
            self.renamed(known);
            let _ = writeln!(self.out, ": /{pattern}/");
        }
        Ok(())
    }
}

fn in_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn only(text: &str) -> Option<char> {
    let mut chars = text.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// Returns the index after the closing quote of the string that starts with `quote`.
fn end_of(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\n' => return None,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Escapes the text as JSON does, without the quotes.
fn escaped(text: &str) -> String {
    let json = Value::from(text).to_string();
    json[1..json.len() - 1].to_owned()
}

/// Writes texts and regular expressions in the form that they have inside a JSON string or between
/// tags.
#[derive(Debug, Clone, Copy)]
struct Writer {
    place: Place,
}

impl Writer {
    /// Escapes a text if it is written inside a JSON string.
    fn text(self, text: &str) -> String {
        match self.place {
            Place::Json => escaped(text),
            Place::Tags => text.to_owned(),
        }
    }

    /// Returns a regular expression rewritten to match escaped text, without enclosing slashes.
    fn regex(self, pattern: &str, flags: &str) -> Written {
        let mut builder = ParserBuilder::new();
        builder.nest_limit(DEPTH);
        for flag in flags.chars() {
            match flag {
                'i' => builder.case_insensitive(true),
                's' => builder.dot_matches_new_line(true),
                'x' => builder.ignore_whitespace(true),
                'u' => &mut builder,
                other => {
                    let why = format!("regular expressions have no flag `{other}` here");
                    return Err(GrammarError::invalid(why));
                }
            };
        }
        let hir = builder.build().parse(pattern).map_err(|error| {
            let line = error.to_string();
            let last = line.lines().last().unwrap_or_default().trim().to_owned();
            GrammarError::invalid(format!("regular expression: {last}"))
        })?;
        let mut out = String::new();
        self.hir(&hir, &mut out)?;
        Ok(out)
    }

    fn hir(self, hir: &Hir, out: &mut String) -> Result<(), GrammarError> {
        match hir.kind() {
            HirKind::Empty => {}
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0).map_err(|_| {
                    GrammarError::invalid("regular expression: bytes that are no text")
                })?;
                out.push_str(&lark::escaped(&self.text(text)));
            }
            HirKind::Class(Class::Unicode(class)) => self.class(class, out),
            HirKind::Class(Class::Bytes(class)) => match class.to_unicode_class() {
                Some(class) => self.class(&class, out),
                None => return Err(GrammarError::invalid("regular expression: bytes are no text")),
            },
            HirKind::Look(_) => {
                let why = "regular expression: anchors and word boundaries are not possible here";
                return Err(GrammarError::invalid(why));
            }
            HirKind::Repetition(repetition) => {
                out.push_str("(?:");
                self.hir(&repetition.sub, out)?;
                let _ = match (repetition.min, repetition.max) {
                    (min, Some(max)) => write!(out, "){{{min},{max}}}"),
                    (min, None) => write!(out, "){{{min},}}"),
                };
            }
            HirKind::Capture(capture) => {
                out.push_str("(?:");
                self.hir(&capture.sub, out)?;
                out.push(')');
            }
            HirKind::Concat(parts) => {
                for part in parts {
                    self.hir(part, out)?;
                }
            }
            HirKind::Alternation(ways) => {
                for (at, way) in ways.iter().enumerate() {
                    out.push_str(if at == 0 { "(?:" } else { "|" });
                    self.hir(way, out)?;
                }
                out.push(')');
            }
        }
        Ok(())
    }

    /// Writes a class of characters, each unchanged or as one of its escapes.
    fn class(self, class: &ClassUnicode, out: &mut String) {
        let special = |c: char| matches!(c, '\0'..='\u{1f}' | '"' | '\\');
        let mut plain = class.clone();
        let specials = ('\0'..='\u{1f}').chain(['"', '\\']);
        let specials = ClassUnicode::new(specials.map(|c| ClassUnicodeRange::new(c, c)));
        plain.difference(&specials);
        let mut met = class.clone();
        met.intersect(&specials);
        let mut ways = Vec::new();
        if !plain.ranges().is_empty() {
            let mut set = String::from("[");
            for range in plain.ranges() {
                let (first, last) = (u32::from(range.start()), u32::from(range.end()));
                let _ = write!(set, r"\x{{{first:x}}}-\x{{{last:x}}}");
            }
            set.push(']');
            ways.push(set);
        }
        for range in met.ranges() {
            for c in (range.start()..=range.end()).filter(|&c| special(c)) {
                ways.push(lark::escaped(&self.text(c.encode_utf8(&mut [0; 4]))));
            }
        }
        let _ = write!(out, "(?:{})", ways.join("|"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// OpenAI's example grammar of a tool that edits files.
    const PATCH: &str = r#"
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: update_hunk
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
change: (change_context | change_line)+ // a comment "with
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"#;

    fn json(form: Form) -> Result<(String, String), GrammarError> {
        terminal(&form, Place::Json, "T", &mut Work::default())
    }

    #[test]
    fn literals_and_expressions_become_json() {
        let (body, lark) = json(Form::Lark(PATCH.into())).unwrap();
        assert_eq!(body, "T_0");
        assert!(lark.contains(r#"T_1: "*** Begin Patch" T_4"#), "{lark}");
        assert!(lark.contains(r"T_4: /\x{5c}n/"), "{lark}");
        assert!(!lark.contains("comment") && !lark.contains("->"), "{lark}");
        let one = json(Form::Lark(r#"?start.2: "x\n\"\\""#.into())).unwrap().1;
        assert_eq!(one, r#"T_0: "x\\n\\\"\\\\""#);
    }

    #[test]
    fn what_can_t_be_said_is_an_error() {
        for wrong in [
            r#"a: "x"#,
            "a: /x",
            "a: /\\bx/",
            r#"a: %json {}"#,
            "a: <|x|>",
            "%import python.X",
            r#"a: "\n"i"#,
            r#"a: "b".."a""#,
            "a: /(/",
        ] {
            assert!(json(Form::Lark(wrong.into())).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_expression_matches_the_json_of_what_it_matched() {
        let cases = [
            (".*", "a\"b\\c\td", true),
            (".*", "a\nb", false),
            ("(?s).*", "a\nb", true),
            ("[^a]+", "\"\\\u{1}é", true),
            ("[^a]+", "bab", false),
            ("(x|\\n){2,3}", "x\nx", true),
            ("a/b", "a/b", true),
            ("(?i)straße", "STRAßE", true),
        ];
        for (pattern, text, matches) in cases {
            let quoted =
                format!("^(?:{})$", Writer { place: Place::Json }.regex(pattern, "").unwrap());
            let found = regex_automata::meta::Regex::new(&quoted).unwrap().is_match(&escaped(text));
            assert_eq!(found, matches, "{pattern} {text:?} {quoted}");
        }
    }
}
