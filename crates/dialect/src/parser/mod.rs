//! The parser from a model's text to parts.
//!
//! One automaton reads reasoning, text and calls. It works on characters, and holds back those that
//! may become a mark. So the division of the text into tokens and deltas makes no difference. The
//! text must contain special tokens that are marks.

mod call;
mod harmony;
mod named;
mod object;
mod tagged;
#[cfg(test)]
mod tests;
mod whole;

use std::sync::Arc;

use crate::family::{Body as Form, Calls};
use crate::finder::{Found, find, leading_blank, without_trailing_blank};
use crate::names::Dialect;
use crate::parts::Parts;
use crate::schema::Tools;
use call::{Call, Context, Step};
use harmony::Harmony;
use named::Named;
use object::Object;
use tagged::Tagged;
use whole::{Syntax, Whole};

/// Marks of fewer bytes, such as `>`, are in texts too.
const SHORT: usize = 4;

/// The settings of a parser for one answer.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// The dialect of the model.
    pub dialect: Dialect,
    /// The tools that may be called. Without tools, calls are ordinary text.
    pub tools: Arc<Tools>,
    /// True if at most one call is allowed.
    pub single: bool,
    /// True if reasoning is left out.
    pub silent: bool,
    /// True if a grammar keeps calls in their place. Then there are none in reasoning.
    pub bound: bool,
    /// True if the client has named the tool.
    pub named: bool,
    /// The state in which the answer begins.
    pub start: Start,
}

/// The part of an answer in which a prompt leaves a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In its reasoning.
    Reasoning,
    /// Behind its reasoning.
    Answer,
    /// Before the first part, which may be either.
    Either,
}

impl Reading {
    /// True if reasoning and other text are different parts.
    pub fn reasons(&self) -> bool {
        self.dialect.reasoning.is_some()
    }
}

/// The state in which an answer begins: in the text, or in the reasoning that the prompt has
/// opened.
#[derive(Debug, Clone, Default)]
pub struct Start(Begin);

#[derive(Debug, Clone, Default)]
enum Begin {
    #[default]
    Text,
    /// White space at its beginning is left out.
    BareText,
    Reasoning,
    BareReasoning,
    Harmony(Harmony),
}

impl Start {
    /// The state behind the rendered `prompt`. `continues` is true if the prompt ends inside a
    /// message that the model continues.
    pub fn of(dialect: Dialect, prompt: &str, continues: bool) -> Self {
        if dialect.is_harmony() {
            return Self(Begin::Harmony(Harmony::new(prompt)));
        }
        let Some(reasoning) = dialect.reasoning else { return Self::default() };
        let (open, close) = (reasoning.open.trim_end(), reasoning.close.trim_end());
        let end = prompt.trim_end();
        if end.ends_with(open) {
            return Self(Begin::BareReasoning);
        }
        if end.ends_with(close) {
            return Self(Begin::BareText);
        }
        let opened = || prompt.rfind(open).is_some_and(|at| !prompt[at..].contains(close));
        Self(match continues {
            true if opened() => Begin::Reasoning,
            false if reasoning.begins => Begin::BareReasoning,
            _ => Begin::Text,
        })
    }
}

impl Start {
    /// The part of the answer in this state.
    pub fn place(&self) -> Place {
        match self.0 {
            Begin::Reasoning | Begin::BareReasoning => Place::Reasoning,
            Begin::BareText => Place::Answer,
            Begin::Text | Begin::Harmony(_) => Place::Either,
        }
    }
}

/// A parser of one answer.
#[derive(Debug)]
pub struct Parser {
    reading: Reading,
    marks: Vec<(&'static str, Mark)>,
    state: State,
    /// The text that has come and was not read.
    pending: String,
    /// Bytes at the front of `pending` that are known to be white space. They wait for what follows
    /// them, and are not looked at again.
    blanks: usize,
    /// White space that is not given out before it is known what follows.
    blank: String,
    /// Something else than white space was given out as content.
    said: bool,
    /// White space that comes now is left out.
    strip: bool,
    begun: u32,
    complete: u32,
}

/// The meaning of a mark in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Section,
    Call,
    /// A call whose mark was left out begins with that of its name.
    Name,
    /// The end of something that has ended.
    Stray,
    Think,
    Thought,
}

#[derive(Debug)]
enum State {
    Text,
    Reasoning,
    /// Around and between calls. What was left out there, as long as it is not known that there are
    /// any.
    Items {
        raw: Option<String>,
    },
    Call {
        body: Body,
        call: Call,
        raw: Option<String>,
    },
    Harmony(Harmony),
    /// All demanded parts are read.
    Over,
}

