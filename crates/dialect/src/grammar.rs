//! Generates the grammar of a family's calls from the same description as the parser.

use std::fmt::Write as _;

use serde_json::Value;

use crate::family::harmony::{ALL, CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START};
use crate::family::{Body, Calls, Ids};
use crate::names::Dialect;
use crate::parser::Place;

/// A regular expression for any text. It never matches special tokens.
const ANY: &str = "/(?s:.*)/";
/// The name of the rule for output instead of calls, which the caller defines.
pub const CONTENT: &str = "content";

/// The output that a model may write instead of calls, or in addition to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instead {
    /// Nothing: there must be at least one call.
    Nothing,
    /// Any text, also before calls. The answer ends after the calls.
    Text,
    /// Output that matches the rule [`CONTENT`], which the caller adds to the grammar.
    Content,
}

/// The grammar of an answer in llguidance's dialect of Lark. The caller adds the rules for the
/// tools' arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallGrammar {
    /// The rules of the grammar, starting with the rule `start`.
    pub lark: String,
    /// The name of the argument rule of each tool, in the order of the tools.
    pub arguments: Vec<String>,
    /// The style in which the argument rules must write arguments.
    pub style: ArgumentStyle,
}

/// How a family writes the arguments of calls.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ArgumentStyle {
    /// A JSON object.
    Json,
    /// Python's keyword arguments: `a=1, b="x"`.
    Python,
    /// The style `a:1,b:<quote>x<quote>`, with this text as `<quote>`.
    Quoted(&'static str),
    /// Each argument is an element between tags.
    Tagged(ArgumentTags),
}

/// The tags of an argument. Strings are written between them without escapes, other values as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ArgumentTags {
    /// The text before the name of an argument.
    pub before_name: &'static str,
    /// The text between the name and a string.
    pub before_text: String,
    /// The text between the name and a value that is not a string.
    pub before_json: String,
    /// The text after the value.
    pub after: &'static str,
    /// The marks that end a value wherever they occur.
    pub stops: Vec<&'static str>,
    /// True if the tags state whether the value is a string.
    pub declares: bool,
}

/// The marks that are special tokens of a vocabulary. They are sampled by id; the same characters
/// as ordinary text have no meaning.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Marks(Vec<(String, i32)>);

impl Marks {
    /// Creates the marks with these texts and ids.
    pub fn new(tokens: impl IntoIterator<Item = (String, i32)>) -> Self {
        Self(tokens.into_iter().filter(|(text, _)| !text.is_empty()).collect())
    }

    /// Returns a literal for the right side of a rule. Special tokens are written by id, other text
    /// by its characters. The result is empty for an empty text.
    pub fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, id, after)) = self.split(rest) {
            if !before.is_empty() {
                parts.push(quoted(before));
            }
            parts.push(format!("<[{id}]>"));
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(quoted(rest));
        }
        parts.join(" ")
    }

    /// Creates a rule for text that matches the terminal `text`, followed by `close`. The text
    /// itself must not contain `close`. Returns the definition of the terminal `name`, and the
    /// right side of the rule, which uses that terminal.
    pub fn until(&self, name: &str, text: &str, close: &str) -> (String, String) {
        // One terminal covers the text and the start of `close`. With two terminals, the longest
        // match of the first would end inside `close`.
        let (last, rest) = match self.split(close) {
            Some((before, _, _)) => (before, &close[before.len()..]),
            None => (close, ""),
        };
        let last = if last.is_empty() { String::new() } else { format!(" {}", quoted(last)) };
        (format!("{name}: ({text}){last}\n"), format!("{name} {}", self.literal(rest)))
    }

    /// Splits a text at its first special token: returns the text before it, its id, and the text
    /// after it. Of several tokens at one position, the longest counts.
    fn split<'t>(&self, text: &'t str) -> Option<(&'t str, i32, &'t str)> {
        let found = self.0.iter().filter_map(|(token, id)| Some((text.find(token)?, token, *id)));
        let first = found.min_by_key(|(at, token, _)| (*at, usize::MAX - token.len()));
        first.map(|(at, token, id)| (&text[..at], id, &text[at + token.len()..]))
    }
}

