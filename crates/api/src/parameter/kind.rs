//! The types of parameters, as they are documented.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use crate::content::TextOr;
use crate::embeds::PromptEmbeds;
use crate::images::ImageData;
use crate::prompt::{Prompts, Strings};
use crate::structure::Raw;

/// The named schemas of types.
pub(crate) type Components = Vec<(String, RefOr<Schema>)>;

/// The type of a parameter.
pub(crate) trait Kind {
    /// True if the parameter may be absent.
    const IS_OPTIONAL: bool = false;

    /// Returns the JSON schema of the type.
    fn schema() -> Value;

    /// Adds the schemas of the types that this schema refers to.
    fn add_components(_all: &mut Components) {}
}

impl<T: Kind> Kind for Option<T> {
    const IS_OPTIONAL: bool = true;

    fn schema() -> Value {
        let mut schema = T::schema();
        match schema.get_mut("type") {
            Some(kind) => {
                *kind = json!([kind, "null"]);
                schema
            }
            None => json!({"oneOf": [schema, {"type": "null"}]}),
        }
    }

    fn add_components(all: &mut Components) {
        T::add_components(all);
    }
}

impl<T: Kind> Kind for Vec<T> {
    fn schema() -> Value {
        json!({"type": "array", "items": T::schema()})
    }

    fn add_components(all: &mut Components) {
        T::add_components(all);
    }
}

impl<T> Kind for TextOr<T> {
    fn schema() -> Value {
        json!({"type": "string"})
    }
}

macro_rules! kinds {
    ($($kind:ty: $schema:tt;)*) => {$(
        impl Kind for $kind {
            fn schema() -> Value {
                json!($schema)
            }
        }
    )*};
}

kinds! {
    bool: {"type": "boolean"};
    f32: {"type": "number", "format": "float"};
    i32: {"type": "integer", "format": "int32"};
    u32: {"type": "integer", "format": "int32", "minimum": 0};
    i64: {"type": "integer", "format": "int64"};
    i128: {"type": "integer", "format": "int64"};
    usize: {"type": "integer", "minimum": 0};
    String: {"type": "string"};
    Strings: {"type": "array", "items": {"type": "string"}};
    PromptEmbeds: {"type": ["array", "null"], "items": {"type": "string"}};
    ImageData: {"type": "array", "items": {"type": "string"}};
    HashMap<String, f32>: {
        "type": "object",
        "additionalProperties": {"type": "number", "format": "float"},
        "propertyNames": {"type": "string"},
    };
    Prompts: {"type": "object"};
    Raw: {"type": "object"};
    Value: {"type": "object"};
    Map<String, Value>: {"type": "object"};
}

/// Registers types with a named schema as parameter types.
macro_rules! component {
    ($($kind:ty),* $(,)?) => {$(
        impl $crate::parameter::Kind for $kind {
            fn schema() -> serde_json::Value {
                let name = <$kind as utoipa::ToSchema>::name();
                serde_json::json!({"$ref": format!("#/components/schemas/{name}")})
            }

            fn add_components(all: &mut $crate::parameter::Components) {
                let name = <$kind as utoipa::ToSchema>::name().into_owned();
                all.push((name, <$kind as utoipa::PartialSchema>::schema()));
                <$kind as utoipa::ToSchema>::schemas(all);
            }
        }
    )*};
}
pub(crate) use component;

/// Registers types without a named schema as parameter types.
macro_rules! opaque {
    ($($kind:ty),* $(,)?) => {$(
        impl $crate::parameter::Kind for $kind {
            fn schema() -> serde_json::Value {
                serde_json::json!({"type": "object"})
            }
        }
    )*};
}
pub(crate) use opaque;
