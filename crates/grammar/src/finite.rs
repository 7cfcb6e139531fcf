//! Finds schemas that have no finite value. An object that requires itself can never be completed:
//! the model would open braces until the token limit.

use std::collections::HashSet;
use std::ptr;

use serde_json::{Map, Value};

use crate::error::GrammarError;
use crate::kinds::{Kind, Kinds, resolve};
use crate::schema::{each, each_mut};
use crate::work::Work;

/// The longest chain of schemas that is followed. A longer chain counts as finite, so that no
/// schema is rejected by mistake.
const DEPTH: usize = 512;

/// Rejects a schema without a finite value. Alternatives and optional values without a finite value
/// are replaced by `false`, so that the model never starts one.
pub(crate) fn prune(schema: &mut Value, work: &mut Work) -> Result<(), GrammarError> {
    let mut finite = Finite { root: schema, known: HashSet::new(), seen: HashSet::new(), work };
    let mut all = Vec::new();
    each(finite.root, &mut String::new(), &mut |schema, _| all.push(schema));
    // The loop ends when a round finds no more finite schemas.
    loop {
        let before = finite.known.len();
        finite.seen.clear();
        for schema in &all {
            finite.has_value(schema, 0)?;
        }
        if finite.known.len() == before {
            break;
        }
    }
    let is_finite =
        |schema: &Value| schema == &Value::Bool(true) || finite.known.contains(&address(schema));
    if !is_finite(finite.root) {
        let mut passed = HashSet::new();
        let (path, is_circle) = finite.place(finite.root, String::new(), &mut passed);
        let why = if is_circle {
            "no finite value is valid here: it would have to contain another such value"
        } else {
            "no value is valid here"
        };
        return Err(GrammarError::at(path, why));
    }
    let infinite: HashSet<usize> = all
        .into_iter()
        .filter(|schema| schema.is_object() && !is_finite(schema))
        .map(address)
        .collect();
    if !infinite.is_empty() {
        each_mut(schema, &mut String::new(), &mut |schema, _| {
            if infinite.contains(&address(schema)) {
                *schema = Value::Bool(false);
            }
        });
    }
    Ok(())
}

/// Returns the schema's address in memory, which identifies it.
fn address(schema: &Value) -> usize {
    ptr::from_ref(schema) as usize
}

struct Finite<'a> {
    root: &'a Value,
    /// The schemas that are known to have a finite value.
    known: HashSet<usize>,
    /// The schemas visited in this round.
    seen: HashSet<usize>,
    work: &'a mut Work,
}

impl<'a> Finite<'a> {
    /// True if the schema certainly has a finite value.
    fn has_value(&mut self, schema: &'a Value, depth: usize) -> Result<bool, GrammarError> {
        let map = match schema {
            Value::Bool(any) => return Ok(*any),
            Value::Object(map) => map,
            // This is not a valid schema; the compiler reports it.
            _ => return Ok(true),
        };
        if self.known.contains(&address(schema)) || depth > DEPTH {
            return Ok(true);
        }
        if !self.seen.insert(address(schema)) {
            return Ok(false);
        }
        self.work.visit()?;
        for (part, _) in parts(self.root, map) {
            let mut fits = part.needed == 0;
            let mut found = 0;
            for (_, schema) in &part.schemas {
                if fits {
                    break;
                }
                found += usize::from(self.has_value(schema, depth + 1)?);
                fits = found >= part.needed;
            }
            if !fits {
                return Ok(false);
            }
        }
        self.known.insert(address(schema));
        Ok(true)
    }

    /// Returns the path of the part that leaves the schema without a finite value. The flag is true
    /// if this part leads back to a schema on its path, and false if no value is valid there.
    fn place(
        &self,
        schema: &'a Value,
        path: String,
        passed: &mut HashSet<usize>,
    ) -> (String, bool) {
        let Value::Object(map) = schema else { return (path, false) };
        if !passed.insert(address(schema)) {
            return (path, true);
        }
        let is_finite = |schema: &Value| match schema {
            Value::Bool(any) => *any,
            schema => self.known.contains(&address(schema)),
        };
        for (part, key) in parts(self.root, map) {
            let found = part.schemas.iter().filter(|(_, schema)| is_finite(schema)).count();
            if found >= part.needed {
                continue;
            }
            let Some((step, next)) = part.schemas.iter().find(|(_, schema)| !is_finite(schema))
            else {
                return (format!("{path}.{key}"), false);
            };
            return match step.strip_prefix('#') {
                // The reference that closes the cycle is reported; other references are followed.
                Some(_) if passed.contains(&address(next)) => (path, true),
                Some(target) => self.place(next, target.replace('/', "."), passed),
                None => self.place(next, format!("{path}.{step}"), passed),
            };
        }
        (path, true)
    }
}

