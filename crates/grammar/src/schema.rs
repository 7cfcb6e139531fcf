//! Prepares JSON schemas for llguidance, and finds the keyword that llguidance rejects.

use serde_json::{Map, Value, json};

use crate::compile::brief;
use crate::error::GrammarError;
use crate::faults::{self, Fault};
use crate::finite;
use crate::formats;
use crate::size;
use crate::source::{SCHEMA_DEPTH, Whitespace};
use crate::work::Work;

/// The keyword for llguidance's own options. Clients could use it to disable checks that the
/// operator relies on.
const OPTIONS: &str = "x-guidance";
/// Bounds on numbers, for which llguidance uses signed 64-bit integers.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
/// The largest double that fits into a signed 64-bit integer. A larger bound, such as the largest
/// integer of a programming language, counts as no bound.
const WIDE: i64 = 9_223_372_036_854_774_784;
/// Keywords whose value is a schema.
pub(crate) const ONE: [&str; 14] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "extends",
    "disallow",
];
/// Keywords whose value is a list of schemas.
pub(crate) const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Keywords whose value is an object of schemas.
pub(crate) const MAPS: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
/// The beginning of llguidance's error about unknown keywords.
pub(crate) const UNIMPLEMENTED: &str = "Unimplemented keys: ";
/// Why a keyword that llguidance does not support is rejected.
pub(crate) const UNSUPPORTED: &str = "the keyword is not supported";
/// The beginning of llguidance's error about `oneOf` alternatives that it cannot distinguish.
const ONE_OF: &str = "oneOf constraints are not supported";

/// Parses a schema and checks its size.
pub(crate) fn read(text: &str, work: &mut Work) -> Result<Value, GrammarError> {
    size::check(text, "a schema")?;
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| GrammarError::invalid(format!("the schema is not JSON: {error}")))?;
    prepare(schema, work)
}

/// Rejects a value that is not a schema, is too large, has options for llguidance, or has no finite
/// value. Returns a schema with the same finite values, in a form that llguidance handles better.
pub(crate) fn prepare(mut schema: Value, work: &mut Work) -> Result<Value, GrammarError> {
    if !schema.is_object() && !schema.is_boolean() {
        return Err(GrammarError::invalid("a schema is an object or a boolean"));
    }
    measure(&schema, 0, &mut Vec::new())?;
    simplify(&mut schema);
    finite::prune(&mut schema, work)?;
    Ok(schema)
}

fn measure<'a>(
    value: &'a Value,
    depth: usize,
    path: &mut Vec<&'a str>,
) -> Result<(), GrammarError> {
    if depth > SCHEMA_DEPTH {
        return Err(GrammarError::at(joined(path), format!("deeper than {SCHEMA_DEPTH} levels")));
    }
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                path.push(key);
                if key == OPTIONS {
                    return Err(GrammarError::at(joined(path), "clients may not set it"));
                }
                measure(value, depth + 1, path)?;
                path.pop();
            }
            Ok(())
        }
        Value::Array(list) => list.iter().try_for_each(|value| measure(value, depth + 1, path)),
        _ => Ok(()),
    }
}

/// Removes unsupported keywords that have no effect, and spells out keywords that llguidance
/// interprets too loosely.
fn simplify(schema: &mut Value) {
    each_mut(schema, &mut String::new(), &mut |schema, _| {
        let Value::Object(schema) = schema else { return };
        formats::spell_out(schema);
        if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
            schema.remove("uniqueItems");
        }
        for keyword in ["unevaluatedProperties", "unevaluatedItems"] {
            if schema.get(keyword) == Some(&Value::Bool(true)) {
                schema.remove(keyword);
            }
        }
        for bound in BOUNDS {
            if let Some(value) = schema.get_mut(bound)
                && let Some(number) = value.as_f64()
                && number.abs() >= WIDE as f64
            {
                *value = json!(if number < 0.0 { -WIDE } else { WIDE });
            }
        }
        // Remove incomplete conditionals, which have no effect.
        if !schema.contains_key("if") {
            schema.remove("then");
            schema.remove("else");
        } else if !schema.contains_key("then") && !schema.contains_key("else") {
            schema.remove("if");
        }
    });
}

/// A step of a path, into a list or an object.
enum Step<'a> {
    Name(&'a str),
    Index(usize),
}

