//! The part of the parser that parses calls, and restores text that turns out not to be a call.

use super::alone::Alone;
use super::call::{Call, Context, Step};
use super::items::Items;
use super::named::Named;
use super::object::Object;
use super::tagged::Tagged;
use super::whole::{Syntax, Whole};
use super::{Body, Mark, Parser, SHORT, State};
use crate::family::{Body as Form, Calls};
use crate::parts::Parts;
use crate::schema::Tools;

/// The longest text in bytes that is parsed again if it was not a call. A call may start within
/// that text.
const AGAIN: usize = 2048;

impl Parser {
    /// Returns the state after a mark that may start calls. `raw` is the text up to and including
    /// the mark.
    pub(super) fn opened(&self, mark: Mark, raw: String, reasoning: bool) -> State {
        let form = self.calls().map(|calls| &calls.body);
        let items = Items::new(raw, reasoning, mark == Mark::Section);
        match (mark, form) {
            (Mark::Section, _) | (Mark::Call, Some(Form::Object(_) | Form::Named(_))) => {
                State::Items(items)
            }
            (Mark::Call, Some(Form::Tagged(tags))) if !tags.name.0.is_empty() => {
                State::Items(items)
            }
            _ => self.begin(items),
        }
    }

    /// Returns the state at the start of a call.
    pub(super) fn begin(&self, items: Items) -> State {
        let body = match self.calls().map(|calls| &calls.body) {
            Some(Form::Named(marks)) => Body::Named(Named::new(marks)),
            Some(Form::Tagged(tags)) => Body::Tagged(Tagged::new(tags)),
            Some(Form::Unquoted(quote)) => Body::Whole(Whole::new(Syntax::Unquoted(quote))),
            Some(Form::Python) => Body::Whole(Whole::new(Syntax::Python)),
            Some(Form::Object(_) | Form::List(_) | Form::Channels) | None => {
                let bare = self.calls().is_some_and(|calls| calls.bare.is_some());
                Body::Object(Object::new(bare))
            }
        };
        State::Call { body, call: Call::new(self.begun), items }
    }

    /// Parses the text before, between and after calls. Returns false if more text is needed.
    pub(super) fn step_items(&mut self, mut items: Items, out: &mut Parts) -> bool {
        let Some(form) = self.calls().map(|calls| &calls.body) else { return true };
        loop {
            let blank = self.blank_before();
            let text = &self.pending[blank..];
            let around = self.marks.iter().filter(|(_, meaning)| *meaning != Mark::Inner);
            let found = around.clone().find(|(mark, _)| text.starts_with(mark)).copied();
            if let Some((mark, meaning)) = found {
                match meaning {
                    Mark::Stray if items.called => {
                        self.pending.drain(..blank + mark.len());
                        items.close();
                        continue;
                    }
                    Mark::Section | Mark::Call | Mark::Name if items.called => {
                        let skipped: String = self.pending.drain(..blank + mark.len()).collect();
                        let raw = format!("{}{skipped}", items.text());
                        self.state = self.opened(meaning, raw, false);
                    }
                    Mark::Call | Mark::Name if items.section || meaning == Mark::Name => {
                        let skipped: String = self.pending.drain(..blank + mark.len()).collect();
                        let Items { raw, reasoning, .. } = items;
                        self.state = self.opened(meaning, raw + &skipped, reasoning);
                    }
                    _ => self.restore(&items, "", out),
                }
                return true;
            }
            let first = text.chars().next();
            let waits = around.clone().any(|(mark, _)| mark.starts_with(text));
            let Some(c) = first.filter(|_| !waits) else {
                self.blanks = blank;
                self.state = State::Items(items);
                return false;
            };
            let opens = match form {
                Form::Python => c.is_alphabetic() || c == '_',
                // Some models also write calls in the format of another family.
                _ => c == '{',
            };
            let opens = opens && !items.closed;
            let named = !items.called && matches!(form, Form::Named(_)) && c.is_alphabetic();
            if opens || named {
                let skipped: String = self.pending.drain(..blank).collect();
                items.raw.push_str(&skipped);
                self.state = match self.begin(items) {
                    State::Call { body: Body::Tagged(_) | Body::Named(_), call, items }
                        if opens =>
                    {
                        State::Call { body: Body::Object(Object::new(false)), call, items }
                    }
                    state => state,
                };
                return true;
            }
            if !items.takes(c) {
                // The text is not part of a call, so it becomes ordinary text.
                self.restore(&items, "", out);
                return true;
            }
            let skipped: String = self.pending.drain(..blank + c.len_utf8()).collect();
            items.take(&skipped);
        }
    }

