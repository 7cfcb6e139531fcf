//! Converts structural tags to Lark. xgrammar defines them, and vLLM and SGLang accept them.
//!
//! There are two notations: `{"type": "structural_tag", "format": {...}}` with a tree of formats,
//! and the older one with `structures` and `triggers`, which corresponds to the format
//! `triggered_tags`.

use serde_json::Value;

use crate::error::GrammarError;
use crate::lark::{escaped, literal};
use crate::schema;
use crate::size;
use crate::source::Whitespace;
use crate::work::Work;

/// The deepest nesting of formats.
const DEPTH: usize = 32;
/// Matches any text.
const ANY: &str = "/(?s:.*)/";

/// Converts the structural tag to Lark. Its schemas are embedded as text, with llguidance's
/// options.
pub(crate) fn to_lark(
    text: &str,
    whitespace: &Whitespace,
    lenient: bool,
    work: &mut Work,
) -> Result<String, GrammarError> {
    size::check(text, "a structural tag")?;
    let tag: Value = serde_json::from_str(text).map_err(|error| {
        GrammarError::invalid(format!("the structural tag is not JSON: {error}"))
    })?;
    let mut writer = Writer { rules: Vec::new(), whitespace, lenient, work };
    let start = match (tag.get("format"), tag.get("structures")) {
        (Some(format), None) => writer.format(format, ".format", true, 0)?,
        (None, Some(_)) => {
            let structures = list(&tag, "", "structures")?;
            let tags =
                structures.iter().enumerate().map(|(at, tag)| (format!(".structures[{at}]"), tag));
            let tags = tags.collect::<Vec<_>>();
            let triggers = strings(&tag, "", "triggers")?;
            writer.triggered(&tags, &triggers, (false, false), 0)?
        }
        _ => return Err(GrammarError::invalid("one of `format` and `structures` is needed")),
    };
    let mut lark = format!("start: {start}\n");
    for rule in writer.rules {
        lark.push_str(&rule);
        lark.push('\n');
    }
    Ok(lark)
}

struct Writer<'a> {
    /// The lines of the grammar, except the first one.
    rules: Vec<String>,
    whitespace: &'a Whitespace,
    lenient: bool,
    work: &'a mut Work,
}

