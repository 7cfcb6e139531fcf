//! Parses a call in the format `{"name": ..., "arguments": {...}}`.

use super::call::{Call, Context, Step};
use crate::finder::leading_blank;
use crate::parts::Parts;
use crate::scan::{Read, Scan, is_object};

/// A call as a JSON object. Its fields may be in any order, and unknown fields are ignored.
#[derive(Debug, Default)]
pub(super) struct Object {
    stage: Stage,
    key: String,
    arguments: Arguments,
    /// Arguments that came before the name.
    early: Option<String>,
    /// True if no mark distinguishes the call from an answer in JSON.
    bare: bool,
}

/// The fields that a call without marks may have.
const FIELDS: [&str; 6] = ["type", "id", "name", "function", "arguments", "parameters"];

#[derive(Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    /// Before the name of a field.
    Field,
    /// Within a key; true if the next character is escaped.
    Key(bool),
    Colon,
    /// Before or within a value.
    Value,
    Next,
}

/// The value of a field. If the value is the arguments of a call that has started, the value's text
/// is output as it arrives.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    scan: Option<Scan>,
    value: String,
    /// True if the value is the arguments of a call.
    wanted: bool,
    /// True if the value is output as it arrives.
    streams: bool,
}

impl Arguments {
    /// Creates the state before a value, which is the arguments of a call if `wanted`.
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted, ..Self::default() }
    }

    /// Reads a value from the front of `pending`, skipping white space before it. Returns `Done`
    /// once the value is complete.
    pub(super) fn read(
        &mut self,
        pending: &mut String,
        call: &mut Call,
        out: &mut Parts,
        context: Context<'_>,
    ) -> Step {
        let mut at = 0;
        let mut step = Step::More;
        if self.scan.is_none() {
            at = leading_blank(pending);
        }
        let begin = at;
        for (offset, c) in pending[begin..].char_indices() {
            let scan = self.scan.get_or_insert_default();
            at = begin + offset;
            if scan.in_string() {
                match closes(&pending[at..], context) {
                    Some(true) => {
                        step = Step::Broken;
                        break;
                    }
                    Some(false) => break,
                    None => {}
                }
            }
            match scan.read(c) {
                Read::Inside => at += c.len_utf8(),
                Read::Last => {
                    at += c.len_utf8();
                    step = Step::Done;
                    break;
                }
                Read::Before => {
                    step = Step::Done;
                    break;
                }
            }
        }
        let text = &pending[begin..at];
        if self.value.is_empty() && text.starts_with('{') && self.wanted && call.has_begun() {
            self.streams = true;
        }
        if self.streams {
            call.arguments(text, out);
        } else {
            self.value.push_str(text);
        }
        call.take(pending, at);
        step
    }

    /// Outputs the rest of the arguments.
    pub(super) fn end(&mut self, call: &mut Call, out: &mut Parts) {
        if !self.streams {
            let value = self.whole();
            call.arguments(&value, out);
        }
    }

    /// Returns the value of complete arguments.
    fn whole(&mut self) -> String {
        let value = std::mem::take(&mut self.value);
        let text = match serde_json::from_str(&value) {
            Ok(serde_json::Value::String(text)) => text,
            Ok(serde_json::Value::Null) => return "{}".to_owned(),
            _ => return value,
        };
        // Some models write the object as a string that contains JSON.
        if is_object(&text) { text } else { value }
    }
}

/// Returns `Some(true)` if a call ends at the start of `rest` although a string is open, `None` if
/// not, and `Some(false)` if more text is needed. JSON strings contain no raw line feeds, and
/// ordinary text contains no special tokens.
fn closes(rest: &str, context: Context<'_>) -> Option<bool> {
    let close = context.close;
    if close.is_empty() {
        return None;
    }
    let rest = if context.special { rest } else { rest.strip_prefix('\n')? };
    if rest.starts_with(close) { Some(true) } else { close.starts_with(rest).then_some(false) }
}

impl Object {
    pub(super) fn new(bare: bool) -> Self {
        Self { bare, ..Self::default() }
    }

    /// True if the arguments are complete, and only the end of the object is missing.
    pub(super) fn has_arguments(&self) -> bool {
        self.stage == Stage::Next && self.arguments.wanted
    }

    pub(super) fn step(
        &mut self,
        pending: &mut String,
        call: &mut Call,
        out: &mut Parts,
        context: Context<'_>,
    ) -> Step {
        // Everything that was read is removed at once, because each removal moves the rest.
        let mut at = 0;
        let step = loop {
            if self.stage == Stage::Value {
                call.take(pending, std::mem::take(&mut at));
                match self.arguments.read(pending, call, out, context) {
                    Step::Done if self.end_value(call, out, context) => self.stage = Stage::Next,
                    Step::Done => break Step::Broken,
                    other => break other,
                }
                continue;
            }
            let Some(c) = pending[at..].chars().next() else { break Step::More };
            if c == '}' && matches!(self.stage, Stage::Next | Stage::Field) {
                if !call.has_begun() {
                    break Step::Broken;
                }
                at += 1;
                break Step::Done;
            }
            let Some(stage) = self.after(c, call) else { break Step::Broken };
            self.stage = stage;
            at += c.len_utf8();
        };
        call.take(pending, at);
        step
    }

    /// Returns the stage after a character outside values; `None` if this is not a call.
    fn after(&mut self, c: char, call: &Call) -> Option<Stage> {
        let blank = c.is_whitespace();
        Some(match (&self.stage, c) {
            (Stage::Key(true), c) => {
                self.key.push(c);
                Stage::Key(false)
            }
            (Stage::Key(false), '\\') => Stage::Key(true),
            (Stage::Key(false), '"') => Stage::Colon,
            (Stage::Key(false), c) => {
                self.key.push(c);
                Stage::Key(false)
            }
            (Stage::Open, _) if blank => Stage::Open,
            (Stage::Open, '{') => Stage::Field,
            (Stage::Field, _) if blank => Stage::Field,
            (Stage::Field, '"') => {
                self.key.clear();
                Stage::Key(false)
            }
            (Stage::Colon, _) if blank => Stage::Colon,
            // Without a mark, an object with other fields is an answer in JSON, which must not be
            // held back.
            (Stage::Colon, ':') if self.bare && !FIELDS.contains(&self.key.as_str()) => {
                return None;
            }
            (Stage::Colon, ':') => {
                let wanted = matches!(self.key.as_str(), "arguments" | "parameters");
                self.arguments = Arguments::new(wanted && !call.written);
                Stage::Value
            }
            (Stage::Next, _) if blank => Stage::Next,
            (Stage::Next, ',') => Stage::Field,
            _ => return None,
        })
    }

    /// Ends the value of the field. Returns false if the text is not a call.
    fn end_value(&mut self, call: &mut Call, out: &mut Parts, context: Context<'_>) -> bool {
        match self.key.as_str() {
            // Some models use `function` as the key of the name.
            "name" | "function" if !call.has_begun() => {
                match serde_json::from_str::<String>(&self.arguments.value) {
                    Ok(name) if call.begin(&name, context, out) => {
                        if let Some(early) = self.early.take() {
                            call.arguments(&early, out);
                        }
                        true
                    }
                    _ => false,
                }
            }
            _ if self.arguments.wanted => {
                if call.has_begun() {
                    self.arguments.end(call, out);
                } else {
                    self.early = Some(self.arguments.whole());
                }
                true
            }
            _ => true,
        }
    }
}
