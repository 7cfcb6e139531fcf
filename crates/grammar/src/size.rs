//! Checks the number of values in a JSON text before it is parsed.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::GrammarError;
use crate::source::{SCHEMA_DEPTH, SCHEMA_VALUES};

/// Rejects a text that is not a JSON object or boolean, or that has too many values.
pub(crate) fn check(text: &str, what: &str) -> Result<(), GrammarError> {
    if !text.trim_start().starts_with(['{', 't', 'f']) {
        return Err(GrammarError::invalid(format!("{what} is an object")));
    }
    let mut values = 0;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let counted = Count { values: &mut values, depth: 0 }.deserialize(&mut deserializer);
    match counted.and_then(|()| deserializer.end()) {
        _ if values > SCHEMA_VALUES => {
            Err(GrammarError::invalid(format!("more than {SCHEMA_VALUES} values")))
        }
        Ok(()) => Ok(()),
        Err(error) => Err(GrammarError::invalid(format!("{what} is not JSON: {error}"))),
    }
}

/// Counts the values of a JSON tree.
struct Count<'a> {
    values: &'a mut usize,
    depth: usize,
}

impl<'a> Count<'a> {
    fn below(&mut self) -> Count<'_> {
        Count { values: self.values, depth: self.depth + 1 }
    }
}

impl<'de> DeserializeSeed<'de> for Count<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        *self.values += 1;
        if *self.values > SCHEMA_VALUES {
            return Err(D::Error::custom("too many values"));
        }
        // A later check reports values that are nested too deeply, with their path. So this count
        // follows values to twice the allowed depth.
        if self.depth > 2 * SCHEMA_DEPTH {
            return deserializer.deserialize_ignored_any(IgnoredAny).map(drop);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Count<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(self.below())?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while map.next_key::<IgnoredAny>()?.is_some() {
            map.next_value_seed(self.below())?;
        }
        Ok(())
    }
}
