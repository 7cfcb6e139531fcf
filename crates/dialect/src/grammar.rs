//! The grammar that has a model write calls and nothing else: made of the same description as the parser.

use std::fmt::Write as _;

use serde_json::Value;

use crate::family::harmony::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START};
use crate::family::{Body, Calls, Ids, Tagged};
use crate::names::Dialect;
use crate::schema::Tools;

/// What is forced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Force<'a> {
    /// At least one call, of any tool.
    Any,
    /// A call of this tool.
    Named(&'a str),
}

/// How the pieces of a grammar are written that a dialect does not decide.
#[derive(Clone, Copy)]
pub struct Notation<'a> {
    /// Special tokens of the vocabulary that are marks, with their ids: they must be sampled as such.
    pub special: &'a [(String, i32)],
    /// What stands for a JSON value of a schema in a rule, such as `%json {...}`.
    pub json: &'a dyn Fn(&Value) -> String,
}

/// Any text that has no beginning of a tag that closes.
const UNTAGGED: &str = r"/(?s:[^<]|<[^\/])*/";
const ANY: &str = "/(?s:.*)/";

impl Dialect {
    /// A grammar in llguidance's Lark of answers that are calls: one, or several where `parallel`. Reasoning comes before it and is no part of it,
    /// but in Harmony, where it is. `None`: the family writes no calls, or there is no such tool.
    pub fn grammar(
        &self,
        tools: &Tools,
        force: Force<'_>,
        parallel: bool,
        notation: Notation<'_>,
    ) -> Option<String> {
        let calls = self.calls?;
        let mut writer = Writer { calls, notation, rules: String::new(), count: 0 };
        let wanted = tools.iter().filter(|(name, _)| match force {
            Force::Any => true,
            Force::Named(wanted) => wanted == *name,
        });
        let names: Vec<String> =
            wanted.map(|(name, schema)| writer.call(tools, name, schema)).collect();
        if names.is_empty() {
            return None;
        }
        let call = names.join(" | ");
        let start = writer.answer(parallel);
        Some(format!("start: {start}\ncall: {call}\n{}", writer.rules))
    }

    /// What stands around reasoning, where the family writes it in the text.
    pub fn reasoning_marks(&self) -> Option<(&'static str, &'static str)> {
        let reasoning = self.reasoning.filter(|reasoning| !reasoning.open.is_empty())?;
        Some((reasoning.open, reasoning.close))
    }
}

struct Writer<'a> {
    calls: &'static Calls,
    notation: Notation<'a>,
    /// Lines.
    rules: String,
    count: usize,
}

