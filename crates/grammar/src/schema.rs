//! JSON schemas: checks before llguidance gets one, and the place in a schema that llguidance
//! refuses.

use serde_json::{Map, Value, json};

use crate::compile::brief;
use crate::error::GrammarError;
use crate::formats;
use crate::size;
use crate::source::{SCHEMA_DEPTH, Whitespace};

/// llguidance's own options in a schema. They could switch off checks that the operator wants.
const OPTIONS: &str = "x-guidance";
/// Keywords whose value is a schema.
const ONE: [&str; 14] = [
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
const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Keywords whose value is an object of schemas.
const MAPS: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
/// The beginning of llguidance's error about keywords that it does not know.
const UNIMPLEMENTED: &str = "Unimplemented keys: ";
/// The beginning of its error about a format that it does not know.
const UNKNOWN_FORMAT: &str = "Unknown format: ";
/// The beginning of its error about alternatives that it can't tell apart.
const ONE_OF: &str = "oneOf constraints are not supported";

/// Reads a schema and checks its size.
pub(crate) fn read(text: &str) -> Result<Value, GrammarError> {
    size::check(text, "a schema")?;
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| GrammarError::invalid(format!("the schema is not JSON: {error}")))?;
    prepare(schema)
}

/// Refuses a value that is no schema, is too large, or has options for llguidance. Gives an equal
/// schema that llguidance understands better.
pub(crate) fn prepare(mut schema: Value) -> Result<Value, GrammarError> {
    if !schema.is_object() && !schema.is_boolean() {
        return Err(GrammarError::invalid("a schema is an object or a boolean"));
    }
    measure(&schema, 0, &mut Vec::new())?;
    simplify(&mut schema);
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

/// Removes keywords without meaning that llguidance does not know, and spells out those that it
/// reads too loosely.
fn simplify(schema: &mut Value) {
    each_schema(schema, &mut |schema| {
        formats::spell_out(schema);
        if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
            schema.remove("uniqueItems");
        }
        for keyword in ["unevaluatedProperties", "unevaluatedItems"] {
            if schema.get(keyword) == Some(&Value::Bool(true)) {
                schema.remove(keyword);
            }
        }
        // Conditions that nothing depends on.
        if !schema.contains_key("if") {
            schema.remove("then");
            schema.remove("else");
        } else if !schema.contains_key("then") && !schema.contains_key("else") {
            schema.remove("if");
        }
    });
}

/// Calls `with` for every object that is a schema.
fn each_schema(schema: &mut Value, with: &mut dyn FnMut(&mut Map<String, Value>)) {
    let Value::Object(map) = schema else { return };
    with(map);
    for (key, value) in map {
        match value {
            Value::Array(list) if LISTS.contains(&key.as_str()) => {
                list.iter_mut().for_each(|schema| each_schema(schema, with));
            }
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                schemas.values_mut().for_each(|schema| each_schema(schema, with));
            }
            schema if ONE.contains(&key.as_str()) => each_schema(schema, with),
            _ => {}
        }
    }
}

/// The schema with llguidance's options.
pub(crate) fn with_options(mut schema: Value, whitespace: &Whitespace, lenient: bool) -> Value {
    if let Value::Object(map) = &mut schema {
        map.insert(OPTIONS.to_owned(), options(whitespace, lenient));
        return schema;
    }
    // A boolean: the object that means the same.
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

/// Makes an error of llguidance's message about a schema, with the place in the schema if it can be
/// found.
pub(crate) fn explain(schema: &Value, said: &str) -> GrammarError {
    let find = |fits: &dyn Fn(&Map<String, Value>) -> Option<String>| {
        let mut path = Vec::new();
        locate(schema, fits, &mut path).then(|| joined(&path))
    };
    if let Some(at) = said.find(UNIMPLEMENTED) {
        // Behind the list, the grammar around the schema may be repeated.
        let list = said[at..].split(']').next().unwrap_or_default();
        let keys: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
        let path = find(&|map| {
            keys.iter().find(|key| map.contains_key(**key)).map(|key| (*key).to_owned())
        });
        if let Some(path) = path {
            return GrammarError::at(path, "the keyword is not supported");
        }
    }
    if let Some(at) = said.find(UNKNOWN_FORMAT) {
        let format = said[at + UNKNOWN_FORMAT.len()..].lines().next().unwrap_or_default().trim();
        let named =
            |map: &Map<String, Value>| map.get("format").is_some_and(|value| value == format);
        if let Some(path) = find(&|map| named(map).then(|| "format".to_owned())) {
            return GrammarError::at(path, format!("the format {format} is not supported"));
        }
    }
    if said.contains(ONE_OF)
        && let Some(path) = find(&|map| map.contains_key("oneOf").then(|| "oneOf".to_owned()))
    {
        let why = "only alternatives that exclude each other are supported: use anyOf";
        return GrammarError::at(path, why);
    }
    GrammarError::invalid(brief(said))
}

/// Searches for the first schema that `fits`. `path` is then its path.
fn locate(
    schema: &Value,
    fits: &dyn Fn(&Map<String, Value>) -> Option<String>,
    path: &mut Vec<String>,
) -> bool {
    let Value::Object(map) = schema else { return false };
    if let Some(key) = fits(map) {
        path.push(key);
        return true;
    }
    for (key, value) in map {
        path.push(key.clone());
        let found = match value {
            Value::Array(list) if LISTS.contains(&key.as_str()) => {
                list.iter().enumerate().any(|(index, schema)| {
                    path.push(format!("[{index}]"));
                    locate(schema, fits, path) || {
                        path.pop();
                        false
                    }
                })
            }
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                schemas.iter().any(|(name, schema)| {
                    path.push(name.clone());
                    locate(schema, fits, path) || {
                        path.pop();
                        false
                    }
                })
            }
            schema if ONE.contains(&key.as_str()) => locate(schema, fits, path),
            _ => false,
        };
        if found {
            return true;
        }
        path.pop();
    }
    false
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
