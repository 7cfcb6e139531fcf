//! Parses tool calls and reasoning: splits the text of a model into parts.
//!
//! One automaton parses reasoning, text and calls. It works on characters, and holds back those
//! that may become a mark, so it makes no difference how the text is split into tokens and deltas.
//! Special tokens that are marks must be included in the text.
//!
//! A mark alone is ordinary text. It takes effect only if a call of an offered tool follows, or if
//! reasoning can start or end there. A mark that is a special token is never text.

mod alone;
mod call;
mod calls;
mod harmony;
mod items;
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
use alone::{Alone, Opening, opening};
use call::Call;
use harmony::Harmony;
use items::Items;
use named::Named;
use object::Object;
use tagged::Tagged;
use whole::Whole;

/// Marks of fewer bytes, such as `>`, also occur in ordinary text.
const SHORT: usize = 4;

/// The settings of the parser for one answer.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// The dialect of the model.
    pub dialect: Dialect,
    /// The tools that may be called. Without tools, calls are ordinary text.
    pub tools: Arc<Tools>,
    /// True if at most one call is allowed.
    pub single: bool,
    /// True if reasoning is removed from the output.
    pub silent: bool,
    /// True if a grammar determines where calls are. Then reasoning contains no calls.
    pub bound: bool,
    /// True if the client named the tool to call.
    pub named: bool,
    /// The state in which the answer starts.
    pub start: Start,
}

/// The part of an answer in which generation starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the reasoning.
    Reasoning,
    /// After the reasoning.
    Answer,
    /// Before the first part, which may be reasoning or the answer.
    Either,
}

impl Reading {
    /// True if reasoning is separated from other text.
    pub fn reasons(&self) -> bool {
        self.dialect.reasoning.is_some()
    }
}

/// The initial state of a parser: in the text, or in reasoning that the prompt opened.
#[derive(Debug, Clone, Default)]
pub struct Start(Begin);

#[derive(Debug, Clone, Default)]
enum Begin {
    #[default]
    Text,
    /// White space at the start of the text is dropped.
    BareText,
    Reasoning,
    BareReasoning,
    Harmony(Harmony),
}

impl Start {
    /// Returns the state after the rendered `prompt`. `continues` is true if the prompt ends within
    /// a message that the model continues.
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
    /// Returns the part of the answer that this state is in.
    pub fn place(&self) -> Place {
        match self.0 {
            Begin::Reasoning | Begin::BareReasoning => Place::Reasoning,
            Begin::BareText => Place::Answer,
            Begin::Text | Begin::Harmony(_) => Place::Either,
        }
    }
}

/// Parses one answer.
#[derive(Debug)]
pub struct Parser {
    reading: Reading,
    marks: Vec<(&'static str, Mark)>,
    state: State,
    /// The text that was received but not parsed yet.
    pending: String,
    /// The number of bytes at the front of `pending` that are known to be white space. They wait
    /// for the next character, and are not scanned again.
    blanks: usize,
    /// White space that is held back until the next character is known.
    blank: String,
    /// True if content other than white space was output.
    said: bool,
    /// True if reasoning other than white space was output.
    reasoned: bool,
    /// True if white space that comes next is dropped.
    strip: bool,
    /// True if a call has ended the reasoning, whose closing mark may still come.
    unclosed: bool,
    /// True if the answer is more than a single object.
    mixed: bool,
    begun: u32,
    complete: u32,
}

/// The meaning of a mark in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Section,
    Call,
    /// The mark before a tool's name, which starts a call even without the call's opening mark.
    Name,
    /// An end mark without an opening mark.
    Stray,
    /// A special token that belongs inside a call.
    Inner,
    Think,
    Thought,
}

#[derive(Debug)]
enum State {
    Text,
    Reasoning,
    /// Before, between or after calls.
    Items(Items),
    Call {
        body: Body,
        call: Call,
        items: Items,
    },
    /// The whole answer may be a call without marks.
    Alone(Box<Alone>),
    Harmony(Harmony),
    /// The only required call is complete. Further text is ignored.
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
    /// Creates a parser at the start of an answer.
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
        if let Some(calls) = calls.filter(|calls| calls.special) {
            let inner = calls.marks();
            let whole = |mark: &&str| !inner.iter().any(|one| one != mark && mark.contains(one));
            inner.iter().filter(|mark| mark.len() >= SHORT && whole(mark)).for_each(|mark| {
                add(mark, Mark::Inner);
            });
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
        // In continued reasoning, some text was already output.
        let reasoned = matches!(reading.start.0, Begin::Reasoning);
        Self {
            reading,
            marks,
            state,
            pending: String::new(),
            blanks: 0,
            blank: String::new(),
            said: false,
            reasoned,
            strip,
            unclosed: false,
            mixed: false,
            begun: 0,
            complete: 0,
        }
    }

    /// True if the only required call is complete. Later text is ignored.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// True if the parser is within reasoning.
    pub fn is_reasoning(&self) -> bool {
        match &self.state {
            State::Reasoning => true,
            State::Harmony(harmony) => harmony.is_reasoning(),
            // It is not known yet whether this is a call.
            State::Items(items) => items.reasoning,
            State::Call { items, call, .. } => items.reasoning && !call.has_begun(),
            State::Text | State::Alone(_) | State::Over => false,
        }
    }

    /// True if the answer has a complete call that the client did not force.
    pub fn has_chosen(&self) -> bool {
        self.complete > 0 && !self.reading.named
    }