/// Returns the right side of a terminal for text that contains none of `stops`.
pub fn text_without<'s>(stops: impl IntoIterator<Item = &'s str>) -> String {
    let stops: Vec<String> =
        stops.into_iter().filter(|stop| !stop.is_empty()).map(escaped).collect();
    if stops.is_empty() {
        return ANY.to_owned();
    }
    // Without `ANY`, the text could contain special tokens and invalid UTF-8.
    format!("{ANY} & ~/(?s:.*)({})(?s:.*)/", stops.join("|"))
}

/// Returns a string literal of Lark, which has the syntax of a JSON string.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns the regular expression that matches exactly `text`.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        if c.is_alphanumeric() || matches!(c, ' ' | '_') {
            out.push(c);
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, r"\x{{{:x}}}", u32::from(c));
        }
        out
    })
}

impl Dialect {
    /// Returns the grammar of answers that call some of `tools`, once or, with `parallel`, several
    /// times. `None` if the family has no calls, or if there are no tools.
    ///
    /// Reasoning precedes the calls. It is part of the grammar if `thinks` is given, and always in
    /// Harmony. `thinks` states in which part of the answer generation starts. `None`: the
    /// constraint recognises reasoning by the tokens of its marks.
    pub fn call_grammar(
        &self,
        tools: &[&str],
        instead: Instead,
        parallel: bool,
        marks: &Marks,
        thinks: Option<Place>,
    ) -> Option<CallGrammar> {
        let calls = self.calls.filter(|_| !tools.is_empty())?;
        let mut writer = Writer { calls, marks, rules: String::new() };
        let names: Vec<String> = (0..tools.len()).map(|tool| format!("tool{tool}")).collect();
        let arguments: Vec<String> =
            (0..tools.len()).map(|tool| format!("arguments{tool}")).collect();
        for ((tool, name), arguments) in tools.iter().zip(&names).zip(&arguments) {
            writer.tool(name, tool, arguments);
        }
        writer.line("body", &names.join(" | "));
        let start = match calls.body {
            Body::Channels => writer.messages(instead, parallel),
            _ => {
                let thought = writer.thought(self.reasoning_marks(), thinks);
                let answer = writer.answer(instead, parallel, self.reasoning_marks());
                format!("{thought} ({answer})")
            }
        };
        let lark = format!("start: {start}\n{}", writer.rules);
        Some(CallGrammar { lark, arguments, style: calls.style() })
    }

    /// True if a mark before calls distinguishes them from an answer in JSON.
    pub fn marks_calls(&self) -> bool {
        self.calls.is_some_and(|calls| calls.bare.is_none())
    }

    /// Returns the marks around reasoning, such as `<think>` and `</think>`. `None` if the family
    /// has no such marks.
    pub fn reasoning_marks(&self) -> Option<(&'static str, &'static str)> {
        let reasoning = self.reasoning.filter(|reasoning| !reasoning.open.is_empty())?;
        Some((reasoning.open, reasoning.close))
    }
}

impl Calls {
    fn style(&self) -> ArgumentStyle {
        match &self.body {
            Body::Object(_) | Body::List(_) | Body::Named(_) | Body::Channels => {
                ArgumentStyle::Json
            }
            Body::Python => ArgumentStyle::Python,
            Body::Unquoted(quote) => ArgumentStyle::Quoted(quote),
            Body::Tagged(tags) => {
                let before = |declared: &str| format!("{}{declared}{}", tags.key.1, tags.value.0);
                let (text, json) = match tags.declares {
                    true => (before("true\">"), before("false\">")),
                    false => (before(""), before("")),
                };
                ArgumentStyle::Tagged(ArgumentTags {
                    before_name: tags.key.0,
                    before_text: text,
                    before_json: json,
                    after: tags.value.1,
                    stops: vec![tags.value.1.trim(), self.call.1.trim(), self.section.1.trim()],
                    declares: tags.declares,
                })
            }
        }
    }

