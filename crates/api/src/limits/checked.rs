//! A deserializer wrapper that compares values with their bounds while they are read, and tracks
//! the path for errors.

use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};
use serde::forward_to_deserialize_any;

use super::walk::{LastValue, Step, Walk};
use super::{BIAS, Bound, DEPTH, Param, Params, SHOWN_BYTES};
use crate::inert::Inert;

/// The largest size in bytes of a key, in an object that maps keys to numbers.
const KEY_BYTES: usize = SHOWN_BYTES;
/// The bound of a token id. The size of the model's vocabulary is checked later.
const ID: Bound = Bound::Number { least: i32::MIN as f64, most: i32::MAX as f64 };
/// The newtype name by which serde_json requests a value as raw text.
const RAW_VALUE: &str = "$serde_json::private::RawValue";

/// A value's position in the body, and its bound.
pub(crate) struct Place<'w, 'b> {
    bound: Bound,
    /// The nesting depth within a [`Bound::Tree`].
    depth: usize,
    /// The number of leading path steps that an error about an exceeded limit names.
    named: usize,
    walk: &'w mut Walk<'b>,
}

impl<'w, 'b> Place<'w, 'b> {
    pub(crate) fn new(bound: Bound, walk: &'w mut Walk<'b>) -> Self {
        Self { bound, depth: 0, named: usize::MAX, walk }
    }

    /// Creates the position of a value inside this one.
    fn inside(&mut self, bound: Bound) -> Place<'_, 'b> {
        Place { bound, depth: 0, named: self.named, walk: &mut *self.walk }
    }

    fn fail<E: Error>(&mut self, reason: &str) -> E {
        self.walk.fail(self.named, reason)
    }

    fn keep<E: Error>(&mut self) -> Result<(), E> {
        self.walk.keep(self.named)
    }

    fn text<E: Error>(&mut self, bytes: usize) -> Result<(), E> {
        let weighed = matches!(
            self.bound,
            Bound::Embeds(_) | Bound::Image(_) | Bound::Images(..) | Bound::Url
        );
        if weighed {
            self.walk.weight.embeds += bytes;
        }
        let most = self.bound.text_bytes(self.depth);
        if bytes > most {
            return Err(self.fail(&format!("{bytes} bytes are more than {most}")));
        }
        self.walk.seen = LastValue::Text(bytes);
        Ok(())
    }

    /// Checks a number. Returns the largest permitted value if the number is above it and the bound
    /// reads such numbers as "everything"; otherwise `None`.
    fn number<E: Error>(&mut self, value: f64, shown: impl fmt::Display) -> Result<Option<i64>, E> {
        self.walk.seen = LastValue::Number;
        match self.bound {
            Bound::Number { least, most } if !(least..=most).contains(&value) => {
                Err(self.fail(&format!("{shown} is not {}", range(least, most))))
            }
            Bound::Amount { least, .. } if value.is_nan() || value < least => {
                Err(self.fail(&format!("{shown} is not {}", range(least, f64::INFINITY))))
            }
            Bound::Amount { most, .. } if value > most => Ok(Some(most as i64)),
            _ => Ok(None),
        }
    }

    fn is_tree(&self) -> bool {
        self.bound == Bound::Tree
    }

    fn check_depth<E: Error>(&mut self) -> Result<(), E> {
        if self.is_tree() && self.depth >= DEPTH {
            return Err(self.fail(&format!("nested deeper than {DEPTH}")));
        }
        Ok(())
    }
}

/// Describes a range in words.
fn range(least: f64, most: f64) -> String {
    let above = if least > 0.0 && least < 1e-9 {
        "above 0".to_owned()
    } else {
        format!("at least {least}")
    };
    if most >= f64::from(f32::MAX) { above } else { format!("{above} and at most {most}") }
}

