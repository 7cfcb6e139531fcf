//! The kinds of JSON values that a schema allows.

use std::collections::HashMap;
use std::ptr;

use serde_json::{Map, Value, json};

use crate::error::GrammarError;
use crate::lark::literal;
use crate::work::Work;

/// The longest chain of references and alternatives that is followed.
const DEPTH: usize = 32;

/// Numbers without exponents, with at most as many digits as a double represents exactly.
pub(crate) const INTEGER: &str = "/-?(0|[1-9][0-9]{0,14})/";
pub(crate) const NUMBER: &str = "/-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?/";
/// Keywords about numbers.
pub(crate) const NUMERIC: [&str; 5] =
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/// A kind of JSON value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Null,
    Boolean,
    Integer,
    Number,
    String,
    Array,
    Object,
}

const ALL: [Kind; 7] = [
    Kind::Null,
    Kind::Boolean,
    Kind::Integer,
    Kind::Number,
    Kind::String,
    Kind::Array,
    Kind::Object,
];

impl Kind {
    pub(crate) fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(_) => Self::Boolean,
            Value::Number(number) if number.is_f64() => Self::Number,
            Value::Number(_) => Self::Integer,
            Value::String(_) => Self::String,
            Value::Array(_) => Self::Array,
            Value::Object(_) => Self::Object,
        }
    }

    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "null" => Self::Null,
            "boolean" => Self::Boolean,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "string" => Self::String,
            "array" => Self::Array,
            "object" => Self::Object,
            _ => return None,
        })
    }
}

/// A set of kinds, one bit per kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Kinds(u8);

impl Kinds {
    pub(crate) const ALL: Self = Self(0x7f);

    fn with(self, kind: Kind) -> Self {
        Self(self.0 | 1 << kind as u8)
    }

    /// True if a value of this kind is allowed. An integer is a number too.
    pub(crate) fn has(self, kind: Kind) -> bool {
        let own = |kind: Kind| self.0 >> kind as u8 & 1 == 1;
        own(kind) || kind == Kind::Integer && own(Kind::Number)
    }

    pub(crate) fn is_only(self, kind: Kind) -> bool {
        self == Self::default().with(kind)
    }

    /// True if the two sets have a kind in common.
    pub(crate) fn meets(self, other: Self) -> bool {
        ALL.into_iter().any(|kind| self.has(kind) && other.has(kind))
    }

    /// Iterates over the kinds. Integer is left out if any number is allowed.
    pub(crate) fn iter(self) -> impl Iterator<Item = Kind> {
        let number = self.has(Kind::Number);
        ALL.into_iter().filter(move |&kind| {
            self.0 >> kind as u8 & 1 == 1 && !(number && kind == Kind::Integer)
        })
    }

    /// Returns the kinds in the keyword `type`.
    pub(crate) fn declared(schema: &Map<String, Value>) -> Self {
        let some = |names: &mut dyn Iterator<Item = &str>| {
            names.filter_map(Kind::named).fold(Self::default(), Self::with)
        };
        match schema.get("type") {
            Some(Value::String(name)) => some(&mut [name.as_str()].into_iter()),
            Some(Value::Array(names)) => some(&mut names.iter().filter_map(Value::as_str)),
            _ => Self::ALL,
        }
    }

    /// Returns the declared kinds. Without `type`, returns the kinds that the other keywords apply
    /// to. Formally such a schema allows values of other kinds too, which is rarely intended.
    pub(crate) fn meant(schema: &Map<String, Value>) -> Self {
        if schema.contains_key("type") {
            return Self::declared(schema);
        }
        let has = |keys: &[&str]| keys.iter().any(|key| schema.contains_key(*key));
        let about = [
            (Kind::Object, &["properties", "required", "additionalProperties"][..]),
            (Kind::Array, &["items", "minItems", "maxItems"][..]),
            (Kind::String, &["pattern", "minLength", "maxLength", "format"][..]),
            (Kind::Number, &["minimum", "maximum", "multipleOf"][..]),
        ];
        let kinds = about.into_iter().filter(|(_, keys)| has(keys));
        let kinds = kinds.fold(Self::default(), |kinds, (kind, _)| kinds.with(kind));
        if kinds == Self::default() { Self::ALL } else { kinds }
    }

    /// Returns the kinds of values that a schema may have, following all references. In doubt the
    /// result has too many kinds rather than too few.
    pub(crate) fn reached(
        root: &Value,
        schema: &Value,
        work: &mut Work,
    ) -> Result<Self, GrammarError> {
        Self::reach(root, schema, &mut HashMap::new(), 0, work)
    }

