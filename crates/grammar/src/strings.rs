//! Converts the strings of a JSON schema to Lark terminals, for notations without quotes.

use serde_json::{Map, Value};

use crate::error::GrammarError;
use crate::formats;
use crate::kinds::{Kind, Kinds, resolve};
use crate::lark::literal;
use crate::tag::below;
use crate::work::Work;

/// One alternative for the strings that a schema allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Text {
    /// The right side of a terminal.
    pub(crate) terminal: String,
    /// True if the schema lists this text as a value.
    pub(crate) listed: bool,
}

/// The longest chain of references and alternatives that is followed.
const DEPTH: usize = 32;
/// The largest number of alternatives for the strings of one schema.
const MOST: usize = 4096;

/// Returns the right side of a terminal for `minLength`, `maxLength`, `pattern` and `format`;
/// `None` if the schema has none of these. Listed values are ignored.
fn bounds(schema: &Map<String, Value>) -> Result<Option<String>, GrammarError> {
    let mut parts = Vec::new();
    let number = |name: &str| match schema.get(name) {
        None => Ok(None),
        // A length of 3.0 counts as an integer too.
        Some(value) => {
            match value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..1e6).contains(x)) {
                Some(number) => Ok(Some(number as u64)),
                None => {
                    Err(GrammarError::at(format!(".{name}"), "expected a number of characters"))
                }
            }
        }
    };
    match (number("minLength")?, number("maxLength")?) {
        (None, None) => {}
        (Some(least), Some(most)) if least > most => {
            return Err(GrammarError::at(".minLength", "it is more than maxLength"));
        }
        (least, most) => {
            let (least, most) = (least.unwrap_or(0), most.map_or(String::new(), |n| n.to_string()));
            parts.push(format!("/(?s:.{{{least},{most}}})/"));
        }
    }
    if let Some(pattern) = schema.get("pattern") {
        let pattern = pattern
            .as_str()
            .ok_or_else(|| GrammarError::at(".pattern", "expected a regular expression"))?;
        parts.push(search(pattern));
    }
    if let Some(format) = schema.get("format") {
        let known = format.as_str().and_then(formats::plain);
        let known = known.ok_or_else(|| {
            let why = format!(
                "the format {format} is not supported in the model's own notation of calls"
            );
            GrammarError::at(".format", why)
        })?;
        parts.push(format!("/{}/", llguidance::regex_to_lark(known, "")));
    }
    Ok((!parts.is_empty()).then(|| parts.join(" & ")))
}

/// Returns a regular expression for text that contains a match of `pattern`.
fn search(pattern: &str) -> String {
    let body = pattern.strip_prefix('^');
    let before = if body.is_some() { "" } else { "(?s:.*)" };
    let body = body.unwrap_or(pattern);
    let escaped = body
        .strip_suffix('$')
        .is_some_and(|rest| rest.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1);
    let end = body.strip_suffix('$').filter(|_| !escaped);
    let after = if end.is_some() { "" } else { "(?s:.*)" };
    let body = llguidance::regex_to_lark(end.unwrap_or(body), "dw");
    format!("/{before}(?:{body}){after}/")
}

/// Returns the strings that a schema allows, as alternatives; empty if there are none. Restrictions
/// on other types of values are ignored.
pub(crate) fn texts(
    root: &Value,
    schema: &Value,
    depth: usize,
    work: &mut Work,
) -> Result<Vec<Text>, GrammarError> {
    work.visit()?;
    let map = match schema {
        Value::Bool(true) => return Ok(vec![Text::any()]),
        Value::Object(map) => map,
        _ => return Ok(Vec::new()),
    };
    if depth > DEPTH {
        return Err(GrammarError::invalid(format!("deeper than {DEPTH} levels")));
    }
    for key in ["not", "if", "dependentSchemas"] {
        if map.contains_key(key) {
            let why = "the keyword is not supported in the model's own notation of calls";
            return Err(GrammarError::at(format!(".{key}"), why));
        }
    }
    if let Some(target) = map.get("$ref").and_then(Value::as_str) {
        let found = resolve(root, target);
        let found = found.ok_or_else(|| GrammarError::at(".$ref", "there is no such schema"))?;
        return texts(root, found, depth + 1, work);
    }
    if !Kinds::declared(map).has(Kind::String) {
        return Ok(Vec::new());
    }
    let mut ways = match (map.get("enum").and_then(Value::as_array), map.get("const")) {
        (Some(values), _) => listed(values, work)?,
        (None, Some(value)) => listed(std::slice::from_ref(value), work)?,
        (None, None) => vec![Text::any()],
    };
    if let Some(bounds) = bounds(map)? {
        let bounds = Text { terminal: bounds, listed: false };
        ways = pairs(&ways, &[bounds], work)?;
    }
    let path = |key: &str, at: usize, error| below(&format!(".{key}[{at}]"), error);
    for key in ["anyOf", "oneOf"] {
        let Some(parts) = map.get(key).and_then(Value::as_array) else { continue };
        let mut some = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            let found = texts(root, part, depth + 1, work).map_err(|error| path(key, at, error))?;
            let several = key == "oneOf" && !some.is_empty() && !found.is_empty();
            if several && !some.iter().chain(&found).all(|text: &Text| text.listed) {
                let why = "only alternatives that exclude each other are supported: use anyOf";
                return Err(GrammarError::at(".oneOf", why));
            }
            some.extend(found);
        }
        ways = product(&ways, &some, work)?;
    }
    let parts = map.get("allOf").and_then(Value::as_array).into_iter().flatten();
    for (at, part) in parts.enumerate() {
        let some = texts(root, part, depth + 1, work).map_err(|error| path("allOf", at, error))?;
        ways = product(&ways, &some, work)?;
    }
    Ok(ways)
}

impl Text {
    fn any() -> Self {
        Self { terminal: "/(?s:.*)/".to_owned(), listed: false }
    }
}

fn listed(values: &[Value], work: &mut Work) -> Result<Vec<Text>, GrammarError> {
    let mut texts = Vec::new();
    for text in values.iter().filter_map(Value::as_str) {
        work.write(text.len() + size_of::<Text>())?;
        texts.push(Text { terminal: literal(text), listed: true });
    }
    Ok(texts)
}

/// Returns the intersection of two alternatives.
fn both(left: &Text, right: &Text) -> Text {
    let any = Text::any();
    let terminal = match (left, right) {
        (left, right) if *left == any => right.terminal.clone(),
        (left, right) if *right == any => left.terminal.clone(),
        _ => format!("({}) & ({})", left.terminal, right.terminal),
    };
    Text { terminal, listed: left.listed || right.listed }
}

fn product(left: &[Text], right: &[Text], work: &mut Work) -> Result<Vec<Text>, GrammarError> {
    if left.len() * right.len() > MOST {
        return Err(GrammarError::invalid(format!(
            "more than {MOST} alternative forms of a string"
        )));
    }
    pairs(left, right, work)
}

fn pairs(left: &[Text], right: &[Text], work: &mut Work) -> Result<Vec<Text>, GrammarError> {
    let mut texts = Vec::with_capacity(left.len() * right.len());
    for one in left {
        for other in right {
            work.write(one.terminal.len() + other.terminal.len() + size_of::<Text>())?;
            texts.push(both(one, other));
        }
    }
    Ok(texts)
}