impl Bound {
    /// The largest number of bytes of a string in a value with this bound.
    fn text_bytes(self, depth: usize) -> usize {
        match self {
            // The value must be an object or a list. A string here is only quoted in the error.
            Self::Tree if depth == 0 => SHOWN_BYTES,
            Self::Text(most) | Self::Form(most) => most,
            Self::Strings { each, total, .. } => each.min(total),
            Self::Prompt
            | Self::Prompts(_)
            | Self::Embeds(_)
            | Self::Image(_)
            | Self::Images(..)
            | Self::Url
            | Self::Content(_)
            | Self::Documents(..)
            | Self::Tree
            | Self::Ignored => usize::MAX,
            Self::Flag
            | Self::Number { .. }
            | Self::Amount { .. }
            | Self::Ids(_)
            | Self::Biases(_)
            | Self::Object(_)
            | Self::Objects(..)
            | Self::Messages(..) => SHOWN_BYTES,
        }
    }

    /// The largest number of entries of a list with this bound, and the bound of each.
    fn entries(self) -> (usize, Self) {
        match self {
            Self::Strings { count, each, .. } => (count, Self::Text(each)),
            Self::Ids(most) => (most, ID),
            Self::Prompts(most) => (most, Self::Prompt),
            Self::Embeds(0) => (usize::MAX, Self::Ignored),
            Self::Embeds(most) => (most, Self::Embeds(0)),
            Self::Prompt => (usize::MAX, ID),
            // This bound is for an element of the list. A nested list is left to the parser, which
            // rejects it.
            Self::Documents(0, _) => (usize::MAX, Self::Ignored),
            Self::Documents(most, params) => (most, Self::Documents(0, params)),
            Self::Objects(most, params) | Self::Messages(most, params) => {
                (most, Self::Object(params))
            }
            Self::Content(params) => (usize::MAX, Self::Object(params)),
            Self::Images(0, _) => (usize::MAX, Self::Ignored),
            Self::Images(lists, params) => (usize::MAX, Self::Images(lists - 1, params)),
            Self::Tree => (usize::MAX, Self::Tree),
            Self::Flag
            | Self::Number { .. }
            | Self::Amount { .. }
            | Self::Text(_)
            | Self::Biases(_)
            | Self::Object(_)
            | Self::Image(_)
            | Self::Url
            | Self::Form(_)
            | Self::Ignored => (usize::MAX, Self::Ignored),
        }
    }

    /// The parameters that an object with this bound may have.
    fn params(self) -> Option<Params> {
        match self {
            Self::Object(params)
            | Self::Image(params)
            | Self::Images(_, params)
            | Self::Objects(_, params)
            | Self::Documents(_, params) => Some(params),
            _ => None,
        }
    }
}

/// A deserializer that compares values with a bound.
pub(crate) struct BoundedDeserializer<'w, 'b, D> {
    inner: D,
    place: Place<'w, 'b>,
}

