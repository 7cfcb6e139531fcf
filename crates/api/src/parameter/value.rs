//! Moves a value from a body to its target field.

use std::fmt;

use serde::de::{DeserializeOwned, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::object::read_object;
use super::schema::ParameterType;
use super::{Kind, TabledRequest};
use crate::error::ApiError;
use crate::limits::{Bound, BoundedDeserializer, Place, Step, Walk, string_bytes};

/// A parameter that is given once, or once per prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OneOrMany<T> {
    /// A single object.
    One(T),
    /// A list of objects.
    Many(Vec<T>),
}

/// A value that a line moves to its target.
pub(crate) struct Value<'v, 'de>(Source<'v, 'de>);

enum Source<'v, 'de> {
    /// A value of a body.
    Body { raw: &'de RawValue, bound: Bound, walk: &'v mut Walk<'de> },
    /// No value: the target stores its type here, for the documentation.
    Documentation(&'v mut Option<ParameterType>),
}

impl<'v, 'de> Value<'v, 'de> {
    pub(super) fn read(raw: &'de RawValue, bound: Bound, walk: &'v mut Walk<'de>) -> Self {
        Self(Source::Body { raw, bound, walk })
    }

    pub(super) fn describe(described: &'v mut Option<ParameterType>) -> Self {
        Self(Source::Documentation(described))
    }

    /// Reads the value into `place`, the target field.
    pub(crate) fn put<T: DeserializeOwned + Kind>(self, place: &mut T) -> Result<(), ApiError> {
        match self.0 {
            Source::Body { raw, bound, walk } => {
                *place = read(raw, bound, walk)?;
            }
            Source::Documentation(described) => *described = Some(ParameterType::new::<T>()),
        }
        Ok(())
    }

    /// Checks the type of the value and discards the value.
    pub(crate) fn skip<T: DeserializeOwned + Kind + Default>(self) -> Result<(), ApiError> {
        self.put(&mut T::default())
    }

    /// Reads an object into `place`, by the table of its type.
    pub(crate) fn object<T: TabledRequest>(self, place: &mut T) -> Result<(), ApiError> {
        match self.0 {
            Source::Body { raw, walk, .. } => *place = read_object(raw.get(), walk)?,
            Source::Documentation(described) => {
                *described = Some(ParameterType::object::<T>(false));
            }
        }
        Ok(())
    }

    /// Reads an object, or a list of objects, into `place`.
    pub(crate) fn objects<T: TabledRequest>(
        self,
        place: &mut Option<OneOrMany<T>>,
    ) -> Result<(), ApiError> {
        let (raw, bound, walk) = match self.0 {
            Source::Body { raw, bound, walk } => (raw.get(), bound, walk),
            Source::Documentation(described) => {
                *described = Some(ParameterType::object::<T>(true));
                return Ok(());
            }
        };
        *place = match raw.as_bytes().first() {
            Some(b'n') => None,
            Some(b'{') => Some(OneOrMany::One(read_object(raw, walk)?)),
            _ => {
                let mut deserializer = serde_json::Deserializer::from_str(raw);
                let checked = BoundedDeserializer::new(&mut deserializer, Place::new(bound, walk));
                let list = serde::Deserializer::deserialize_any(checked, ListVisitor);
                let list = list.map_err(|error| walk.explain(&error, raw))?;
                let mut many = Vec::with_capacity(list.len());
                for (index, raw) in list.into_iter().enumerate() {
                    walk.enter(Step::Index(index));
                    many.push(read_object(raw.get(), walk)?);
                    walk.leave();
                }
                Some(OneOrMany::Many(many))
            }
        };
        Ok(())
    }
}

fn read<'de, T: DeserializeOwned>(
    raw: &'de RawValue,
    bound: Bound,
    walk: &mut Walk<'de>,
) -> Result<T, ApiError> {
    let text = raw.get();
    // The visitor of an enum would not check the length of a word.
    if let (Bound::Text(most), Some(bytes)) = (bound, string_bytes(text))
        && bytes > most
    {
        return Err(walk.invalid(&format!("{bytes} bytes are more than {most}")));
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    T::deserialize(BoundedDeserializer::new(&mut deserializer, Place::new(bound, walk)))
        .map_err(|error| walk.explain(&error, text))
}

/// A visitor that returns the text of each element of a list.
struct ListVisitor;

impl<'de> Visitor<'de> for ListVisitor {
    type Value = Vec<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a list of objects")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = seq.next_element()? {
            entries.push(entry);
        }
        Ok(entries)
    }
}