    pub(super) fn step_call(
        &mut self,
        mut body: Body,
        mut call: Call,
        items: Items,
        out: &mut Parts,
    ) -> bool {
        let Some(calls) = self.calls() else { return true };
        let context = context(calls, &self.reading.tools);
        let pending = &mut self.pending;
        let had_begun = call.has_begun();
        // The text before the call ends once the call's name is known.
        let mut parts = Parts::default();
        let step = match &mut body {
            Body::Object(object) => object.step(pending, &mut call, &mut parts, context),
            Body::Named(named) => named.step(pending, &mut call, &mut parts, context),
            Body::Tagged(tagged) => tagged.step(pending, &mut call, &mut parts, context),
            Body::Whole(whole) => whole.step(pending, &mut call, &mut parts, context),
        };
        if call.has_begun() && !had_begun {
            self.begun += 1;
            self.begins_call(items.reasoning);
        }
        out.append(&mut parts);
        match step {
            Step::More => {
                self.state = State::Call { body, call, items };
                false
            }
            Step::Done => {
                call.end(out);
                self.complete += 1;
                let over = self.reading.single;
                self.state = if over { State::Over } else { State::Items(Items::behind_call()) };
                true
            }
            Step::Broken => {
                if call.has_begun() {
                    self.state = State::Items(Items::behind_call());
                } else {
                    self.restore(&items, &call.raw, out);
                }
                true
            }
        }
    }

    /// Records that a call ends the text before it. Drops the white space before the call, unless
    /// the white space follows content.
    fn begins_call(&mut self, reasoning: bool) {
        self.unclosed |= reasoning;
        if reasoning || !self.said {
            self.blank.clear();
            self.strip = true;
        }
    }

    pub(super) fn step_alone(&mut self, mut alone: Box<Alone>) -> bool {
        let Some(calls) = self.calls() else { return true };
        let text = std::mem::take(&mut self.pending);
        let step = alone.push(&text, context(calls, &self.reading.tools));
        if step == Step::Broken {
            // The text is parsed again like any other text.
            self.pending = alone.into_text();
            self.mixed = true;
            return true;
        }
        self.state = State::Alone(alone);
        false
    }

    /// Restores text that looked like the beginning of a call.
    fn restore(&mut self, items: &Items, more: &str, out: &mut Parts) {
        let mut text = format!("{}{more}", items.text());
        let blank = text.len() - text.trim_start().len();
        let mark = self.marks.iter().filter(|(mark, _)| text[blank..].starts_with(mark));
        let mark = mark.map(|(mark, _)| mark.len()).max();
        let first = mark.or_else(|| Some(text[blank..].chars().next()?.len_utf8()));
        if text.len() <= AGAIN
            && let Some(first) = first
        {
            // A call may start after the first mark.
            self.pending.insert_str(0, &text[blank + first..]);
            self.blanks = 0;
            text.truncate(blank + first);
        }
        let text = self.as_said(&text);
        if items.reasoning {
            self.state = State::Reasoning;
            self.reasoning(&text, out);
        } else {
            self.state = State::Text;
            self.content(&text, out);
        }
    }

    /// Returns text with its marks, except marks that are special tokens.
    pub(super) fn as_said(&self, text: &str) -> String {
        if self.has_special_marks() { self.without_marks(text) } else { text.to_owned() }
    }

    pub(super) fn without_marks(&self, text: &str) -> String {
        let marks = self.calls().map(Calls::marks).unwrap_or_default();
        let marks = marks.into_iter().filter(|mark| mark.len() >= SHORT);
        marks.fold(text.to_owned(), |text, mark| text.replace(mark, ""))
    }

    pub(super) fn has_special_marks(&self) -> bool {
        self.calls().is_some_and(|calls| calls.special)
    }

    pub(super) fn has_special_thought(&self) -> bool {
        self.reading.dialect.reasoning.is_some_and(|reasoning| reasoning.special)
    }

    /// At the end of an answer, restores text in which a call could have started.
    pub(super) fn end_items(&mut self, items: &Items, rest: &str, complete: bool, out: &mut Parts) {
        let text = format!("{}{rest}", items.text());
        // If the answer was truncated, the marks of a call that has begun are not text.
        let text = if complete { self.as_said(&text) } else { self.without_marks(&text) };
        if text.trim().is_empty() {
            return;
        }
        if items.reasoning {
            self.reasoning(&text, out);
            out.reasoning(&std::mem::take(&mut self.blank));
        } else {
            self.content(&text, out);
        }
    }
}

fn context<'a>(calls: &'static Calls, tools: &'a Tools) -> Context<'a> {
    let close = match calls.call.1.trim() {
        "" => calls.section.1.trim(),
        close => close,
    };
    Context { tools, close, special: calls.special, ids: calls.ids }
}