impl<'w, 'b, D> BoundedDeserializer<'w, 'b, D> {
    pub(crate) fn new(inner: D, place: Place<'w, 'b>) -> Self {
        Self { inner, place }
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for BoundedDeserializer<'_, '_, D> {
    type Error = D::Error;

    // serde_json would not pass a string to a visitor that expects a number, and its length would
    // remain unchecked. So every value is read with `deserialize_any`.
    fn deserialize_any<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, D::Error> {
        if self.place.is_tree() {
            self.place.keep()?;
        }
        self.inner.deserialize_any(BoundedVisitor { visitor, place: self.place })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_option(BoundedVisitor { visitor, place: self.place })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        if name == RAW_VALUE {
            return self.inner.deserialize_newtype_struct(name, visitor);
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_enum(name, variants, visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct map struct identifier
    }
}

/// A visitor that compares a value with a bound before it forwards the value.
struct BoundedVisitor<'w, 'b, V> {
    visitor: V,
    place: Place<'w, 'b>,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for BoundedVisitor<'_, '_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }
    fn visit_bool<E: Error>(self, value: bool) -> Result<V::Value, E> {
        self.visitor.visit_bool(value)
    }
    fn visit_i64<E: Error>(mut self, value: i64) -> Result<V::Value, E> {
        match self.place.number(value as f64, value)? {
            Some(most) => self.visitor.visit_i64(most),
            None => self.visitor.visit_i64(value),
        }
    }
    fn visit_u64<E: Error>(mut self, value: u64) -> Result<V::Value, E> {
        match self.place.number(value as f64, value)? {
            Some(most) => self.visitor.visit_i64(most),
            None => self.visitor.visit_u64(value),
        }
    }
    fn visit_f64<E: Error>(mut self, value: f64) -> Result<V::Value, E> {
        /// The largest double up to which every integer is representable.
        const WHOLE: f64 = 9_007_199_254_740_992.0;
        let most = self.place.number(value, value)?;
        // Some languages write integers with a decimal point. JSON values that are kept unparsed
        // stay unchanged.
        let is_whole = value.fract() == 0.0 && value.abs() <= WHOLE && !self.place.is_tree();
        match most.or(is_whole.then_some(value as i64)) {
            Some(whole) => self.visitor.visit_i64(whole),
            None => self.visitor.visit_f64(value),
        }
    }
    fn visit_str<E: Error>(mut self, text: &str) -> Result<V::Value, E> {
        self.place.text(text.len())?;
        self.visitor.visit_str(text)
    }
    fn visit_borrowed_str<E: Error>(mut self, text: &'de str) -> Result<V::Value, E> {
        self.place.text(text.len())?;
        self.visitor.visit_borrowed_str(text)
    }
    fn visit_string<E: Error>(mut self, text: String) -> Result<V::Value, E> {
        self.place.text(text.len())?;
        self.visitor.visit_string(text)
    }
    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_unit()
    }
    fn visit_none<E: Error>(mut self) -> Result<V::Value, E> {
        if self.place.is_tree() {
            self.place.keep()?;
        }
        self.visitor.visit_none()
    }
    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_some(BoundedDeserializer { inner, place: self.place })
    }
    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_enum(data)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, seq: A) -> Result<V::Value, A::Error> {
        self.place.check_depth()?;
        let (most, bound) = self.place.bound.entries();
        let total = match self.place.bound {
            Bound::Strings { total, .. } => total,
            _ => usize::MAX,
        };
        let place = self.place;
        let list = CheckedList { seq, place, most, bound, total, index: 0, counted: 0, bytes: 0 };
        self.visitor.visit_seq(list)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, map: A) -> Result<V::Value, A::Error> {
        self.place.check_depth()?;
        let place = self.place;
        self.visitor.visit_map(CheckedMap { map, place, key: Key::Passed, entries: 0 })
    }
}

/// The elements of a list, each checked against a bound.
struct CheckedList<'w, 'b, A> {
    seq: A,
    place: Place<'w, 'b>,
    /// The largest number of elements. `bound` is that of each element.
    most: usize,
    bound: Bound,
    /// The largest total number of bytes of the elements.
    total: usize,
    index: usize,
    counted: usize,
    bytes: usize,
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for CheckedList<'_, '_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        let depth = self.place.depth + 1;
        // Within a JSON tree, the error names only the parameter, not the path inside its value.
        let is_named = !self.place.is_tree();
        if is_named {
            self.place.walk.enter(Step::Index(self.index));
        }
        self.place.walk.seen = LastValue::Other;
        let place = Place { depth, ..self.place.inside(self.bound) };
        let found = self.seq.next_element_seed(CheckedSeed { seed, place })?;
        let seen = std::mem::take(&mut self.place.walk.seen);
        if is_named {
            self.place.walk.leave();
        }
        let Some(found) = found else { return Ok(None) };
        self.index += 1;
        // The ids of a single prompt do not count as prompts.
        let is_id = matches!((self.place.bound, seen), (Bound::Prompts(_), LastValue::Number));
        self.counted += usize::from(!is_id);
        if let LastValue::Text(length) = seen {
            self.bytes = self.bytes.saturating_add(length);
        }
        let (most, total) = (self.most, self.total);
        if self.counted > most {
            return Err(self.place.fail(&format!("more than {most} entries")));
        }
        if self.bytes > total {
            return Err(self.place.fail(&format!("more than {total} bytes in all")));
        }
        if matches!(self.place.bound, Bound::Messages(..) | Bound::Content(_) | Bound::Images(..)) {
            self.place.keep()?;
        }
        Ok(Some(found))
    }
}