    /// The number of complete calls.
    pub fn complete_calls(&self) -> u32 {
        self.complete
    }

    /// Parses more text.
    pub fn push(&mut self, text: &str, out: &mut Parts) {
        self.pending.push_str(text);
        while self.step(out) {}
        self.hide(out);
    }

    /// Removes reasoning if the client does not want it.
    fn hide(&self, out: &mut Parts) {
        if self.reading.silent {
            out.without_reasoning();
        }
    }

    /// Parses the text that was held back, at the end of an answer. `complete` is true if the model
    /// ended the answer, and false if a length limit did.
    pub fn finish(&mut self, complete: bool, out: &mut Parts) {
        let mut rest = std::mem::take(&mut self.pending);
        let end = rest.trim_start();
        if !complete
            && end.len() >= SHORT
            && self.marks.iter().any(|(mark, _)| mark.starts_with(end))
        {
            // The answer was cut off within a mark.
            rest.truncate(rest.len() - end.len());
        }
        match std::mem::replace(&mut self.state, State::Over) {
            State::Text => self.content(&rest, out),
            State::Reasoning => {
                self.reasoning(&rest, out);
                out.reasoning(&std::mem::take(&mut self.blank));
            }
            State::Items(items) => self.end_items(&items, &rest, complete, out),
            State::Over => {}
            State::Call { call, items, .. } if !call.has_begun() => {
                self.end_items(&items, &(call.raw + &rest), complete, out);
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
            State::Alone(alone) => {
                if complete && alone.call(out) {
                    self.begun += 1;
                    self.complete += 1;
                } else {
                    self.content(&alone.into_text(), out);
                }
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

    /// Parses one step. Returns false if more text is needed.
    fn step(&mut self, out: &mut Parts) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.step_text(out),
            State::Reasoning => {
                self.state = State::Reasoning;
                self.step_reasoning(out)
            }
            State::Items(items) => self.step_items(items, out),
            State::Call { body, call, items } => self.step_call(body, call, items, out),
            State::Alone(alone) => self.step_alone(alone),
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
            && let Some(calls) = self.calls().filter(|calls| calls.bare.is_some() || calls.alone)
        {
            let blank = self.blank_before();
            let text = &self.pending[blank..];
            if text.is_empty() {
                self.blanks = blank;
                return false;
            }
            if calls.bare.is_some_and(|bare| text.starts_with(bare)) {
                let raw = self.pending.drain(..blank).collect();
                self.state = State::Items(Items::new(raw, false, false));
                return true;
            }
            if calls.alone && !self.mixed && !self.reading.bound && self.begun == 0 {
                match opening(text) {
                    Opening::Unknown => {
                        self.blanks = blank;
                        return false;
                    }
                    Opening::Object { at, fenced } => {
                        let before = self.pending.drain(..blank + at).collect();
                        let alone = Alone::new(before, fenced, self.begun);
                        self.state = State::Alone(Box::new(alone));
                        return true;
                    }
                    Opening::Other => {}
                }
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
                self.meet(mark, meaning, out);
                true
            }
        }
    }

    fn step_reasoning(&mut self, out: &mut Parts) -> bool {
        // The mark of a call ends reasoning, unless the grammar guarantees the closing mark of the
        // reasoning.
        let ends = |meaning: Mark| match self.reading.bound {
            true => meaning == Mark::Thought,
            false => !matches!(meaning, Mark::Stray | Mark::Inner),
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
                match meaning {
                    // The prompt may have opened the reasoning already.
                    Mark::Think if self.reasoned && !self.has_special_thought() => {
                        self.reasoning(mark, out);
                    }
                    Mark::Think => self.strip = true,
                    Mark::Thought => {
                        self.blank.clear();
                        self.strip = true;
                        self.state = State::Text;
                    }
                    Mark::Section | Mark::Call | Mark::Name | Mark::Stray | Mark::Inner => {
                        self.state = self.opened(meaning, mark.to_owned(), true);
                    }
                }
                true
            }
        }
    }

    /// Handles a mark in text.
    fn meet(&mut self, mark: &str, meaning: Mark, out: &mut Parts) {
        match meaning {
            Mark::Think if !self.said || self.has_special_thought() => {
                self.blank.clear();
                self.strip = true;
                self.state = State::Reasoning;
            }
            Mark::Thought if self.unclosed || !self.said => {
                self.unclosed = false;
                self.blank.clear();
                self.strip = true;
            }
            Mark::Thought if self.has_special_thought() => {}
            Mark::Stray | Mark::Inner if self.has_special_marks() => {}
            Mark::Think | Mark::Thought | Mark::Stray | Mark::Inner => self.content(mark, out),
            Mark::Section | Mark::Call | Mark::Name => {
                self.state = self.opened(meaning, mark.to_owned(), false);
            }
        }
    }

    /// Returns the number of bytes of white space before the next text. If the caller leaves them
    /// in `pending`, it must store the number in `blanks` again.
    fn blank_before(&mut self) -> usize {
        let known = std::mem::take(&mut self.blanks);
        known + leading_blank(&self.pending[known..])
    }

    /// Outputs text as content. White space at its end is held back if a call may follow, until the
    /// next text is known.
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
            self.reasoned = true;
        }
        self.blank.push_str(&text[end..]);
    }

    /// Returns the format of calls; `None` if calls are not parsed.
    fn calls(&self) -> Option<&'static Calls> {
        self.reading.dialect.calls.filter(|_| !self.reading.tools.is_empty())
    }
}
