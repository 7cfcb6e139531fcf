//! Reads an object by the table of its type.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{Line, TabledRequest, Target, Value};
use crate::error::ApiError;
use crate::inert::{asks, switches_off};
use crate::limits::{SHOWN_BYTES, Step, Walk};

/// Reads the body of a request.
pub(crate) fn read_body<R: TabledRequest>(walk: &mut Walk<'_>) -> Result<R, ApiError> {
    let body = walk.body();
    let mut deserializer = serde_json::Deserializer::from_str(body);
    let read = deserializer.deserialize_any(ObjectVisitor { walk: &mut *walk, read: PhantomData });
    let read = read.map_err(|error| walk.explain(&error, body))?;
    deserializer.end().map_err(|error| walk.explain(&error, body))?;
    Ok(read)
}

/// Reads an object that is a parameter of the body, from its text.
pub(crate) fn read_object<'de, R: TabledRequest>(
    text: &'de str,
    walk: &mut Walk<'de>,
) -> Result<R, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let read = deserializer.deserialize_any(ObjectVisitor { walk: &mut *walk, read: PhantomData });
    read.map_err(|error| walk.explain(&error, text))
}

struct ObjectVisitor<'w, 'de, R> {
    walk: &'w mut Walk<'de>,
    read: PhantomData<R>,
}

impl<'de, R: TabledRequest> Visitor<'de> for ObjectVisitor<'_, 'de, R> {
    type Value = R;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "struct {}", R::NAME)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<R, E> {
        let bytes = text.len();
        if bytes > SHOWN_BYTES {
            return Err(E::custom(format_args!("{bytes} bytes are more than {SHOWN_BYTES}")));
        }
        Err(E::invalid_type(serde::de::Unexpected::Str(text), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<R, A::Error> {
        // The list is read to its end, so that invalid JSON is reported first.
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Err(A::Error::invalid_type(serde::de::Unexpected::Seq, &self))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<R, A::Error> {
        let mut read = R::default();
        let mut given = vec![false; R::LINES.iter().map(|group| group.len()).sum()];
        while let Some(key) = map.next_key_seed(KeySeed(PhantomData::<R>))? {
            let raw: &'de RawValue = map.next_value()?;
            match key {
                // `null` counts as absent: clients in some languages write absent fields as `null`.
                Key::Known(..) if raw.get() == "null" => {}
                Key::Known(number, name, line) => {
                    if std::mem::replace(&mut given[number], true) {
                        return Err(A::Error::duplicate_field(line.param.name));
                    }
                    if let Err(error) = move_value((name, line), raw, &mut read, self.walk) {
                        return Err(self.walk.end(error));
                    }
                }
                Key::Unread(name) => {
                    if asks(raw, &[]) || switches_off(&name, raw) {
                        self.walk.note_unread(&name);
                    }
                }
            }
        }
        let lines = R::LINES.iter().flat_map(|group| group.iter());
        match lines.zip(given).find(|(line, given)| line.is_required && !given) {
            Some((line, _)) => Err(A::Error::missing_field(line.param.name)),
            None => Ok(read),
        }
    }
}

/// Moves the value of a parameter to its target.
fn move_value<'de, R: TabledRequest>(
    (name, line): (&'static str, &Line<R>),
    raw: &'de RawValue,
    read: &mut R,
    walk: &mut Walk<'de>,
) -> Result<(), ApiError> {
    walk.enter(Step::Name(name));
    match line.target {
        Target::Own(put) => put(read, Value::read(raw, line.param.bound, walk))?,
        Target::Generation { of, put } => {
            put(of(read), Value::read(raw, line.param.bound, walk))?;
        }
        Target::Refused(words) if asks(raw, words) => return Err(walk.unsupported()),
        Target::Refused(_) | Target::Skipped => {}
    }
    walk.leave();
    Ok(())
}

/// The kinds of keys in an object.
enum Key<R: 'static> {
    /// A line of the table: its index, and the parameter name as the client wrote it.
    Known(usize, &'static str, &'static Line<R>),
    /// The name of a parameter that is not read.
    Unread(String),
}

struct KeySeed<R>(PhantomData<R>);

impl<'de, R: TabledRequest> DeserializeSeed<'de> for KeySeed<R> {
    type Value = Key<R>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key<R>, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl<R: TabledRequest> Visitor<'_> for KeySeed<R> {
    type Value = Key<R>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a parameter")
    }

    fn visit_str<E>(self, name: &str) -> Result<Key<R>, E> {
        let mut lines = R::LINES.iter().flat_map(|group| group.iter()).enumerate();
        let found = lines.find_map(|(number, line)| Some((number, line.named(name)?, line)));
        let unread = || Key::Unread(name.to_owned());
        Ok(found.map_or_else(unread, |(number, name, line)| Key::Known(number, name, line)))
    }
}