/// A requirement of a schema: at least `needed` of `schemas` must have a finite value.
struct Part<'a> {
    needed: usize,
    /// The schemas, each with the path step to it. A step that begins with `#` is a reference.
    schemas: Vec<(String, &'a Value)>,
}

/// Returns the requirements of a schema, with their keywords. The requirements of one type do not
/// count if values of another type are allowed.
fn parts<'a>(root: &'a Value, map: &'a Map<String, Value>) -> Vec<(Part<'a>, &'static str)> {
    let mut parts = Vec::new();
    if let Some(target) = map.get("$ref").and_then(Value::as_str)
        && let Some(schema) = resolve(root, target)
    {
        parts.push((Part { needed: 1, schemas: vec![(target.to_owned(), schema)] }, "$ref"));
    }
    for (key, all) in [("allOf", true), ("anyOf", false), ("oneOf", false)] {
        if let Some(list) = map.get(key).and_then(Value::as_array) {
            let schemas: Vec<_> =
                list.iter().enumerate().map(|(at, s)| (format!("{key}[{at}]"), s)).collect();
            parts.push((Part { needed: if all { schemas.len() } else { 1 }, schemas }, key));
        }
    }
    let listed = map.get("enum").and_then(Value::as_array);
    if listed.is_some_and(Vec::is_empty) {
        parts.push((Part { needed: 1, schemas: Vec::new() }, "enum"));
    }
    if listed.is_some() || map.contains_key("const") {
        return parts;
    }
    let kinds = Kinds::declared(map);
    let nested = [(Kind::Object, object(map)), (Kind::Array, array(map))];
    let others = kinds.iter().any(|kind| !matches!(kind, Kind::Object | Kind::Array));
    let mut demands = nested.into_iter().filter(|(kind, _)| kinds.has(*kind)).map(|(_, part)| part);
    // If objects and arrays are both allowed, the schema counts as finite.
    if let (Some(part), None, false) = (demands.next(), demands.next(), others) {
        parts.extend(part);
    }
    parts
}

/// Returns the requirements for the properties of an object.
fn object(map: &Map<String, Value>) -> Vec<(Part<'_>, &'static str)> {
    let properties = map.get("properties").and_then(Value::as_object);
    let others = map.get("additionalProperties");
    let patterns = map.get("patternProperties").and_then(Value::as_object);
    let has_patterns = patterns.is_some_and(|patterns| !patterns.is_empty());
    let required = map.get("required").and_then(Value::as_array).into_iter().flatten();
    let mut schemas = Vec::new();
    for name in required.filter_map(Value::as_str) {
        match (properties.and_then(|properties| properties.get(name)), others) {
            (Some(schema), _) => schemas.push((format!("properties.{name}"), schema)),
            (None, Some(schema)) if !has_patterns => {
                schemas.push(("additionalProperties".to_owned(), schema));
            }
            (None, _) => {}
        }
    }
    let mut parts = vec![(Part { needed: schemas.len(), schemas }, "required")];
    let least = map.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let least = usize::try_from(least).unwrap_or(usize::MAX);
    // Any number of additional properties can be added, if their schema has a finite value.
    if let (Some(others), false, 1..) = (others, has_patterns, least) {
        let own = properties.into_iter().flatten();
        let own = own.map(|(name, schema)| (format!("properties.{name}"), schema));
        let count = properties.map_or(0, Map::len);
        let others = std::iter::repeat_n(others, least.min(count + 1));
        let others = others.map(|schema| ("additionalProperties".to_owned(), schema));
        let needed = least.min(count + 1);
        parts.push((Part { needed, schemas: own.chain(others).collect() }, "minProperties"));
    }
    parts
}

