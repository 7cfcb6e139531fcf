//! Contents that are a text or a list of parts.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

/// A string, or a list of parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextOr<T> {
    /// A string.
    Text(String),
    /// A list of parts.
    List(Vec<T>),
}

impl<T: Serialize> Serialize for TextOr<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(parts) => parts.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrVisitor<T> {
            type Value = TextOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of content parts")
            }
            fn visit_str<E>(self, text: &str) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text.to_owned()))
            }
            fn visit_string<E>(self, text: String) -> Result<TextOr<T>, E> {
                Ok(TextOr::Text(text))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TextOr<T>, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(TextOr::List(parts))
            }
        }
        deserializer.deserialize_any(TextOrVisitor(PhantomData))
    }
}