    /// Implements `reached`. `seen` maps the addresses of visited schemas to kinds. A reference of
    /// a schema to itself counts as all kinds, so only the schema's other keywords restrict them.
    fn reach(
        root: &Value,
        schema: &Value,
        seen: &mut HashMap<*const Value, Self>,
        depth: usize,
        work: &mut Work,
    ) -> Result<Self, GrammarError> {
        let Value::Object(map) = schema else {
            return Ok(if schema == &Value::Bool(false) { Self::default() } else { Self::ALL });
        };
        if depth > DEPTH {
            return Ok(Self::ALL);
        }
        if let Some(kinds) = seen.get(&ptr::from_ref(schema)) {
            return Ok(*kinds);
        }
        seen.insert(schema, Self::ALL);
        work.visit()?;
        let mut kinds = Self::declared(map);
        let listed = map.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        let listed = listed.or(map.get("const").map(std::slice::from_ref));
        if let Some(values) = listed {
            work.write(values.len())?;
            kinds = kinds.and(values.iter().map(Kind::of).fold(Self::default(), Self::with));
        }
        if let Some(target) = map.get("$ref").and_then(Value::as_str)
            && let Some(target) = resolve(root, target)
        {
            kinds = kinds.and(Self::reach(root, target, seen, depth + 1, work)?);
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(parts) = map.get(key).and_then(Value::as_array) {
                let mut some = Self::default();
                for part in parts {
                    some = some.or(Self::reach(root, part, seen, depth + 1, work)?);
                }
                kinds = kinds.and(some);
            }
        }
        for part in map.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            kinds = kinds.and(Self::reach(root, part, seen, depth + 1, work)?);
        }
        if map.get("nullable") == Some(&Value::Bool(true)) {
            kinds = kinds.with(Kind::Null);
        }
        seen.insert(schema, kinds);
        Ok(kinds)
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn and(self, other: Self) -> Self {
        ALL.into_iter()
            .filter(|&kind| self.has(kind) && other.has(kind))
            .fold(Self::default(), Self::with)
    }

    /// Returns a regular expression for text that is read as a value of one of these kinds, except
    /// strings. If `begin`, the expression matches all text that starts like such a value.
    pub(crate) fn written(self, begin: bool) -> Option<String> {
        let nested = self.has(Kind::Array) || self.has(Kind::Object);
        let ways = [
            (self.has(Kind::Null), "null|None"),
            (self.has(Kind::Boolean), "true|True|false|False"),
            (
                self.has(Kind::Integer) || self.has(Kind::Number),
                if begin { "-?[0-9]" } else { r"-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?" },
            ),
            (nested, r"[\[{(](?s:.*)"),
        ];
        let ways: Vec<&str> = ways.into_iter().filter(|(is, _)| *is).map(|(_, way)| way).collect();
        let end = if begin { "(?s:.*)" } else { "\\s*" };
        (!ways.is_empty()).then(|| format!("/\\s*({}){end}/", ways.join("|")))
    }
}

/// Returns the schema that `#/...` refers to.
pub(crate) fn resolve<'r>(root: &'r Value, target: &str) -> Option<&'r Value> {
    root.pointer(target.strip_prefix('#')?)
}

/// The keywords of a schema whose definitions may be referenced.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Returns the schema together with those definitions of `root` that it refers to, directly or
/// indirectly.
pub(crate) fn defined(
    root: &Value,
    schema: &Value,
    work: &mut Work,
) -> Result<Value, GrammarError> {
    work.copy(schema)?;
    let mut defined = schema.clone();
    let Value::Object(fields) = &mut defined else { return Ok(defined) };
    let mut found: HashMap<(&str, &str), &Value> = HashMap::new();
    let mut all = false;
    let mut rest = vec![schema];
    while let Some(value) = rest.pop() {
        work.visit()?;
        match value {
            Value::Array(values) => rest.extend(values),
            Value::Object(map) => {
                rest.extend(map.values());
                let target = map.get("$ref").and_then(Value::as_str);
                let Some(target) = target else { continue };
                let Some((key, name, definition)) = definition(root, target) else {
                    // The target may be the name of an anchor in any definition.
                    all = true;
                    continue;
                };
                if found.insert((key, name), definition).is_none() {
                    rest.push(definition);
                }
            }
            _ => {}
        }
    }
    for key in DEFINITIONS {
        let Some(Value::Object(definitions)) = root.get(key) else { continue };
        let mut some = Map::new();
        for (name, definition) in definitions {
            if all || found.contains_key(&(key, name.as_str())) {
                work.copy(definition)?;
                some.insert(name.clone(), definition.clone());
            }
        }
        if !some.is_empty() {
            fields.entry(key).or_insert(Value::Object(some));
        }
    }
    Ok(defined)
}

/// Returns the definition of `root` that a reference points to or into: its keyword, its name and
/// its content.
fn definition<'r>(root: &'r Value, target: &str) -> Option<(&'static str, &'r str, &'r Value)> {
    let (key, name) = target.strip_prefix("#/")?.split_once('/')?;
    let key = DEFINITIONS.into_iter().find(|known| *known == key)?;
    let name = name.split('/').next()?.replace("~1", "/").replace("~0", "~");
    let (name, definition) = root.get(key)?.as_object()?.get_key_value(&name)?;
    Some((key, name, definition))
}