/// Returns the requirements for the elements of a list.
fn array(map: &Map<String, Value>) -> Vec<(Part<'_>, &'static str)> {
    let least = map.get("minItems").and_then(Value::as_u64).unwrap_or(0);
    let least = usize::try_from(least).unwrap_or(usize::MAX);
    let (key, first, others) = match (map.get("prefixItems"), map.get("items")) {
        (_, Some(Value::Array(first))) => ("items", &first[..], map.get("additionalItems")),
        (Some(Value::Array(first)), items) => ("prefixItems", &first[..], items),
        (_, items) => ("items", &[][..], items),
    };
    let tail = if key == "items" && !first.is_empty() { "additionalItems" } else { "items" };
    let mut schemas: Vec<_> =
        first.iter().take(least).enumerate().map(|(at, s)| (format!("{key}[{at}]"), s)).collect();
    if let (Some(others), true) = (others, least > first.len()) {
        schemas.push((tail.to_owned(), others));
    }
    vec![(Part { needed: schemas.len(), schemas }, "minItems")]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pruned(schema: &Value) -> Result<Value, (String, String)> {
        let mut pruned = schema.clone();
        match prune(&mut pruned, &mut Work::default()) {
            Ok(()) => Ok(pruned),
            Err(GrammarError::Invalid { path, reason }) => Err((path, reason)),
            Err(other) => panic!("{other}"),
        }
    }

    fn node(next: Value) -> Value {
        json!({"type": "object", "properties": {"n": {"type": "integer"}, "next": next}, "required": ["next"]})
    }

    #[test]
    fn what_requires_itself_is_refused_with_the_place() {
        let again = json!({"$ref": "#"});
        let defined = |schema: Value| json!({"$ref": "#/$defs/a", "$defs": {"a": schema}});
        let to = json!({"$ref": "#/$defs/a"});
        for (schema, path) in [
            (node(again.clone()), ".properties.next"),
            (node(json!({"allOf": [{"description": "d"}, again]})), ".properties.next.allOf[1]"),
            (node(json!({"anyOf": [again, again]})), ".properties.next.anyOf[0]"),
            (node(json!({"oneOf": [again, node(again.clone())]})), ".properties.next.oneOf[0]"),
            (
                node(json!({"type": "array", "items": again, "minItems": 1})),
                ".properties.next.items",
            ),
            (
                node(json!({"type": "array", "prefixItems": [true, again], "minItems": 2})),
                ".properties.next.prefixItems[1]",
            ),
            (
                node(json!({"type": "array", "items": [again], "minItems": 1})),
                ".properties.next.items[0]",
            ),
            (defined(node(to.clone())), ".$defs.a.properties.next"),
            (defined(json!({"type": "array", "items": to, "minItems": 3})), ".$defs.a.items"),
            (
                json!({"type": "object", "required": ["x"], "additionalProperties": again}),
                ".additionalProperties",
            ),
            (
                json!({"type": "object", "minProperties": 1, "additionalProperties": again}),
                ".additionalProperties",
            ),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
                ".$defs.b",
            ),
        ] {
            let (found, reason) = pruned(&schema).expect_err(&schema.to_string());
            assert_eq!(found, path, "{schema}");
            assert!(reason.starts_with("no finite value"), "{reason}");
        }
    }

    #[test]
    fn what_nothing_fits_is_refused_with_the_place() {
        for (schema, path) in [
            (json!(false), ""),
            (node(json!(false)), ".properties.next"),
            (node(json!({"anyOf": []})), ".properties.next.anyOf"),
            (node(json!({"enum": []})), ".properties.next.enum"),
        ] {
            let expected = (path.to_owned(), "no value is valid here".to_owned());
            assert_eq!(pruned(&schema), Err(expected), "{schema}");
        }
    }

    #[test]
    fn a_way_out_is_enough() {
        let again = json!({"$ref": "#"});
        for schema in [
            json!(true),
            json!({}),
            node(json!({"anyOf": [again, {"type": "null"}]})),
            node(
                json!({"type": ["object", "null"], "required": ["x"], "properties": {"x": again}}),
            ),
            node(json!({"type": "array", "items": again})),
            node(json!({"enum": [1], "required": ["x"]})),
            node(json!({"$ref": "#/nowhere"})),
            json!({"type": "object", "properties": {"next": again}}),
            json!({"type": "object", "minProperties": 1, "properties": {"a": true}, "additionalProperties": again}),
        ] {
            assert_eq!(pruned(&schema), Ok(schema.clone()), "{schema}");
        }
    }

    #[test]
    fn what_can_not_end_is_not_begun() {
        for wrap in [
            (|inner| inner) as fn(Value) -> Value,
            |inner| json!({"anyOf": [{"type": "string"}, inner]}),
            |inner| json!({"type": "array", "items": inner}),
            |inner| json!({"type": "object", "properties": {"y": inner}}),
        ] {
            let schema =
                |part: Value, a: Value| json!({"properties": {"x": part}, "$defs": {"a": a}});
            let given = schema(wrap(endless_ref()), node(endless_ref()));
            assert_eq!(pruned(&given), Ok(schema(wrap(json!(false)), json!(false))), "{given}");
        }
    }

    fn endless_ref() -> Value {
        json!({"$ref": "#/$defs/a"})
    }

    /// Definitions that each refer to the next; the last refers to nothing or back to the first.
    #[test]
    fn long_chains_take_work_by_their_length() {
        let count = 5000;
        for last in [json!({"type": "null"}), json!({"$ref": "#/$defs/d0"})] {
            let mut definitions = Map::new();
            for at in 0..count {
                definitions
                    .insert(format!("d{at}"), json!({"$ref": format!("#/$defs/d{}", at + 1)}));
            }
            definitions.insert(format!("d{count}"), last);
            let mut schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
            let mut work = Work::default();
            assert_eq!(prune(&mut schema, &mut work), Ok(()));
            assert!(work.spent() < 64 * 64 * count, "{}", work.spent());
        }
    }
}
