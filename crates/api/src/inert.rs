//! Parameters that are known but not served. Empty values are harmless, and others are refused.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::ApiError;

/// An unsupported parameter: true if its value demands something.
///
/// Clients send `null`, `false`, `""`, `[]` and `{}` for parameters that they do not use. These
/// demand nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inert(bool);

impl Inert {
    /// True if the value demands something.
    pub fn asks(self) -> bool {
        self.0
    }

    /// Refuses the parameter if it demands something.
    pub fn refuse(self, param: &str) -> Result<(), ApiError> {
        if self.0 { Err(ApiError::unsupported(param)) } else { Ok(()) }
    }
}

/// A parameter like `tool_choice`: `auto` and `none` demand nothing either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Choice(bool);

impl Choice {
    /// Refuses the parameter if it demands something.
    pub fn refuse(self, param: &str) -> Result<(), ApiError> {
        Inert(self.0).refuse(param)
    }
}

impl<'de> Deserialize<'de> for Inert {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Asks { nothing: str::is_empty }).map(Self)
    }
}

impl<'de> Deserialize<'de> for Choice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let nothing = |text: &str| matches!(text, "auto" | "none");
        deserializer.deserialize_any(Asks { nothing }).map(Self)
    }
}

/// Tells whether a value asks for something, and keeps nothing of it.
struct Asks {
    /// The test of a string: true if it asks for nothing.
    nothing: fn(&str) -> bool,
}

impl<'de> Visitor<'de> for Asks {
    type Value = bool;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any value")
    }
    fn visit_bool<E>(self, value: bool) -> Result<bool, E> {
        Ok(value)
    }
    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(true)
    }
    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(true)
    }
    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(true)
    }
    fn visit_str<E>(self, value: &str) -> Result<bool, E> {
        Ok(!(self.nothing)(value))
    }
    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let mut given = false;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            given = true;
        }
        Ok(given)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut given = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            given = true;
        }
        Ok(given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_values_ask_for_nothing() {
        for json in ["null", "false", "\"\"", "[]", "{}"] {
            assert_eq!(serde_json::from_str::<Inert>(json).unwrap(), Inert(false), "{json}");
        }
        for json in ["true", "1", "-1", "0.5", "\"a\"", "[null]", "{\"a\":null}"] {
            let inert = serde_json::from_str::<Inert>(json).unwrap();
            assert_eq!(inert, Inert(true), "{json}");
            assert_eq!(inert.refuse("tools"), Err(ApiError::unsupported("tools")));
        }
    }
}