impl Writer<'_> {
    /// Adds a rule and returns its name. `head` is inserted between the name and the colon.
    fn rule(&mut self, head: &str, body: &str) -> Result<String, GrammarError> {
        self.work.write(head.len() + body.len())?;
        let name = format!("t{}", self.rules.len());
        self.rules.push(format!("{name}{head}: {body}"));
        Ok(name)
    }

    /// Writes the right side of a rule for a format. `last` is true if nothing follows the format,
    /// so its text needs no end marker.
    fn format(
        &mut self,
        format: &Value,
        path: &str,
        last: bool,
        depth: usize,
    ) -> Result<String, GrammarError> {
        if depth > DEPTH {
            return Err(GrammarError::at(path, "formats are nested too deep"));
        }
        match text(format, path, "type")? {
            "const_string" => Ok(literal(text(format, path, "value")?)),
            "json_schema" => {
                self.schema(field(format, path, "json_schema")?, &format!("{path}.json_schema"))
            }
            "regex" => regex(text(format, path, "pattern")?),
            "grammar" => {
                let grammar = text(format, path, "grammar")?;
                let lark = match grammar.contains("::=") {
                    true => crate::ebnf::to_lark(grammar)?,
                    false => grammar.to_owned(),
                };
                self.rule("", &format!("%lark {{\n{lark}\n}}"))
            }
            "any_text" if last => Ok(ANY.to_owned()),
            "any_text" => {
                let why = "any text must come last, or be the content of a tag with an end";
                Err(GrammarError::at(path, why))
            }
            "sequence" => {
                let parts = self.elements(format, path, depth, |at_end| last && at_end)?;
                Ok(format!("({})", parts.join(" ")))
            }
            "or" => {
                let parts = self.elements(format, path, depth, |_| last)?;
                Ok(format!("({})", parts.join(" | ")))
            }
            "tag" => self.tag(format, path, None, last, depth + 1),
            "triggered_tags" => {
                if !last {
                    let why = "tags in free text must come last, because nothing marks where the text ends";
                    return Err(GrammarError::at(path, why));
                }
                let tags = numbered(format, path, "tags")?;
                let triggers = strings(format, path, "triggers")?;
                let flags = flags(format, path)?;
                self.triggered(&tags, &triggers, flags, depth + 1)
            }
            "tags_with_separator" => {
                let mut parts = Vec::new();
                for (path, tag) in numbered(format, path, "tags")? {
                    parts.push(self.tag(tag, &path, None, false, depth + 1)?);
                }
                let one = self.rule("", &parts.join(" | "))?;
                let separator = literal(text(format, path, "separator")?);
                let (at_least_one, stop_after_first) = flags(format, path)?;
                let some = match stop_after_first {
                    true => one,
                    false => format!("({one} ({separator} {one})*)"),
                };
                Ok(if at_least_one { some } else { format!("({some})?") })
            }
            other => {
                let path = format!("{path}.type");
                Err(GrammarError::at(path, format!("the format {other} is not supported")))
            }
        }
    }

    /// Writes the formats of `elements` in sequence. `last` returns true if nothing follows an
    /// element, given whether the element is the final one.
    fn elements(
        &mut self,
        format: &Value,
        path: &str,
        depth: usize,
        last: impl Fn(bool) -> bool,
    ) -> Result<Vec<String>, GrammarError> {
        let elements = list(format, path, "elements")?;
        let formats = elements.iter().enumerate().map(|(at, element)| {
            let last = last(at + 1 == elements.len());
            self.format(element, &format!("{path}.elements[{at}]"), last, depth + 1)
        });
        formats.collect()
    }

    /// Writes the rule for `begin`, content and `end`. The first `said` bytes of `begin` are
    /// omitted, because the trigger has already matched them.
    fn tag(
        &mut self,
        tag: &Value,
        path: &str,
        said: Option<&str>,
        last: bool,
        depth: usize,
    ) -> Result<String, GrammarError> {
        // Each trigger has separate copies of the tags that begin with the trigger.
        self.work.copy(tag)?;
        let begin = text(tag, path, "begin")?;
        let begin = literal(&begin[said.unwrap_or_default().len()..]);
        let end = text(tag, path, "end")?;
        let content = match (tag.get("content"), tag.get("schema")) {
            (Some(content), _) => Some((content, format!("{path}.content"))),
            // A `schema` without `content` is the older notation.
            (None, Some(schema)) => {
                let schema = self.schema(schema, &format!("{path}.schema"))?;
                return Ok(format!("({begin} {schema} {})", literal(end)));
            }
            (None, None) => None,
        };
        let Some((content, at)) = content else {
            return Err(GrammarError::at(format!("{path}.content"), "required and missing"));
        };
        if text(content, &at, "type")? == "any_text" && !end.is_empty() {
            // The text continues up to the first `end`, however `end` is tokenised.
            let until = self.rule(&format!("[suffix={}]", literal(end)), ANY)?;
            return Ok(format!("({begin} {until})"));
        }
        let content = self.format(content, &at, last && end.is_empty(), depth + 1)?;
        Ok(format!("({begin} {content} {})", literal(end)))
    }

    /// Writes free text in which each of `triggers` starts one of `tags`.
    fn triggered(
        &mut self,
        tags: &[(String, &Value)],
        triggers: &[&str],
        (at_least_one, stop_after_first): (bool, bool),
        depth: usize,
    ) -> Result<String, GrammarError> {
        let mut parts = Vec::new();
        let mut placed = vec![false; tags.len()];
        for trigger in triggers {
            let mut options = Vec::new();
            for (at, (path, tag)) in tags.iter().enumerate() {
                if text(tag, path, "begin")?.starts_with(trigger) {
                    placed[at] = true;
                    options.push(self.tag(tag, path, Some(trigger), false, depth)?);
                }
            }
            if options.is_empty() {
                let why = format!("no tag begins with the trigger {trigger:?}");
                return Err(GrammarError::invalid(why));
            }
            let until = self.rule(&format!("[suffix={}]", literal(trigger)), ANY)?;
            parts.push(format!("{until} ({})", options.join(" | ")));
        }
        if let Some(at) = placed.iter().position(|placed| !placed) {
            return Err(GrammarError::at(tags[at].0.clone(), "no trigger is its beginning"));
        }
        let one = self.rule("", &parts.join(" | "))?;
        let any: Vec<String> = triggers.iter().map(|trigger| escaped(trigger)).collect();
        // The remaining text contains no trigger, since a trigger would start a tag.
        let name = format!("T{}", self.rules.len());
        self.rules.push(format!("{name}: ~/(?s:.*)({})(?s:.*)/", any.join("|")));
        Ok(match (at_least_one, stop_after_first) {
            (false, false) => format!("({one}* {name})"),
            (true, false) => format!("({one}+ {name})"),
            (false, true) => format!("({one} | {name})"),
            (true, true) => one,
        })
    }

    fn schema(&mut self, schema: &Value, path: &str) -> Result<String, GrammarError> {
        let schema =
            schema::prepare(schema.clone(), self.work).map_err(|error| below(path, error))?;
        let with = schema::with_options(schema, self.whitespace, self.lenient);
        self.rule("", &format!("%json {with}"))
    }
}

