//! Generates the schema of a request type from its table.

use serde_json::{Map, Value as Json, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::kind::Components;
use super::{Kind, Line, TabledRequest, Target, Value};

/// The documented type of a parameter's target field.
pub(super) struct ParameterType {
    schema: Json,
    is_optional: bool,
    add_components: fn(&mut Components),
}

impl ParameterType {
    pub(super) fn new<T: Kind>() -> Self {
        let add_components = T::add_components;
        Self { schema: T::schema(), is_optional: T::IS_OPTIONAL, add_components }
    }

    /// The type of a nested object whose parameters are in a table.
    pub(super) fn object<T: TabledRequest>(is_optional: bool) -> Self {
        let reference = json!({"$ref": format!("#/components/schemas/{}", T::NAME)});
        let schema =
            if is_optional { json!({"oneOf": [reference, {"type": "null"}]}) } else { reference };
        let add_components: fn(&mut Components) = |all| {
            all.push((T::NAME.to_owned(), object_schema::<T>()));
            add_components::<T>(all);
        };
        Self { schema, is_optional: true, add_components }
    }
}

fn lines<R: TabledRequest>() -> impl Iterator<Item = &'static Line<R>> {
    R::LINES.iter().flat_map(|group| group.iter()).filter(|line| !line.is_hidden)
}

fn described<R: TabledRequest>(line: &Line<R>) -> Option<ParameterType> {
    let mut found = None;
    let mut request = R::default();
    let value = Value::describe(&mut found);
    let put = match line.target {
        Target::Own(put) => put(&mut request, value),
        Target::Generation { of, put } => put(of(&mut request), value),
        Target::Refused(_) | Target::Skipped => return None,
    };
    // A line that is read for its documentation never fails.
    put.ok()?;
    let shown = line.shown.and_then(|schema| serde_json::from_str(schema).ok());
    found.map(|found| ParameterType { schema: shown.unwrap_or(found.schema), ..found })
}

/// Returns the JSON schema of a request type.
pub(crate) fn object_schema<R: TabledRequest>() -> RefOr<Schema> {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for line in lines::<R>() {
        let Some(ParameterType { mut schema, is_optional, .. }) = described(line) else { continue };
        if !line.description.is_empty() {
            // Inside `oneOf`, a description has to be next to the `$ref`.
            let is_one_of = schema.get("oneOf").is_some();
            let place = if is_one_of { &mut schema["oneOf"][0] } else { &mut schema };
            place["description"] = json!(line.description);
        }
        if line.is_required {
            required.push(line.param.name);
        }
        debug_assert!(!line.is_required || !is_optional, "{}", line.param.name);
        properties.insert(line.param.name.to_owned(), schema);
    }
    let mut schema = json!({"type": "object", "properties": properties});
    if !R::DESCRIPTION.is_empty() {
        schema["description"] = json!(R::DESCRIPTION);
    }
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    serde_json::from_value(schema).unwrap_or_else(|_| RefOr::T(Schema::default()))
}

/// Adds the schemas of the types that a request type refers to.
pub(crate) fn add_components<R: TabledRequest>(all: &mut Components) {
    for line in lines::<R>() {
        if let Some(described) = described(line) {
            (described.add_components)(all);
        }
    }
}