/// Calls `with` with `path` extended by one step.
fn deeper<R>(path: &mut String, step: Step<'_>, with: impl FnOnce(&mut String) -> R) -> R {
    let length = path.len();
    match step {
        Step::Name(name) => {
            path.push('.');
            path.push_str(name);
        }
        Step::Index(index) => path.push_str(&format!("[{index}]")),
    }
    let result = with(path);
    path.truncate(length);
    result
}

/// Calls `with` for `schema` and every nested schema, with its path. `with` changes a schema before
/// its nested schemas are visited.
pub(crate) fn each_mut(
    schema: &mut Value,
    path: &mut String,
    with: &mut dyn FnMut(&mut Value, &str),
) {
    with(schema, path);
    let Value::Object(map) = schema else { return };
    for (key, value) in map {
        deeper(path, Step::Name(key), |path| match value {
            Value::Array(list) if LISTS.contains(&key.as_str()) => {
                for (index, schema) in list.iter_mut().enumerate() {
                    deeper(path, Step::Index(index), |path| each_mut(schema, path, with));
                }
            }
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                for (name, schema) in schemas {
                    deeper(path, Step::Name(name), |path| each_mut(schema, path, with));
                }
            }
            schema if ONE.contains(&key.as_str()) => each_mut(schema, path, with),
            _ => {}
        });
    }
}

/// Calls `with` for `schema` and every nested schema, with its path.
pub(crate) fn each<'v>(
    schema: &'v Value,
    path: &mut String,
    with: &mut dyn FnMut(&'v Value, &str),
) {
    with(schema, path);
    let Value::Object(map) = schema else { return };
    for (key, value) in map {
        deeper(path, Step::Name(key), |path| match value {
            Value::Array(list) if LISTS.contains(&key.as_str()) => {
                for (index, schema) in list.iter().enumerate() {
                    deeper(path, Step::Index(index), |path| each(schema, path, with));
                }
            }
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                for (name, schema) in schemas {
                    deeper(path, Step::Name(name), |path| each(schema, path, with));
                }
            }
            schema if ONE.contains(&key.as_str()) => each(schema, path, with),
            _ => {}
        });
    }
}

/// Returns the schema with llguidance's options.
pub(crate) fn with_options(mut schema: Value, whitespace: &Whitespace, lenient: bool) -> Value {
    if let Value::Object(map) = &mut schema {
        map.insert(OPTIONS.to_owned(), options(whitespace, lenient));
        return schema;
    }
    // A boolean schema is replaced by the equivalent object.
    let same = if schema == Value::Bool(true) { json!({}) } else { json!({ "anyOf": [] }) };
    with_options(same, whitespace, lenient)
}

fn options(whitespace: &Whitespace, lenient: bool) -> Value {
    json!({
        "whitespace_flexible": whitespace.pattern().is_some(),
        "whitespace_pattern": whitespace.pattern(),
        "coerce_one_of": lenient,
        "lenient": lenient,
    })
}

/// Converts llguidance's message about a schema to an error, with the path of the keyword if it can
/// be found.
pub(crate) fn explain(schema: &Value, said: &str, work: &mut Work) -> GrammarError {
    let find = |key: &dyn Fn(&Map<String, Value>) -> Option<String>| {
        let mut found = None;
        each(schema, &mut String::new(), &mut |schema, path| {
            if let (Value::Object(map), None) = (schema, &found) {
                found = key(map).map(|key| format!("{path}.{key}"));
            }
        });
        found
    };
    if let Some(at) = said.find(UNIMPLEMENTED) {
        // After the list, the message may repeat the grammar around the schema.
        let list = said[at..].split(']').next().unwrap_or_default();
        let keys: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
        let path =
            find(&|map| keys.iter().find(|key| map.contains_key(**key)).map(|k| (*k).to_owned()));
        if let Some(path) = path {
            return GrammarError::at(path, UNSUPPORTED);
        }
    }
    if said.contains(ONE_OF)
        && let Some(path) = find(&|map| map.contains_key("oneOf").then(|| "oneOf".to_owned()))
    {
        let why = "only alternatives that exclude each other are supported: use anyOf";
        return GrammarError::at(path, why);
    }
    match faults::find(schema, work) {
        Ok(faults) if !faults.is_empty() => {
            let Fault { path, reason } = faults.into_iter().next().unwrap_or_default();
            GrammarError::at(path, reason)
        }
        _ => GrammarError::invalid(brief(said)),
    }
}

fn joined<S: AsRef<str>>(path: &[S]) -> String {
    path.iter().fold(String::new(), |mut joined, step| {
        if !step.as_ref().starts_with('[') {
            joined.push('.');
        }
        joined.push_str(step.as_ref());
        joined
    })
}