/// Returns `pattern` as a regular expression for the right side of a rule.
pub(crate) fn regex(pattern: &str) -> Result<String, GrammarError> {
    Ok(format!("/{}/", llguidance::regex_to_lark(unanchored(pattern), "")))
}

/// Removes anchors at the ends of a pattern, which are redundant because the whole text must match.
fn unanchored(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let escaped = pattern.strip_suffix('$').is_some_and(|before| {
        before.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1
    });
    if escaped { pattern } else { pattern.strip_suffix('$').unwrap_or(pattern) }
}

/// Prepends `path` to the path of an error.
pub(crate) fn below(path: &str, error: GrammarError) -> GrammarError {
    match error {
        GrammarError::Invalid { path: inner, reason } => {
            GrammarError::Invalid { path: format!("{path}{inner}"), reason }
        }
        other => other,
    }
}

fn field<'a>(value: &'a Value, path: &str, name: &str) -> Result<&'a Value, GrammarError> {
    let missing = || GrammarError::at(format!("{path}.{name}"), "required and missing");
    value.get(name).ok_or_else(missing)
}

fn text<'a>(value: &'a Value, path: &str, name: &str) -> Result<&'a str, GrammarError> {
    let wrong = || GrammarError::at(format!("{path}.{name}"), "expected a string");
    field(value, path, name)?.as_str().ok_or_else(wrong)
}

fn list<'a>(value: &'a Value, path: &str, name: &str) -> Result<&'a [Value], GrammarError> {
    let wrong = || GrammarError::at(format!("{path}.{name}"), "expected a list that is not empty");
    let list = field(value, path, name)?.as_array().filter(|list| !list.is_empty());
    list.map(Vec::as_slice).ok_or_else(wrong)
}

fn numbered<'a>(
    value: &'a Value,
    path: &str,
    name: &str,
) -> Result<Vec<(String, &'a Value)>, GrammarError> {
    let elements = list(value, path, name)?.iter().enumerate();
    Ok(elements.map(|(at, element)| (format!("{path}.{name}[{at}]"), element)).collect())
}

fn strings<'a>(value: &'a Value, path: &str, name: &str) -> Result<Vec<&'a str>, GrammarError> {
    let elements = list(value, path, name)?.iter().enumerate();
    let string = |(at, element): (usize, &'a Value)| match element.as_str() {
        Some(text) if !text.is_empty() => Ok(text),
        _ => Err(GrammarError::at(
            format!("{path}.{name}[{at}]"),
            "expected a string that is not empty",
        )),
    };
    elements.map(string).collect()
}

/// Reads `at_least_one` and `stop_after_first`.
fn flags(format: &Value, path: &str) -> Result<(bool, bool), GrammarError> {
    let flag = |name: &str| match format.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(GrammarError::at(format!("{path}.{name}"), "expected true or false")),
    };
    Ok((flag("at_least_one")?, flag("stop_after_first")?))
}
