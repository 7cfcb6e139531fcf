//! Fields that hold either a string or a list of parts.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
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

/// A field whose type depends on the kind of its object. In objects of kinds that are skipped, a
/// field may have any type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Loose<T> {
    /// A value of the expected type.
    Known(T),
    /// A string where another type is expected.
    Text(String),
    /// A value of any other type.
    Other,
}

impl<T> Loose<T> {
    /// Returns the value if it has the expected type.
    pub(crate) fn known(self) -> Option<T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Text(_) | Self::Other => None,
        }
    }

    /// Returns the value if it has the expected type.
    pub(crate) fn as_known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Text(_) | Self::Other => None,
        }
    }
}

impl<T: Serialize> Serialize for Loose<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Known(value) => value.serialize(serializer),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Other => serializer.serialize_unit(),
        }
    }
}

/// The JSON types that [`Loose::Known`] accepts.
pub(crate) trait KnownShapes {
    /// True for an object, false for a string or a list.
    const IS_OBJECT: bool;
    /// Builds the value from a string.
    fn from_text(text: String) -> Result<Self, String>
    where
        Self: Sized;
}

impl<T> KnownShapes for TextOr<T> {
    const IS_OBJECT: bool = false;
    fn from_text(text: String) -> Result<Self, String> {
        Ok(Self::Text(text))
    }
}

impl<T> KnownShapes for Vec<T> {
    const IS_OBJECT: bool = false;
    fn from_text(text: String) -> Result<Self, String> {
        Err(text)
    }
}

impl<'de, T: Deserialize<'de> + KnownShapes> Deserialize<'de> for Loose<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LooseVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + KnownShapes> Visitor<'de> for LooseVisitor<T> {
            type Value = Loose<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Loose<T>, E> {
                self.visit_string(text.to_owned())
            }
            fn visit_string<E>(self, text: String) -> Result<Loose<T>, E> {
                Ok(T::from_text(text).map_or_else(Loose::Text, Loose::Known))
            }
            fn visit_bool<E>(self, _: bool) -> Result<Loose<T>, E> {
                Ok(Loose::Other)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Loose<T>, E> {
                Ok(Loose::Other)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Loose<T>, E> {
                Ok(Loose::Other)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Loose<T>, E> {
                Ok(Loose::Other)
            }
            fn visit_unit<E>(self) -> Result<Loose<T>, E> {
                Ok(Loose::Other)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Loose<T>, A::Error> {
                if !T::IS_OBJECT {
                    return T::deserialize(SeqAccessDeserializer::new(seq)).map(Loose::Known);
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Loose::Other)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Loose<T>, A::Error> {
                if T::IS_OBJECT {
                    return T::deserialize(MapAccessDeserializer::new(map)).map(Loose::Known);
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Loose::Other)
            }
        }
        deserializer.deserialize_any(LooseVisitor(PhantomData))
    }
}