    /// Returns the frame of calls, including the marks of the section.
    fn frame(&self) -> Frame {
        let Frame { open, close, .. } = self.bare_frame();
        let (section, call) = (self.section, self.call);
        Frame {
            open: format!("{}{open}", section.0),
            before: call.0,
            after: call.1,
            close: format!("{close}{}", section.1),
        }
    }

    /// Returns the frame of calls without marks.
    fn bare_frame(&self) -> Frame {
        let (open, close) = match self.body {
            Body::List(_) | Body::Python => ("[", "]"),
            _ => ("", ""),
        };
        Frame { open: open.to_owned(), before: "", after: "", close: close.to_owned() }
    }
}

/// The texts around all calls, and those around each call.
struct Frame {
    open: String,
    before: &'static str,
    after: &'static str,
    close: String,
}

struct Writer<'a> {
    calls: &'static Calls,
    marks: &'a Marks,
    /// The rules, one per line.
    rules: String,
}

impl Writer<'_> {
    fn line(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Writes the rule `name` for a call of `tool`, without the marks around it.
    fn tool(&mut self, name: &str, tool: &str, arguments: &str) {
        let (before, after) = match &self.calls.body {
            Body::Object(word) | Body::List(word) => {
                let tool = quoted(tool);
                (self.marks.literal(&format!("{{\"name\": {tool}, \"{word}\": ")), "}".to_owned())
            }
            Body::Named(named) => {
                let before = match self.calls.ids {
                    Ids::Counted => format!(
                        "{} /[0-9]{{1,3}}/ {}",
                        self.marks.literal(&format!("{}functions.{tool}:", named.before)),
                        self.marks.literal(named.separator)
                    ),
                    Ids::Free | Ids::Nine => {
                        self.marks.literal(&format!("{}{tool}{}", named.before, named.separator))
                    }
                };
                (before, named.after.to_owned())
            }
            Body::Tagged(tags) => {
                let before = format!("{}{tool}{}", tags.name.0, tags.name.1);
                (self.marks.literal(&before), tags.end.to_owned())
            }
            Body::Python => (self.marks.literal(&format!("{tool}(")), ")".to_owned()),
            Body::Unquoted(_) => (self.marks.literal(&format!("call:{tool}{{")), "}".to_owned()),
            Body::Channels => {
                let before =
                    format!("{CHANNEL}commentary to=functions.{tool} {CONSTRAIN}json{MESSAGE}");
                (self.marks.literal(&before), CALL.to_owned())
            }
        };
        let after = self.marks.literal(&after);
        self.line(name, &format!("{before} {arguments} {after}"));
    }

    /// Writes the rule for reasoning before an answer.
    fn thought(&mut self, around: Option<(&str, &str)>, thinks: Option<Place>) -> String {
        let (Some((open, close)), Some(place)) = (around, thinks) else { return String::new() };
        let (open, close) = (open.trim_end(), close.trim_end());
        let (definition, until) = self.marks.until("THOUGHT", &text_without([close]), close);
        match place {
            Place::Answer => return String::new(),
            Place::Reasoning | Place::Either => self.rules.push_str(&definition),
        }
        match place {
            Place::Reasoning => until,
            _ => format!("({} {until})?", self.marks.literal(open)),
        }
    }

    /// Writes the rule of an answer, for families with marks around calls.
    fn answer(
        &mut self,
        instead: Instead,
        parallel: bool,
        reasoning: Option<(&str, &str)>,
    ) -> String {
        let marked = self.calls.frame();
        let bare = self.calls.bare.map(|_| self.calls.bare_frame());
        let mut calls = self.run(&marked, "", parallel);
        if let Some(bare) = &bare {
            calls = format!("{} | {calls}", self.run(bare, "", parallel));
        }
        self.line("calls", &calls);
        // Models leave an empty line after reasoning.
        let blank = if reasoning.is_some() { "/\\n{1,2}/? " } else { "" };
        match instead {
            Instead::Nothing => format!("{blank}calls"),
            Instead::Content => format!("{CONTENT} | {blank}calls"),
            Instead::Text => {
                let mut text = text_without(self.openers(reasoning));
                if let Some(bare) = self.calls.bare {
                    // Text that starts with this character is parsed as a call.
                    let _ = write!(text, " & ~/\\s*{}(?s:.*)/", escaped(&bare.to_string()));
                }
                self.line("TEXT", &text);
                let opener = self.opener();
                let (definition, until) = self.marks.until("UNTIL", &text, opener);
                self.rules.push_str(&definition);
                let rest = self.run(&marked, opener, parallel);
                let bare = bare.map_or_else(String::new, |bare| {
                    format!(" | {}", self.run(&bare, "", parallel))
                });
                format!("TEXT | {until} {rest}{bare}")
            }
        }
    }

    /// Returns the right side for all calls within `frame`. `said` is leading text of the frame
    /// that has already been written; the result does not repeat it.
    fn run(&self, frame: &Frame, said: &str, parallel: bool) -> String {
        let Frame { open, before, after, close } = frame;
        let first = format!("{open}{before}");
        let first = self.marks.literal(first.strip_prefix(said).unwrap_or(&first));
        let after = self.marks.literal(after);
        // The optional mark precedes only the first call.
        let again = if self.calls.bare.is_some() { "" } else { *before };
        let next = self.marks.literal(&format!("{}{again}", self.calls.between));
        let more = if parallel { format!("({next} body {after})*") } else { String::new() };
        format!("{first} body {after} {more} {}", self.marks.literal(close))
    }

    /// Returns the mark that starts the first call.
    fn opener(&self) -> &'static str {
        let marks = [self.calls.section.0.trim(), self.calls.call.0.trim()];
        marks.into_iter().find(|mark| !mark.is_empty()).unwrap_or_default()
    }

    /// Returns the marks that ordinary text must not contain, because they would start a call or
    /// reasoning.
    fn openers<'r>(&self, reasoning: Option<(&'r str, &'r str)>) -> Vec<&'r str> {
        let calls = self.calls;
        let mut marks = vec![calls.section.0.trim(), calls.call.0.trim()];
        if let Body::Tagged(tags) = &calls.body {
            marks.push(tags.name.0.trim());
        }
        marks.extend(reasoning.map(|(open, _)| open.trim()));
        marks.retain(|mark| !mark.is_empty());
        marks
    }

    /// Writes the rule of an answer in Harmony, which consists of messages.
    fn messages(&mut self, instead: Instead, parallel: bool) -> String {
        let text = text_without(ALL);
        let (definition, said) =
            self.marks.until("SAID", &text, &[END, START, "assistant"].concat());
        self.rules.push_str(&definition);
        let opens = |channel: &str| self.marks.literal(&[CHANNEL, channel, MESSAGE].concat());
        let thought = format!("{} {said}", opens("analysis"));
        let preamble = format!("{} {said}", opens("commentary"));
        let last = opens("final");
        let more = match parallel {
            true => format!("({} body)*", self.marks.literal(&[START, "assistant"].concat())),
            false => String::new(),
        };
        self.line("calls", &format!("body {more}"));
        match instead {
            Instead::Nothing => format!("({thought})? calls"),
            Instead::Content => format!("({thought})? ({last} {CONTENT} | calls)"),
            Instead::Text => {
                self.line("TEXT", &text);
                format!("({thought} | {preamble})* ({last} TEXT | calls)")
            }
        }
    }
}
