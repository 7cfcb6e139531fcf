//! Parameters that are known but not served: harmless when empty, refused otherwise.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::ApiError;

/// Whether a parameter that is not served was given a value that asks for something.
///
/// Clients send `null`, `false`, `""`, `[]` and `{}` for parameters that they do not use; those are no request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inert(bool);

impl Inert {
    /// Refuses the parameter if it asks for something.
    pub fn refuse(self, param: &str) -> Result<(), ApiError> {
        if self.0 { Err(ApiError::unsupported(param)) } else { Ok(()) }
    }
}

impl<'de> Deserialize<'de> for Inert {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Inert;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any value")
            }
            fn visit_bool<E>(self, value: bool) -> Result<Inert, E> {
                Ok(Inert(value))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Inert, E> {
                Ok(Inert(true))
            }
            fn visit_u64<E>(self, _: u64) -> Result<Inert, E> {
                Ok(Inert(true))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Inert, E> {
                Ok(Inert(true))
            }
            fn visit_str<E>(self, value: &str) -> Result<Inert, E> {
                Ok(Inert(!value.is_empty()))
            }
            fn visit_unit<E>(self) -> Result<Inert, E> {
                Ok(Inert(false))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Inert, A::Error> {
                let mut given = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    given = true;
                }
                Ok(Inert(given))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Inert, A::Error> {
                let mut given = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    given = true;
                }
                Ok(Inert(given))
            }
        }
        deserializer.deserialize_any(Any)
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
