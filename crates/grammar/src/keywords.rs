//! The schema keywords that are supported in call notations other than JSON.

use crate::kinds::NUMERIC;

/// Keywords that do not restrict a value.
const SILENT: [&str; 15] = [
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "nullable",
];
/// Keywords that are enforced, besides those of strings and numbers.
const KEPT: [&str; 12] = [
    "$ref",
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
];
const KEPT_TOO: [&str; 5] = ["maxItems", "pattern", "minLength", "maxLength", "format"];

/// True if the keyword is enforced or has no effect in such a notation.
pub(crate) fn known(key: &str) -> bool {
    let lists = [&SILENT[..], &KEPT[..], &KEPT_TOO[..], &NUMERIC[..]];
    lists.iter().any(|list| list.contains(&key))
}
