//! Parses arguments in tags, whose types the schema determines.

use super::call::{Call, Context, LONGEST, Step, near};
use crate::family;
use crate::finder::{Found, find, leading_blank};
use crate::parts::Parts;
use crate::scan::{escaped, spaced};

/// A call with one element per argument. It is converted to a JSON object; strings are output as
/// they arrive.
#[derive(Debug)]
pub(super) struct Tagged {
    tags: &'static family::Tagged,
    stage: Stage,
    key: String,
    value: String,
    kind: Kind,
    /// True if an argument was written.
    some: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Name,
    Arguments,
    Key,
    /// Within the attribute that declares the type of the argument.
    Declared,
    /// Before a value.
    Open,
    /// At the first character of a value.
    First,
    Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Determined by the schema, once the value is complete.
    Schema,
    /// A string, as declared by the argument or the schema.
    String,
    /// JSON, as declared by the argument.
    Json,
}

impl Tagged {
    /// Creates the state after the mark that precedes the name.
    pub(super) fn new(tags: &'static family::Tagged) -> Self {
        let (key, value) = (String::new(), String::new());
        Self { tags, stage: Stage::Name, key, value, kind: Kind::Schema, some: false }
    }

    pub(super) fn step(
        &mut self,
        pending: &mut String,
        call: &mut Call,
        out: &mut Parts,
        context: Context<'_>,
    ) -> Step {
        let tags = self.tags;
        let (key_open, key_close) = (tags.key.0, tags.key.1.trim_end());
        let end = if tags.end.is_empty() { context.close } else { tags.end.trim() };
        loop {
            match self.stage {
                Stage::Name => {
                    let close =
                        if tags.name.1.trim().is_empty() { "\n" } else { tags.name.1.trim() };
                    let blank = leading_blank(pending);
                    call.take(pending, blank);
                    let marks = [close, key_open, end, context.close];
                    let (at, mark) = match near(pending, &marks, LONGEST) {
                        Ok(found) => found,
                        Err(step) => return step,
                    };
                    if !call.begin(&pending[..at], context, out) {
                        return Step::Broken;
                    }
                    call.take(pending, if mark == 0 { at + close.len() } else { at });
                    self.stage = Stage::Arguments;
                }
                Stage::Arguments => {
                    let marks = [key_open, end, context.close];
                    let (at, mark) = match find(pending, marks.into_iter()) {
                        Found::Mark { at, mark } => (at, mark),
                        // The text between arguments is dropped.
                        Found::Nothing { safe } => {
                            call.take(pending, safe);
                            return Step::More;
                        }
                    };
                    if mark == 0 {
                        call.take(pending, at + key_open.len());
                        self.stage = Stage::Key;
                        continue;
                    }
                    // A mark that ends more than this call is left unread.
                    let taken = if tags.end.is_empty() || mark == 2 { at } else { at + end.len() };
                    call.take(pending, taken);
                    self.end(call, out);
                    return Step::Done;
                }
                Stage::Key => {
                    let (at, _) = match near(pending, &[key_close], LONGEST) {
                        Ok(found) => found,
                        Err(step) => return step,
                    };
                    pending[..at].trim().trim_matches('"').clone_into(&mut self.key);
                    call.take(pending, at + key_close.len());
                    self.kind = Kind::Schema;
                    self.stage = if tags.declares { Stage::Declared } else { Stage::Open };
                }
                Stage::Declared => {
                    let (at, _) = match near(pending, &["\">"], LONGEST) {
                        Ok(found) => found,
                        Err(step) => return step,
                    };
                    self.kind = if &pending[..at] == "true" { Kind::String } else { Kind::Json };
                    call.take(pending, at + "\">".len());
                    self.stage = Stage::Open;
                }
                Stage::Open => {
                    let open = tags.value.0.trim();
                    if !open.is_empty() {
                        let (at, _) = match near(pending, &[open], LONGEST) {
                            Ok(found) => found,
                            Err(step) => return step,
                        };
                        call.take(pending, at + open.len());
                    }
                    self.open(call, out, context);
                    self.stage = Stage::First;
                }
                Stage::First => {
                    // This line feed belongs to the tag, not to the value.
                    let Some(c) = pending.chars().next() else { return Step::More };
                    if tags.value.0 == "\n" && c == '\n' {
                        call.take(pending, 1);
                    }
                    self.stage = Stage::Value;
                }
                Stage::Value => {
                    let close = tags.value.1.trim_end();
                    // Some models omit the closing tag of the last argument.
                    let marks = [close, close.trim_start(), context.close];
                    match find(pending, marks.into_iter()) {
                        Found::Nothing { safe } => {
                            self.more(&pending[..safe], call, out);
                            call.take(pending, safe);
                            return Step::More;
                        }
                        Found::Mark { at, mark } => {
                            self.more(&pending[..at], call, out);
                            let taken = if mark < 2 { at + marks[mark].len() } else { at };
                            call.take(pending, taken);
                            self.close(call, out, context);
                            self.stage = Stage::Arguments;
                        }
                    }
                }
            }
        }
    }

    /// Starts an argument.
    fn open(&mut self, call: &mut Call, out: &mut Parts, context: Context<'_>) {
        let before = if self.some { ", " } else { "{" };
        self.some = true;
        let tool = call.name.clone().unwrap_or_default();
        if self.kind == Kind::Schema && context.tools.argument(&tool, &self.key).is_string() {
            self.kind = Kind::String;
        }
        let quote = if self.kind == Kind::String { "\"" } else { "" };
        call.arguments(&format!("{before}\"{}\": {quote}", escaped(&self.key)), out);
        self.value.clear();
    }

    /// Appends to the value of an argument.
    fn more(&mut self, text: &str, call: &mut Call, out: &mut Parts) {
        match self.kind {
            Kind::String => call.arguments(&escaped(text), out),
            Kind::Schema | Kind::Json => self.value.push_str(text),
        }
    }

    /// Ends an argument.
    fn close(&mut self, call: &mut Call, out: &mut Parts, context: Context<'_>) {
        let tool = call.name.clone().unwrap_or_default();
        let value = match self.kind {
            Kind::String => return call.arguments("\"", out),
            Kind::Json => serde_json::from_str(self.value.trim()).ok(),
            Kind::Schema => None,
        };
        let argument = context.tools.argument(&tool, &self.key);
        let value = value.unwrap_or_else(|| argument.value(&self.value));
        call.arguments(&spaced(&value), out);
    }

    fn end(&mut self, call: &mut Call, out: &mut Parts) {
        if self.some {
            call.arguments("}", out);
        }
    }

    /// Handles the end of an answer whose call was not closed. Returns true if the call counts as
    /// complete: the answer ended between two arguments or after the last one.
    pub(super) fn finish(&mut self, call: &mut Call, out: &mut Parts) -> bool {
        let complete = call.has_begun() && self.stage == Stage::Arguments;
        if complete {
            self.end(call, out);
        }
        complete
    }
}