impl Writer<'_> {
    /// What an answer is.
    fn answer(&self, parallel: bool) -> String {
        let calls = self.calls;
        let (mut open, mut close) = (calls.section.0.to_owned(), calls.section.1.to_owned());
        match calls.body {
            Body::List(_) => {
                open.push('[');
                close.insert(0, ']');
            }
            Body::Python => {
                // The marks around it are left out by those models that do not have them.
                (open, close) = ("[".to_owned(), "]".to_owned());
            }
            Body::Channels => {
                let text = [CHANNEL, "analysis", MESSAGE].concat();
                let after = [END, START, "assistant"].concat();
                let thought = [self.literal(&text), ANY.to_owned(), self.literal(&after)];
                let first = format!("({})?", thought.join(" "));
                let more = if parallel {
                    format!(" ({} call)*", self.literal(&[START, "assistant"].concat()))
                } else {
                    String::new()
                };
                return format!("{first} call{more}");
            }
            Body::Object(_) | Body::Named(_) | Body::Tagged(_) | Body::Unquoted(_) => {}
        }
        let more = match (parallel, calls.between) {
            (false, _) => String::new(),
            (true, "") => " call*".to_owned(),
            (true, between) => format!(" ({} call)*", self.literal(between)),
        };
        let parts = [self.literal(&open), format!("call{more}"), self.literal(&close)];
        let parts = parts.into_iter().filter(|part| !part.is_empty());
        parts.collect::<Vec<_>>().join(" ")
    }

    /// Adds a rule; gives its name.
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        name
    }

    fn json(&mut self, schema: &Value) -> String {
        let body = (self.notation.json)(schema);
        self.rule("", &body)
    }

    /// The rule for a call of one tool.
    fn call(&mut self, tools: &Tools, name: &str, schema: &Value) -> String {
        let calls = self.calls;
        let marks = if calls.bare.is_some() { ("", "") } else { calls.call };
        let parts = match &calls.body {
            Body::Object(word) | Body::List(word) => {
                let name = Value::from(name);
                let before = format!("{}{{\"name\": {name}, \"{word}\": ", marks.0);
                let arguments = self.json(schema);
                vec![self.literal(&before), arguments, self.literal(&format!("}}{}", marks.1))]
            }
            Body::Named(named) => {
                let before = format!("{}{}", marks.0, named.before);
                let arguments = self.json(schema);
                let mut parts = match calls.ids {
                    Ids::Counted => vec![
                        self.literal(&format!("{before}functions.{name}:")),
                        "/[0-9]{1,3}/".to_owned(),
                        self.literal(named.separator),
                    ],
                    Ids::Free | Ids::Nine => {
                        vec![self.literal(&format!("{before}{name}{}", named.separator))]
                    }
                };
                parts.push(arguments);
                parts.push(self.literal(&format!("{}{}", named.after, marks.1)));
                parts
            }
            Body::Tagged(tags) => {
                let mut parts =
                    vec![self.literal(&format!("{}{}{name}{}", marks.0, tags.name.0, tags.name.1))];
                for (key, schema, required) in arguments(schema) {
                    let argument = self.tagged(tools, tags, (name, &key), &schema);
                    parts.push(if required { argument } else { format!("{argument}?") });
                }
                parts.push(self.literal(&format!("{}{}", tags.end, marks.1)));
                parts
            }
            Body::Python => {
                let (open, close) = (self.literal(&format!("{name}(")), self.literal(")"));
                let list = self.listed(schema, |writer, key, schema| {
                    let value = writer.json(schema);
                    let key = writer.literal(&format!("{key}="));
                    format!("{key} {value}")
                });
                vec![open, list, close]
            }
            Body::Unquoted(quote) => {
                let before = format!("{}call:{name}{{", marks.0);
                let list = self.listed(schema, |writer, key, schema| {
                    let value = writer.unquoted(quote, schema);
                    let key = writer.literal(&format!("{key}:"));
                    format!("{key} {value}")
                });
                vec![self.literal(&before), list, self.literal(&format!("}}{}", marks.1))]
            }
            Body::Channels => {
                let before =
                    format!("{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}");
                let arguments = self.json(schema);
                vec![self.literal(&before), arguments, self.literal(CALL)]
            }
        };
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        self.rule("", &parts.join(" "))
    }

    /// The rule for an argument in tags of its own.
    fn tagged(
        &mut self,
        tools: &Tools,
        tags: &Tagged,
        (tool, key): (&str, &str),
        schema: &Value,
    ) -> String {
        let is_string = tools.argument(tool, key).is_string();
        let declared = match (tags.declares, is_string) {
            (false, _) => "",
            (true, true) => "true\">",
            (true, false) => "false\">",
        };
        let open = format!("{}{key}{}{declared}{}", tags.key.0, tags.key.1, tags.value.0);
        let close = tags.value.1;
        let words = schema.get("enum").and_then(Value::as_array);
        let value = match words {
            _ if !is_string => {
                let value = self.json(schema);
                format!("{value} {}", self.literal(close))
            }
            Some(words) => {
                let words = words.iter().filter_map(Value::as_str);
                let words: Vec<String> = words.map(|word| self.literal(word)).collect();
                format!("({}) {}", words.join(" | "), self.literal(close))
            }
            None if self.has_special(close) => format!("{UNTAGGED} {}", self.literal(close)),
            None => self.rule(&format!("[suffix={}]", Value::from(close)), ANY),
        };
        let open = self.literal(&open);
        self.rule("", &format!("{open} {value}"))
    }

    /// Arguments with commas between them: those that are required, then the others, each of which may be left out.
    fn listed(
        &mut self,
        schema: &Value,
        mut write: impl FnMut(&mut Self, &str, &Value) -> String,
    ) -> String {
        let mut required = Vec::new();
        let mut optional = Vec::new();
        for (key, schema, is_required) in arguments(schema) {
            let written = write(self, &key, &schema);
            let rule = self.rule("", &written);
            if is_required { required.push(rule) } else { optional.push(rule) }
        }
        let comma = if matches!(self.calls.body, Body::Python) { "\", \"" } else { "\",\"" };
        let others = |optional: &[String]| {
            optional.iter().map(|rule| format!(" ({comma} {rule})?")).collect::<String>()
        };
        if !required.is_empty() {
            return format!("{}{}", required.join(&format!(" {comma} ")), others(&optional));
        }
        let firsts = (0..optional.len())
            .map(|first| format!("{}{}", optional[first], others(&optional[first + 1..])));
        let firsts: Vec<String> = firsts.collect();
        if firsts.is_empty() { String::new() } else { format!("({})?", firsts.join(" | ")) }
    }

    /// A value as Gemma writes it. Of lists and objects the form is forced, and not the schema.
    fn unquoted(&mut self, quote: &'static str, schema: &Value) -> String {
        let quoted = self.literal(quote);
        let text = if self.has_special(quote) {
            format!("{quoted} {ANY} {quoted}")
        } else {
            let text = self.rule(&format!("[suffix={}]", Value::from(quote)), ANY);
            format!("{quoted} {text}")
        };
        match schema.get("type").and_then(Value::as_str) {
            Some("string") => self.rule("", &text),
            Some("integer" | "number" | "boolean" | "null") => self.json(schema),
            _ => {
                let name = format!("r{}", self.count);
                let body = format!(
                    "{text} | /-?[0-9]+(\\.[0-9]+)?/ | \"true\" | \"false\" | \"null\" | \"[\" ({name} (\",\" {name})*)? \"]\" | \"{{\" (/[A-Za-z_][A-Za-z0-9_]*:/ {name} (\",\" /[A-Za-z_][A-Za-z0-9_]*:/ {name})*)? \"}}\""
                );
                self.rule("", &body)
            }
        }
    }

    fn has_special(&self, text: &str) -> bool {
        self.notation.special.iter().any(|(token, _)| text.contains(token.as_str()))
    }

    /// A text as it has to be sampled: special tokens by their ids, all else by its characters.
    fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let first = self
                .notation
                .special
                .iter()
                .filter_map(|(token, id)| Some((rest.find(token.as_str())?, token, id)))
                .min_by_key(|(at, token, _)| (*at, usize::MAX - token.len()));
            let Some((at, token, id)) = first.filter(|(_, token, _)| !token.is_empty()) else {
                parts.push(Value::from(rest).to_string());
                break;
            };
            if at > 0 {
                parts.push(Value::from(&rest[..at]).to_string());
            }
            parts.push(format!("<[{id}]>"));
            rest = &rest[at + token.len()..];
        }
        parts.join(" ")
    }
}

/// The arguments that a schema describes: name, schema with the definitions that it may refer to, and whether it is required.
fn arguments(schema: &Value) -> Vec<(String, Value, bool)> {
    let required = schema.get("required").and_then(Value::as_array);
    let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|n| n == name));
    let properties = schema.get("properties").and_then(Value::as_object);
    let properties = properties.into_iter().flatten();
    let own = properties.map(|(name, property)| {
        let mut property = property.clone();
        if let Value::Object(fields) = &mut property {
            for definitions in ["$defs", "definitions"] {
                if let Some(all) = schema.get(definitions) {
                    fields.entry(definitions).or_insert_with(|| all.clone());
                }
            }
        }
        (name.clone(), property, is_required(name))
    });
    own.collect()
}
