//! Finds the keywords of a schema that llguidance does not accept, and removes them.
//!
//! llguidance reports what is wrong, but seldom where. So each keyword is tried separately, in an
//! otherwise empty schema.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;

use llguidance::api::ParserLimits;
use llguidance::{GrammarBuilder, JsonCompileOptions, panic_utils};
use serde_json::{Map, Value, json};

use crate::compile::brief;
use crate::error::GrammarError;
use crate::kinds::{NUMERIC, resolve};
use crate::schema::{
    self, LISTS, MAPS, ONE, UNIMPLEMENTED, UNSUPPORTED, each, each_mut, with_options,
};
use crate::source::Whitespace;
use crate::work::Work;

/// The largest number of keywords that are removed from a schema.
const LEFT_OUT: usize = 64;
/// The units of work for trying a schema, in addition to its size.
const TRIAL: usize = 4096;
/// Keywords whose values are schemas or lead to schemas, which are tried separately.
const STRUCTURE: [&str; 13] = [
    "$ref",
    "$defs",
    "definitions",
    "allOf",
    "anyOf",
    "oneOf",
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "required",
];
/// Keywords for strings. If llguidance accepts each of them separately, those of a schema are then
/// tried together.
const STRINGS: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];
const SIZES: [&str; 2] = ["minProperties", "maxProperties"];

/// A keyword that cannot be enforced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The path of the keyword.
    pub(crate) path: String,
    pub(crate) reason: String,
}

/// Returns the error that llguidance reports for a schema; `None` if it accepts the schema.
fn trial(schema: &Value, work: &mut Work) -> Result<Option<String>, GrammarError> {
    work.copy(schema)?;
    work.write(TRIAL)?;
    let schema = with_options(schema.clone(), &Whitespace::default(), false);
    let compile = || {
        let builder = GrammarBuilder::new(None, ParserLimits::default());
        JsonCompileOptions::default().json_to_llg_with_overrides(builder, schema).map(drop)
    };
    let compiled = panic_utils::catch_unwind(AssertUnwindSafe(compile));
    Ok(compiled.err().map(|error| format!("{error:#}")))
}

/// Returns the part of llguidance's message about a keyword that is useful to a client.
fn reason(key: &str, value: &Value, said: &str) -> String {
    if said.contains(UNIMPLEMENTED) {
        return UNSUPPORTED.to_owned();
    }
    if key == "format" && value.is_string() {
        return format!("the format {} is not supported", value.as_str().unwrap_or_default());
    }
    if said.starts_with("panic: ") {
        return "the value is not supported".to_owned();
    }
    // Errors of regular expressions repeat the expression first.
    match said.rsplit_once("error: ") {
        Some((_, last)) => brief(last),
        None => brief(said),
    }
}

/// Finds the keywords of a schema that llguidance does not accept.
pub(crate) fn find(root: &Value, work: &mut Work) -> Result<Vec<Fault>, GrammarError> {
    let mut schemas = Vec::new();
    each(root, &mut String::new(), &mut |schema, path| {
        if let Value::Object(map) = schema {
            schemas.push((map, path.to_owned()));
        }
    });
    let draft = root.get("$schema").filter(|draft| draft.is_string());
    let mut faults = Vec::new();
    for (map, path) in schemas {
        faults_of(root, map, draft, &path, &mut faults, work)?;
    }
    Ok(faults)
}