#[derive(Debug)]
enum Body {
    Object(Object),
    Named(Named),
    Tagged(Tagged),
    Whole(Whole),
}

impl Parser {
    /// A parser at the start of an answer.
    pub fn new(reading: Reading) -> Self {
        let Dialect { calls, reasoning } = reading.dialect;
        let calls = calls.filter(|_| !reading.tools.is_empty());
        let mut marks = Vec::new();
        let mut add = |text: &'static str, mark| {
            if !text.trim().is_empty() {
                marks.push((text.trim(), mark));
            }
        };
        if let Some(calls) = calls {
            add(calls.section.0, Mark::Section);
            add(calls.section.1, Mark::Stray);
            add(calls.call.0, Mark::Call);
            add(calls.call.1, Mark::Stray);
            if let Form::Tagged(tags) = &calls.body {
                add(tags.name.0, Mark::Name);
                add(tags.end, Mark::Stray);
            }
        }
        if let Some(reasoning) = reasoning {
            add(reasoning.open, Mark::Think);
            add(reasoning.close, Mark::Thought);
        }
        let (state, strip) = match &reading.start.0 {
            Begin::Text => (State::Text, false),
            Begin::BareText => (State::Text, true),
            Begin::Reasoning => (State::Reasoning, false),
            Begin::BareReasoning => (State::Reasoning, true),
            Begin::Harmony(harmony) => (State::Harmony(harmony.clone()), false),
        };
        Self {
            reading,
            marks,
            state,
            pending: String::new(),
            blanks: 0,
            blank: String::new(),
            said: false,
            strip,
            begun: 0,
            complete: 0,
        }
    }

    /// True if the only demanded call is complete. Nothing after it is read.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// True if the answer is inside reasoning.
    pub fn is_reasoning(&self) -> bool {
        match &self.state {
            State::Reasoning => true,
            State::Harmony(harmony) => harmony.is_reasoning(),
            State::Text | State::Items { .. } | State::Call { .. } | State::Over => false,
        }
    }

    /// True if the answer has a complete call that was the model's own choice.
    pub fn has_chosen(&self) -> bool {
        self.complete > 0 && !self.reading.named
    }

    /// The number of complete calls.
    pub fn complete_calls(&self) -> u32 {
        self.complete
    }

    /// Reads more text.
    pub fn push(&mut self, text: &str, out: &mut Parts) {
        self.pending.push_str(text);
        while self.step(out) {}
        self.hide(out);
    }

    /// Removes reasoning if it is not wanted.
    fn hide(&self, out: &mut Parts) {
        if self.reading.silent {
            out.without_reasoning();
        }
    }

    /// Reads the held text at the end of an answer. `complete` is true if the model ended the
    /// answer, and false if a limit of length did.
    pub fn finish(&mut self, complete: bool, out: &mut Parts) {
        let mut rest = std::mem::take(&mut self.pending);
        if !complete
            && rest.len() >= SHORT
            && self.marks.iter().any(|(mark, _)| mark.starts_with(&rest))
        {
            // The answer was cut in the middle of a mark.
            rest.clear();
        }
        match std::mem::replace(&mut self.state, State::Over) {
            State::Text => self.content(&rest, out),
            State::Reasoning => {
                self.reasoning(&rest, out);
                out.reasoning(&std::mem::take(&mut self.blank));
            }
            State::Items { raw: Some(raw) } => self.restore(&(raw + &rest), out),
            State::Items { raw: None } | State::Over => {}
            State::Call { call, raw, .. } if !call.has_begun() => {
                let raw = raw.unwrap_or_default();
                self.restore(&(raw + &call.raw + &rest), out);
            }
            State::Call { mut body, mut call, .. } => {
                let ended = match &mut body {
                    Body::Object(object) => object.has_arguments(),
                    Body::Named(_) => false,
                    Body::Tagged(tagged) => complete && tagged.finish(&mut call, out),
                    Body::Whole(whole) => {
                        whole.abandon(&mut call, out);
                        false
                    }
                };
                self.complete += u32::from(complete && ended);
            }
            State::Harmony(mut harmony) => {
                self.complete += harmony.finish(&mut { rest }, complete, out);
            }
        }
        self.state = State::Over;
        if self.begun == 0 {
            out.content(&std::mem::take(&mut self.blank));
        }
        self.hide(out);
    }

    /// Reads a little; false if there is nothing more to be read now.
    fn step(&mut self, out: &mut Parts) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.step_text(out),
            State::Reasoning => {
                self.state = State::Reasoning;
                self.step_reasoning(out)
            }
            State::Items { raw } => self.step_items(raw, out),
            State::Call { body, call, raw } => self.step_call(body, call, raw, out),
            State::Harmony(mut harmony) => {
                let (pending, begun) = (&mut self.pending, &mut self.begun);
                let completed = harmony.push(pending, begun, &self.reading.tools, out);
                self.complete += completed;
                let over = self.reading.single && self.complete > 0;
                self.state = if over { State::Over } else { State::Harmony(harmony) };
                completed > 0
            }
            State::Over => {
                self.state = State::Over;
                self.pending.clear();
                false
            }
        }
    }

    fn step_text(&mut self, out: &mut Parts) -> bool {
        if !self.said
            && let Some(bare) = self.calls().and_then(|calls| calls.bare)
        {
            let blank = self.blank_before();
            let text = &self.pending[blank..];
            if text.is_empty() {
                self.blanks = blank;
                return false;
            }
            if text.starts_with(bare) {
                let raw = self.pending.drain(..blank).collect();
                self.state = State::Items { raw: Some(raw) };
                return true;
            }
        }
        match find(&self.pending, self.marks.iter().map(|(text, _)| *text)) {
            Found::Nothing { safe } => {
                let text: String = self.pending.drain(..safe).collect();
                self.content(&text, out);
                false
            }
            Found::Mark { at, mark } => {
                let (mark, meaning) = self.marks[mark];
                let text: String = self.pending.drain(..at + mark.len()).collect();
                self.content(&text[..at], out);
                self.meet(meaning);
                true
            }
        }
    }

    fn step_reasoning(&mut self, out: &mut Parts) -> bool {
        // A call's opener ends reasoning, unless its end is sure to come.
        let ends = |meaning: Mark| match self.reading.bound {
            true => meaning == Mark::Thought,
            false => meaning != Mark::Stray,
        };
        let marks = self.marks.iter().filter(|(_, meaning)| ends(*meaning));
        let marks: Vec<_> = marks.copied().collect();
        match find(&self.pending, marks.iter().map(|(text, _)| *text)) {
            Found::Nothing { safe } => {
                let text: String = self.pending.drain(..safe).collect();
                self.reasoning(&text, out);
                false
            }
            Found::Mark { at, mark } => {
                let (mark, meaning) = marks[mark];
                let text: String = self.pending.drain(..at + mark.len()).collect();
                self.reasoning(&text[..at], out);
                self.meet(meaning);
                true
            }
        }
    }

    /// Goes to the state that a mark leads to, in text or in reasoning.
    fn meet(&mut self, mark: Mark) {
        let form = self.calls().map(|calls| &calls.body);
        // A mark that ends nothing divides no text.
        if mark != Mark::Stray || self.begun > 0 {
            self.blank.clear();
            self.strip = true;
        }
        self.state = match (mark, form) {
            (Mark::Think, _) => State::Reasoning,
            (Mark::Section, Some(Form::List(_) | Form::Python))
            | (Mark::Call, Some(Form::Object(_) | Form::Named(_))) => {
                State::Items { raw: Some(String::new()) }
            }
            (Mark::Call, Some(Form::Tagged(tags))) if !tags.name.0.is_empty() => {
                State::Items { raw: Some(String::new()) }
            }
            (Mark::Call | Mark::Name, Some(_)) => self.begin(None),
            (Mark::Section | Mark::Stray | Mark::Thought | Mark::Call | Mark::Name, _) => {
                State::Text
            }
        };
    }

    /// Bytes of white space before the next text. Who leaves them there notes their number again.
    fn blank_before(&mut self) -> usize {
        let known = std::mem::take(&mut self.blanks);
        known + leading_blank(&self.pending[known..])
    }

    /// A call begins here.
    fn begin(&self, raw: Option<String>) -> State {
        let body = match self.calls().map(|calls| &calls.body) {
            Some(Form::Named(marks)) => Body::Named(Named::new(marks)),
            Some(Form::Tagged(tags)) => Body::Tagged(Tagged::new(tags)),
            Some(Form::Unquoted(quote)) => Body::Whole(Whole::new(Syntax::Unquoted(quote))),
            Some(Form::Python) => Body::Whole(Whole::new(Syntax::Python)),
            Some(Form::Object(_) | Form::List(_) | Form::Channels) | None => {
                // Without a mark, what looks like a call is one only if there is such a tool.
                let bare = self.calls().is_some_and(|calls| calls.bare.is_some());
                Body::Object(Object::new(bare))
            }
        };
        State::Call { body, call: Call::new(self.begun), raw }
    }

    /// Before, between and after calls.
    fn step_items(&mut self, mut raw: Option<String>, out: &mut Parts) -> bool {
        let Some(form) = self.calls().map(|calls| &calls.body) else { return true };
        loop {
            let blank = self.blank_before();
            let text = &self.pending[blank..];
            let found = self.marks.iter().find(|(mark, _)| text.starts_with(mark));
            if let Some((mark, meaning)) = found {
                let length = if *meaning == Mark::Stray { blank + mark.len() } else { blank };
                self.pending.drain(..length);
                self.restore(&raw.unwrap_or_default(), out);
                return true;
            }
            let first = text.chars().next();
            let waits = self.marks.iter().any(|(mark, _)| mark.starts_with(text));
            let Some(c) = first.filter(|_| !waits) else {
                self.blanks = blank;
                self.state = State::Items { raw };
                return false;
            };
            let opens = match form {
                Form::Python => c.is_alphabetic() || c == '_',
                // A model may have learnt the calls of another family too.
                _ => c == '{',
            };
            if opens || raw.is_some() && matches!(form, Form::Named(_)) && c.is_alphabetic() {
                let skipped: String = self.pending.drain(..blank).collect();
                let raw = raw.map(|raw| raw + &skipped);
                self.state = match self.begin(raw) {
                    State::Call { body: Body::Tagged(_) | Body::Named(_), call, raw } if opens => {
                        State::Call { body: Body::Object(Object::new(false)), call, raw }
                    }
                    state => state,
                };
                return true;
            }
            if !matches!(c, ',' | ';' | '[' | ']' | '}' | '`') {
                // What stands here is text.
                self.restore(&raw.unwrap_or_default(), out);
                return true;
            }
            let skipped: String = self.pending.drain(..=blank).collect();
            if let Some(raw) = &mut raw {
                raw.push_str(&skipped);
            }
        }
    }

    fn step_call(
        &mut self,
        mut body: Body,
        mut call: Call,
        raw: Option<String>,
        out: &mut Parts,
    ) -> bool {
        let Some(calls) = self.calls() else { return true };
        let close = match calls.call.1.trim() {
            "" => calls.section.1.trim(),
            close => close,
        };
        let context =
            Context { tools: &self.reading.tools, close, special: calls.special, ids: calls.ids };
        let pending = &mut self.pending;
        let had_begun = call.has_begun();
        let step = match &mut body {
            Body::Object(object) => object.step(pending, &mut call, out, context),
            Body::Named(named) => named.step(pending, &mut call, out, context),
            Body::Tagged(tagged) => tagged.step(pending, &mut call, out, context),
            Body::Whole(whole) => whole.step(pending, &mut call, out, context),
        };
        self.begun += u32::from(call.has_begun() && !had_begun);
        match step {
            Step::More => {
                let raw = raw.filter(|_| !call.has_begun());
                self.state = State::Call { body, call, raw };
                false
            }
            Step::Done => {
                call.end(out);
                self.complete += 1;
                let over = self.reading.single;
                self.state = if over { State::Over } else { State::Items { raw: None } };
                true
            }
            Step::Broken => {
                if !call.has_begun() {
                    self.restore(&[&raw.unwrap_or_default(), call.raw.as_str()].concat(), out);
                }
                true
            }
        }
    }

    /// Gives text back that looked like the beginning of calls.
    fn restore(&mut self, raw: &str, out: &mut Parts) {
        self.state = State::Text;
        let marks = self.calls().map(Calls::marks).unwrap_or_default();
        let marks = marks.into_iter().filter(|mark| mark.len() >= SHORT);
        let raw = marks.fold(raw.to_owned(), |raw, mark| raw.replace(mark, ""));
        if raw.trim().is_empty() {
            // A mark without anything behind it.
            return;
        }
        self.strip = false;
        self.said = true;
        self.content(&raw, out);
    }

    /// Gives out text for the reader. White space at its end waits where a call may follow, before
    /// which it is left out.
    fn content(&mut self, text: &str, out: &mut Parts) {
        let text = if self.strip { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.strip = false;
        let waits = self.calls().is_some() || !self.said;
        let end = if waits { without_trailing_blank(text) } else { text.len() };
        if end > 0 {
            out.content(&self.blank);
            self.blank.clear();
            out.content(&text[..end]);
            self.said = true;
        }
        self.blank.push_str(&text[end..]);
    }

    fn reasoning(&mut self, text: &str, out: &mut Parts) {
        let text = if self.strip { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.strip = false;
        let end = without_trailing_blank(text);
        if end > 0 {
            out.reasoning(&self.blank);
            self.blank.clear();
            out.reasoning(&text[..end]);
        }
        self.blank.push_str(&text[end..]);
    }

    /// The form of calls; `None` if no calls are looked for.
    fn calls(&self) -> Option<&'static Calls> {
        self.reading.dialect.calls.filter(|_| !self.reading.tools.is_empty())
    }
}