/// Splits a schema that allows no strings and has no references. Returns the alternatives of a
/// terminal for the values that a terminal can describe, and a schema of the other values.
pub(crate) fn scalars(schema: &Value) -> (Vec<String>, Option<Value>) {
    let Some(map) = schema.as_object() else { return (Vec::new(), Some(schema.clone())) };
    let scalar = |value: &Value| !value.is_array() && !value.is_object();
    let listed = map.get("enum").and_then(Value::as_array).cloned();
    let listed = listed.or_else(|| map.get("const").map(|value| vec![value.clone()]));
    if let Some(values) = listed.filter(|values| values.iter().all(scalar)) {
        let kinds = Kinds::declared(map);
        let values = values.iter().filter(|value| kinds.has(Kind::of(value)));
        return (values.map(|value| literal(&value.to_string())).collect(), None);
    }
    if let (Some(Value::Array(parts)), 1) = (map.get("anyOf").or(map.get("oneOf")), map.len()) {
        let (mut ways, mut rest) = (Vec::new(), Vec::new());
        for part in parts {
            let (some, other) = scalars(part);
            ways.extend(some);
            rest.extend(other);
        }
        return (ways, (!rest.is_empty()).then(|| json!({ "anyOf": rest })));
    }
    let plain = ["enum", "const", "anyOf", "oneOf", "allOf", "$ref", "not", "if"];
    if plain.iter().any(|key| map.contains_key(*key)) || !map.contains_key("type") {
        return (Vec::new(), Some(schema.clone()));
    }
    let bounded = map.keys().any(|key| NUMERIC.contains(&key.as_str()));
    let (mut ways, mut rest) = (Vec::new(), Vec::new());
    for kind in Kinds::declared(map).iter() {
        match kind {
            Kind::Null => ways.push("\"null\"".to_owned()),
            Kind::Boolean => ways.push("/true|false/".to_owned()),
            Kind::Integer if !bounded => ways.push(INTEGER.to_owned()),
            Kind::Number if !bounded => ways.push(NUMBER.to_owned()),
            Kind::Integer => rest.push("integer"),
            Kind::Number => rest.push("number"),
            Kind::String => {}
            Kind::Array => rest.push("array"),
            Kind::Object => rest.push("object"),
        }
    }
    let others = (!rest.is_empty()).then(|| {
        let mut others = map.clone();
        others.insert("type".to_owned(), json!(rest));
        Value::Object(others)
    });
    (ways, others)
}

/// Returns `schema` without strings; `None` if no values are left.
pub(crate) fn without_strings(
    root: &Value,
    schema: &Value,
    depth: usize,
    work: &mut Work,
) -> Result<Option<Value>, GrammarError> {
    const OTHERS: [&str; 5] = ["null", "boolean", "number", "array", "object"];
    work.visit()?;
    let map = match schema {
        Value::Bool(true) => return Ok(Some(json!({ "type": OTHERS }))),
        Value::Object(map) if depth <= DEPTH => map,
        _ => return Ok(None),
    };
    if let Some(target) = map.get("$ref").and_then(Value::as_str) {
        let Some(target) = resolve(root, target) else { return Ok(None) };
        return without_strings(root, target, depth + 1, work);
    }
    work.copy(schema)?;
    let mut map = map.clone();
    let silent = ["title", "description", "default", "example", "examples", "nullable"];
    map.retain(|key, _| !silent.contains(&key.as_str()));
    if let Some(Value::Array(values)) = map.get_mut("enum") {
        values.retain(|value| !value.is_string());
        if values.is_empty() {
            return Ok(None);
        }
    }
    if map.get("const").is_some_and(Value::is_string) {
        return Ok(None);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(parts)) = map.get_mut(key) {
            let mut others = Vec::new();
            for part in parts.iter() {
                others.extend(without_strings(root, part, depth + 1, work)?);
            }
            if others.is_empty() {
                return Ok(None);
            }
            *parts = others;
        }
    }
    if let Some(Value::Array(parts)) = map.get_mut("allOf") {
        for part in parts {
            let Some(other) = without_strings(root, part, depth + 1, work)? else {
                return Ok(None);
            };
            *part = other;
        }
    }
    let settled =
        ["enum", "const", "anyOf", "oneOf", "allOf"].iter().any(|key| map.contains_key(*key));
    match map.get_mut("type") {
        Some(Value::String(name)) if name == "string" => return Ok(None),
        Some(Value::Array(names)) => {
            names.retain(|name| name != "string");
            match &names[..] {
                [] => return Ok(None),
                [one] => {
                    let one = one.clone();
                    map.insert("type".to_owned(), one);
                }
                _ => {}
            }
        }
        None if !settled => {
            map.insert("type".to_owned(), json!(OTHERS));
        }
        _ => {}
    }
    for key in ["pattern", "minLength", "maxLength", "format"] {
        map.remove(key);
    }
    Ok(Some(Value::Object(map)))
}