/// Finds the faults of the schema `map` at `path`, without those of nested schemas.
fn faults_of(
    root: &Value,
    map: &Map<String, Value>,
    draft: Option<&Value>,
    path: &str,
    faults: &mut Vec<Fault>,
    work: &mut Work,
) -> Result<(), GrammarError> {
    let mut fault = |key: &str, reason: String| {
        let path = format!("{path}.{key}");
        faults.push(Fault { path, reason });
    };
    let alone = |fields: &mut dyn Iterator<Item = (&str, Value)>| {
        let mut schema = Map::new();
        if let Some(draft) = draft {
            schema.insert("$schema".to_owned(), draft.clone());
        }
        schema.extend(fields.map(|(key, value)| (key.to_owned(), value)));
        Value::Object(schema)
    };
    let number = if map.get("type") == Some(&json!("integer")) { "integer" } else { "number" };
    let kind = |key: &str| match key {
        key if NUMERIC.contains(&key) => Some(number),
        key if STRINGS.contains(&key) => Some("string"),
        _ => None,
    };
    let mut wrong = HashSet::new();
    for (key, value) in map {
        let key = key.as_str();
        if STRUCTURE.contains(&key) || SIZES.contains(&key) {
            continue;
        }
        // The content of nested schemas does not matter here: the keyword itself is unknown.
        let value = match value {
            Value::Array(_) if LISTS.contains(&key) => json!([]),
            _ if MAPS.contains(&key) || ONE.contains(&key) => json!({}),
            value => value.clone(),
        };
        let named = kind(key).map(|kind| ("type", json!(kind)));
        let schema = alone(&mut named.into_iter().chain([(key, value.clone())]));
        if let Some(said) = trial(&schema, work)? {
            wrong.insert(key);
            fault(key, reason(key, &value, &said));
        }
    }
    for (keys, kind) in [(&STRINGS[..], "string"), (&NUMERIC[..], number)] {
        let given: Vec<&str> = keys.iter().copied().filter(|key| map.contains_key(*key)).collect();
        if given.len() < 2 || given.iter().any(|key| wrong.contains(key)) {
            continue;
        }
        let fields = given.iter().map(|key| (*key, map[*key].clone()));
        let schema = alone(&mut [("type", json!(kind))].into_iter().chain(fields));
        if let (Some(said), Some(first)) = (trial(&schema, work)?, given.first()) {
            fault(first, reason(first, &map[*first], &said));
        }
    }
    if let Some(Value::Object(patterns)) = map.get("patternProperties") {
        let any = patterns.iter().map(|(pattern, _)| (pattern.clone(), json!(true)));
        let any = Value::Object(any.collect());
        let schema = alone(&mut [("patternProperties", any)].into_iter());
        if let Some(said) = trial(&schema, work)? {
            fault("patternProperties", reason("patternProperties", &Value::Null, &said));
        }
    }
    if let Some(size) = SIZES.iter().find(|key| map.contains_key(**key)) {
        let names = map.get("properties").and_then(Value::as_object).into_iter().flatten();
        let names = names.map(|(name, _)| (name.clone(), json!(true)));
        let properties = ("properties", Value::Object(names.collect()));
        let given = [SIZES[0], SIZES[1], "required", "additionalProperties"].into_iter();
        let given = given.filter_map(|key| Some((key, map.get(key)?)));
        let given = given.map(|(key, value)| {
            let is_schema = key == "additionalProperties" && value.is_object();
            (key, if is_schema { json!(true) } else { value.clone() })
        });
        let schema = alone(&mut [properties].into_iter().chain(given));
        if let Some(said) = trial(&schema, work)? {
            fault(size, reason(size, &Value::Null, &said));
        }
    }
    if let Some(target) = map.get("$ref").and_then(Value::as_str)
        && target.starts_with("#/")
        && resolve(root, target).is_none()
    {
        fault("$ref", "there is no such schema".to_owned());
    }
    Ok(())
}

/// Removes the keyword at `path` from a schema; `oneOf` is replaced by `anyOf`. Returns false if
/// there is no such keyword, or if it cannot be removed.
pub(crate) fn leave_out(root: &mut Value, path: &str) -> bool {
    let mut found = false;
    each_mut(root, &mut String::new(), &mut |schema, at| {
        let (Value::Object(map), Some(key)) = (schema, path.strip_prefix(at)) else { return };
        let Some(key) = key.strip_prefix('.').filter(|_| !found) else { return };
        if let Some(name) = key.strip_prefix("properties.") {
            // An optional property whose name the notation cannot write is removed.
            let required = map.get("required").and_then(Value::as_array);
            let is_required = required.is_some_and(|all| all.iter().any(|other| other == name));
            if let Some(Value::Object(properties)) = map.get_mut("properties")
                && !is_required
            {
                found = properties.shift_remove(name).is_some();
            }
            return;
        }
        let Some(value) = map.shift_remove(key) else { return };
        found = true;
        if key == "oneOf" && !map.contains_key("anyOf") {
            map.insert("anyOf".to_owned(), value);
        }
    });
    found
}

/// Returns a schema that llguidance accepts, and the paths of the removed keywords.
///
/// # Errors
/// llguidance rejects the schema for reasons other than single keywords.
pub(crate) fn loosened(
    mut root: Value,
    work: &mut Work,
) -> Result<(Value, Vec<String>), GrammarError> {
    let mut left_out = Vec::new();
    let Some(mut said) = trial(&root, work)? else { return Ok((root, left_out)) };
    for fault in find(&root, work)? {
        if leave_out(&mut root, &fault.path) {
            left_out.push(fault.path);
        }
    }
    for _ in 0..LEFT_OUT {
        match trial(&root, work)? {
            None => return Ok((root, left_out)),
            Some(again) => said = again,
        }
        match schema::explain(&root, &said, work) {
            GrammarError::Invalid { path, .. } if leave_out(&mut root, &path) => {
                left_out.push(path);
            }
            error => return Err(error),
        }
    }
    Err(GrammarError::invalid(brief(&said)))
}
