//! Parses calls whose arguments are converted only once they are complete: Python's and Gemma's.

use super::call::{Call, Context, LONGEST, Step};
use crate::finder::{Found, find, leading_blank};
use crate::parts::Parts;
use crate::python;
use crate::scan::spaced;

/// A call in the format `name(a=1)`, or `call:name{a:1}`.
#[derive(Debug)]
pub(super) struct Whole {
    syntax: Syntax,
    /// The number of open brackets in the arguments.
    depth: u32,
    quote: Option<&'static str>,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    Python,
    /// Gemma's format, with the text that quotes strings.
    Unquoted(&'static str),
}

impl Whole {
    pub(super) fn new(syntax: Syntax) -> Self {
        Self { syntax, depth: 0, quote: None, text: String::new() }
    }

    pub(super) fn step(
        &mut self,
        pending: &mut String,
        call: &mut Call,
        out: &mut Parts,
        context: Context<'_>,
    ) -> Step {
        let (open, close) = match self.syntax {
            Syntax::Python => ('(', ')'),
            Syntax::Unquoted(_) => ('{', '}'),
        };
        if !call.has_begun() {
            let blank = leading_blank(pending);
            call.take(pending, blank);
            let prefix = if self.syntax == Syntax::Python { "" } else { "call:" };
            if !prefix.is_empty() && prefix.starts_with(pending.as_str()) {
                return Step::More;
            }
            let written = pending.strip_prefix(prefix).unwrap_or(pending);
            let allowed = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
            let name = written.trim_start_matches(allowed);
            let length = written.len() - name.len();
            match name.chars().next() {
                _ if length > LONGEST => return Step::Broken,
                None => return Step::More,
                Some(c) if c == open && length > 0 => {}
                Some(_) => return Step::Broken,
            }
            let before = pending.len() - written.len();
            let name = written[..length].to_owned();
            if !call.begin(&name, context, out) {
                return Step::Broken;
            }
            call.take(pending, before + length + 1);
            self.depth = 1;
        }
        loop {
            if let Some(quote) = self.quote {
                // In Python, a quote after a backslash does not end the string.
                let marks = [quote, "\\"];
                let python = self.syntax == Syntax::Python;
                let marks = marks.into_iter().take(if python { 2 } else { 1 });
                match find(pending, marks) {
                    Found::Nothing { safe } => {
                        self.keep(pending, call, safe);
                        return Step::More;
                    }
                    Found::Mark { at, mark: 0 } => {
                        self.keep(pending, call, at + quote.len());
                        self.quote = None;
                    }
                    Found::Mark { at, .. } => {
                        let Some(next) = pending[at + 1..].chars().next() else {
                            self.keep(pending, call, at);
                            return Step::More;
                        };
                        self.keep(pending, call, at + 1 + next.len_utf8());
                    }
                }
                continue;
            }
            let Some(c) = pending.chars().next() else { return Step::More };
            match self.syntax {
                Syntax::Python => {
                    if matches!(c, '"' | '\'') {
                        // Three quotes may start a long string.
                        let same = pending.len() - pending.trim_start_matches(c).len();
                        let quote = match (c, same) {
                            ('"', 3..) => "\"\"\"",
                            ('\'', 3..) => "'''",
                            // This is an empty string, or the beginning of a long string.
                            (_, 1 | 2) if same == pending.len() => return Step::More,
                            (_, 2) => {
                                self.keep(pending, call, 2);
                                continue;
                            }
                            ('"', _) => "\"",
                            _ => "'",
                        };
                        self.keep(pending, call, quote.len());
                        self.quote = Some(quote);
                        continue;
                    }
                }
                Syntax::Unquoted(quote) => {
                    if pending.starts_with(quote) {
                        self.keep(pending, call, quote.len());
                        self.quote = Some(quote);
                        continue;
                    }
                    if quote.starts_with(pending.as_str()) {
                        return Step::More;
                    }
                    if context.special {
                        if pending.starts_with(context.close) {
                            return Step::Broken;
                        }
                        if context.close.starts_with(pending.as_str()) {
                            return Step::More;
                        }
                    }
                }
            }
            match c {
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => self.depth -= 1,
                _ => {}
            }
            if self.depth == 0 && c == close {
                call.take(pending, c.len_utf8());
                let value = self.value(call, context);
                call.arguments(&value, out);
                return Step::Done;
            }
            if self.depth == 0 {
                return Step::Broken;
            }
            self.keep(pending, call, c.len_utf8());
        }
    }

    fn keep(&mut self, pending: &mut String, call: &mut Call, length: usize) {
        self.text.push_str(&pending[..length]);
        call.take(pending, length);
    }

    /// Returns the arguments as JSON. A value with invalid syntax remains text.
    fn value(&self, call: &Call, context: Context<'_>) -> String {
        let tool = call.name.as_deref().unwrap_or_default();
        let value = match self.syntax {
            Syntax::Python => python::arguments(&self.text, &|index| {
                context.tools.argument_name(tool, index).map(str::to_owned)
            }),
            Syntax::Unquoted(quote) => python::unquoted(&format!("{{{}}}", self.text), quote),
        };
        value.map_or_else(|| self.text.clone(), |value| spaced(&value))
    }

    /// Outputs the text read so far, because the answer ended within a call.
    pub(super) fn abandon(&mut self, call: &mut Call, out: &mut Parts) {
        if call.has_begun() {
            call.arguments(&self.text, out);
        }
    }
}
