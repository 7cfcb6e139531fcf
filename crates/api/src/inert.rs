//! Detects parameter values that have no effect.
//!
//! Clients send `null`, `false`, `""`, `[]` and `{}` for parameters that they do not use.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Parameters that this server ignores. On the servers that read them their default is true, so
/// `false` would have an effect.
const TRUE_BY_DEFAULT: [&str; 14] = [
    "activation",
    "detokenize",
    "embd_normalize",
    "log_metrics",
    "normalize",
    "normalized",
    "parse_special",
    "parse_tool_calls",
    "penalize_newline",
    "penalize_nl",
    "stream_reasoning",
    "truncate",
    "use_activation",
    "use_mmap",
];

/// True if a value switches off an ignored parameter that is on by default.
pub(crate) fn switches_off(name: &str, value: &RawValue) -> bool {
    value.get() == "false" && TRUE_BY_DEFAULT.contains(&name)
}

/// Whether a value would have an effect. The value itself is not kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Inert(bool);

impl Inert {
    /// True if the value would have an effect.
    pub(crate) fn asks(self) -> bool {
        self.0
    }
}

/// True if a value would have an effect. If `words` is not empty, these are the only strings
/// without an effect.
pub(crate) fn asks(value: &RawValue, words: &[&str]) -> bool {
    let mut deserializer = serde_json::Deserializer::from_str(value.get());
    // A number out of range counts as having an effect.
    deserializer.deserialize_any(Asks { words }).unwrap_or(true)
}

impl<'de> Deserialize<'de> for Inert {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Asks { words: &[] }).map(Self)
    }
}

/// A visitor that checks whether a value would have an effect, and stores nothing.
struct Asks<'a> {
    /// The strings without an effect. If the list is empty, only the empty string has none.
    words: &'a [&'a str],
}

impl<'de> Visitor<'de> for Asks<'_> {
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
        Ok(if self.words.is_empty() { !value.is_empty() } else { !self.words.contains(&value) })
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
        let asks = |json: &str, words: &[&str]| {
            asks(&serde_json::from_str::<Box<RawValue>>(json).expect("JSON"), words)
        };
        for json in ["null", "false", "\"\"", "[]", "{}", "[ ]"] {
            assert_eq!(serde_json::from_str::<Inert>(json).unwrap(), Inert(false), "{json}");
            assert!(!asks(json, &[]), "{json}");
        }
        for json in ["true", "1", "-1", "0.5", "1e999", "\"a\"", "[null]", "{\"a\":null}"] {
            assert!(asks(json, &[]), "{json}");
        }
        assert!(!asks("\"auto\"", &["auto"]) && asks("\"\"", &["auto"]));
    }
}