/// The entries of an object, each checked against its bound.
struct CheckedMap<'w, 'b, A> {
    map: A,
    place: Place<'w, 'b>,
    /// The last key, whose value is read next.
    key: Key,
    entries: usize,
}

/// The kinds of keys in an object.
enum Key {
    Known(&'static Param),
    /// The name of a parameter that is not read.
    Unread(String),
    /// A key of an object that maps keys to numbers.
    Entry(String),
    /// Any other key.
    Passed,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for CheckedMap<'_, '_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        match self.place.bound {
            Bound::Biases(most) => {
                let mut name = String::new();
                let found = self.map.next_key_seed(NamedKey { inner: seed, name: &mut name })?;
                if found.is_some() {
                    let bytes = name.len();
                    if bytes > KEY_BYTES {
                        let reason = format!("{bytes} bytes are more than {KEY_BYTES}");
                        return Err(self.place.fail(&reason));
                    }
                    self.entries += 1;
                    if self.entries > most {
                        return Err(self.place.fail(&format!("more than {most} entries")));
                    }
                    self.key = Key::Entry(name);
                }
                Ok(found)
            }
            bound => {
                let Some(params) = bound.params() else { return self.map.next_key_seed(seed) };
                let mut name = String::new();
                let found = self.map.next_key_seed(NamedKey { inner: seed, name: &mut name })?;
                let mut all = params.iter().flat_map(|group| group.iter());
                self.key =
                    all.find(|param| param.name == name).map_or(Key::Unread(name), Key::Known);
                Ok(found)
            }
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let (step, bound) = match std::mem::replace(&mut self.key, Key::Passed) {
            Key::Known(param) => (Step::Name(param.name), param.bound),
            Key::Unread(name) => {
                if self.map.next_value::<Inert>()?.asks() {
                    self.place.walk.note_unread(&name);
                }
                // The value is not read.
                return seed.deserialize(().into_deserializer());
            }
            Key::Entry(key) => (Step::Key(key), Bound::Number { least: -BIAS, most: BIAS }),
            Key::Passed if self.place.is_tree() => {
                let depth = self.place.depth + 1;
                let place = Place { depth, ..self.place.inside(Bound::Tree) };
                return self.map.next_value_seed(CheckedSeed { seed, place });
            }
            Key::Passed => {
                let place = self.place.inside(Bound::Ignored);
                return self.map.next_value_seed(CheckedSeed { seed, place });
            }
        };
        let named = match step {
            // An error about a bias names the whole object, not the key.
            Step::Key(_) => self.place.walk.steps(),
            _ => self.place.named,
        };
        self.place.walk.enter(step);
        let place = Place { named, ..self.place.inside(bound) };
        let value = self.map.next_value_seed(CheckedSeed { seed, place })?;
        self.place.walk.leave();
        self.place.walk.seen = LastValue::Other;
        Ok(value)
    }
}

struct CheckedSeed<'w, 'b, S> {
    seed: S,
    place: Place<'w, 'b>,
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for CheckedSeed<'_, '_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        self.seed.deserialize(BoundedDeserializer { inner, place: self.place })
    }
}

/// Wraps a key's seed, deserializer or visitor, and captures the key's name.
struct NamedKey<'n, T> {
    inner: T,
    name: &'n mut String,
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for NamedKey<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(NamedKey { inner, name: self.name })
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for NamedKey<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(NamedKey { inner: visitor, name: self.name })
    }
    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for NamedKey<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }
    fn visit_str<E: Error>(self, name: &str) -> Result<V::Value, E> {
        self.name.push_str(name);
        self.inner.visit_str(name)
    }
}

/// Returns the length in bytes of a JSON string after unescaping; `None` for any other value.
pub(crate) fn string_bytes(json: &str) -> Option<usize> {
    let inner = json.strip_prefix('"')?.strip_suffix('"')?;
    if !inner.contains('\\') {
        return Some(inner.len());
    }
    serde_json::from_str::<String>(json).ok().map(|text| text.len())
}
