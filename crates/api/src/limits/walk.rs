//! A walk over a body along the table. It allocates nothing except names of unread parameters.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Bound, DEPTH, INERT, Param, Params, SHOWN_BYTES, UNREAD, VALUES, cut};
use crate::error::ApiError;
use crate::inert::Inert;

/// The results of a walk through a body.
const KEY_BYTES: usize = SHOWN_BYTES;

/// The findings of a walk through a body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weight {
    /// JSON values that are kept as such, at most [`VALUES`].
    pub values: usize,
    /// Bytes of embeddings and images.
    pub embeds: usize,
}

/// Checks a body against `params`. Gives its weight, and the names of unread parameters. Text that
/// is not JSON is left to the parser. Everything before it is within its limits.
///
/// # Errors
/// A parameter is over its limit; [`ApiError::Invalid`] names the first.
pub(crate) fn check(body: &str, params: Params) -> Result<(Weight, Vec<String>), ApiError> {
    let mut walk = Walk::default();
    let mut deserializer = serde_json::Deserializer::from_str(body);
    let walked = At { bound: Bound::Object(params), depth: 0, walk: &mut walk };
    match (walked.deserialize(&mut deserializer), walk.failure) {
        (Err(_), Some(Failure { path, reason })) => {
            let param = path.into_iter().rev().fold(String::new(), |mut param, step| {
                match step {
                    Step::Name(name) if param.is_empty() => param.push_str(name),
                    Step::Name(name) => param.extend([".", name]),
                    Step::Index(index) => param.push_str(&format!("[{index}]")),
                }
                param
            });
            let param = if param.is_empty() { "body".to_owned() } else { param };
            Err(ApiError::Invalid { reason: format!("`{param}`: {reason}"), param })
        }
        _ => Ok((walk.weight, walk.unread)),
    }
}

#[derive(Default)]
struct Walk {
    weight: Weight,
    /// Names of parameters that nothing reads, at most [`UNREAD`].
    unread: Vec<String>,
    /// The object that is being walked, where it is not the body.
    within: Vec<&'static str>,
    failure: Option<Failure>,
}

struct Failure {
    /// The steps of the path, from the inside out.
    path: Vec<Step>,
    reason: String,
}

enum Step {
    Name(&'static str),
    Index(usize),
}

impl Walk {
    fn fail<E: Error>(&mut self, reason: String) -> E {
        self.failure = Some(Failure { path: Vec::new(), reason });
        E::custom("over a limit")
    }

    /// Notes a name that nothing reads and whose value asks for something.
    fn note_unread(&mut self, name: &str) {
        let Self { unread, within, .. } = self;
        if unread.len() >= UNREAD || within.is_empty() && INERT.contains(&name) {
            return;
        }
        let mut path = within.join(".");
        if !path.is_empty() {
            path.push('.');
        }
        path.push_str(&cut(name, SHOWN_BYTES));
        if !unread.contains(&path) {
            unread.push(path);
        }
    }

    /// Notes where a failure has come from.
    fn on_way<T, E>(&mut self, result: Result<T, E>, step: Step) -> Result<T, E> {
        if let (Err(_), Some(failure)) = (&result, &mut self.failure) {
            failure.path.push(step);
        }
        result
    }

    fn keep<E: Error>(&mut self) -> Result<(), E> {
        self.weight.values += 1;
        if self.weight.values <= VALUES {
            return Ok(());
        }
        Err(self.fail(format!(
            "messages, content parts, `tools`, `tool_calls` and `chat_template_kwargs` have at most {VALUES} values together"
        )))
    }
}

/// The findings.
enum Seen {
    /// A string of so many bytes.
    Text(usize),
    Number,
    Other,
}

/// A place in a body.
struct At<'w> {
    bound: Bound,
    /// Within a tree.
    depth: usize,
    walk: &'w mut Walk,
}

impl<'de> DeserializeSeed<'de> for At<'_> {
    type Value = Seen;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Seen, D::Error> {
        if self.bound == Bound::Ignored {
            deserializer.deserialize_ignored_any(IgnoredAny)?;
            return Ok(Seen::Other);
        }
        if self.bound == Bound::Tree {
            self.walk.keep()?;
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for At<'_> {
    type Value = Seen;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Seen, E> {
        Ok(Seen::Other)
    }

    fn visit_unit<E>(self) -> Result<Seen, E> {
        Ok(Seen::Other)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Seen, E> {
        self.number(value as f64, value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Seen, E> {
        self.number(value as f64, value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Seen, E> {
        self.number(value, value)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Seen, E> {
        if matches!(self.bound, Bound::Embeds(_) | Bound::Image(_) | Bound::Images(..) | Bound::Url)
        {
            self.walk.weight.embeds += text.len();
        }
        let most = match self.bound {
            // What is kept is an object or a list: the error would show a string.
            Bound::Tree if self.depth == 0 => SHOWN_BYTES,
            Bound::Text(most) | Bound::Form(most) => most,
            Bound::Strings { each, total, .. } => each.min(total),
            Bound::Prompt
            | Bound::Prompts(_)
            | Bound::Embeds(_)
            | Bound::Image(_)
            | Bound::Images(..)
            | Bound::Url
            | Bound::Content(_)
            | Bound::Documents(..)
            | Bound::Tree
            | Bound::Ignored => usize::MAX,
            Bound::Flag
            | Bound::Number { .. }
            | Bound::Ids(_)
            | Bound::Biases(_)
            | Bound::Object(_)
            | Bound::Objects(..)
            | Bound::Messages(..) => SHOWN_BYTES,
        };
        if text.len() > most {
            return Err(self.walk.fail(format!("{} bytes are more than {most}", text.len())));
        }
        Ok(Seen::Text(text.len()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Seen, A::Error> {
        let (most, bound) = match self.bound {
            Bound::Strings { count, each, .. } => (count, Bound::Text(each)),
            Bound::Ids(most) => (most, ID),
            Bound::Prompts(most) => (most, Bound::Prompt),
            Bound::Embeds(0) => (usize::MAX, Bound::Ignored),
            Bound::Embeds(most) => (most, Bound::Embeds(0)),
            Bound::Prompt => (usize::MAX, ID),
            // An element of the list: a list within it is left to the parser.
            Bound::Documents(0, _) => (usize::MAX, Bound::Ignored),
            Bound::Documents(most, params) => (most, Bound::Documents(0, params)),
            Bound::Objects(most, params) | Bound::Messages(most, params) => {
                (most, Bound::Object(params))
            }
            Bound::Content(params) => (usize::MAX, Bound::Object(params)),
            Bound::Images(0, _) => (usize::MAX, Bound::Ignored),
            Bound::Images(lists, params) => (usize::MAX, Bound::Images(lists - 1, params)),
            Bound::Tree if self.depth < DEPTH => (usize::MAX, Bound::Tree),
            Bound::Tree => return Err(self.too_deep()),
            Bound::Flag
            | Bound::Number { .. }
            | Bound::Text(_)
            | Bound::Biases(_)
            | Bound::Object(_)
            | Bound::Image(_)
            | Bound::Url
            | Bound::Form(_)
            | Bound::Ignored => (usize::MAX, Bound::Ignored),
        };
        let total = match self.bound {
            Bound::Strings { total, .. } => total,
            _ => usize::MAX,
        };
        let (mut index, mut counted, mut bytes) = (0, 0, 0_usize);
        let depth = self.depth + 1;
        loop {
            let at = At { bound, depth, walk: self.walk };
            let seen = seq.next_element_seed(at);
            // Of a tree the parameter is named, and not the way into it.
            let seen = match self.bound {
                Bound::Tree => seen?,
                _ => self.walk.on_way(seen, Step::Index(index))?,
            };
            let Some(seen) = seen else { return Ok(Seen::Other) };
            index += 1;
            // The ids of a single prompt are no list of prompts.
            let is_id = matches!((self.bound, &seen), (Bound::Prompts(_), Seen::Number));
            counted += usize::from(!is_id);
            if let Seen::Text(length) = seen {
                bytes = bytes.saturating_add(length);
            }
            if counted > most {
                return Err(self.walk.fail(format!("more than {most} entries")));
            }
            if bytes > total {
                return Err(self.walk.fail(format!("more than {total} bytes in all")));
            }
            if matches!(self.bound, Bound::Messages(..) | Bound::Content(_) | Bound::Images(..)) {
                self.walk.keep()?;
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Seen, A::Error> {
        match self.bound {
            Bound::Object(params)
            | Bound::Image(params)
            | Bound::Images(_, params)
            | Bound::Objects(_, params)
            | Bound::Documents(_, params) => {
                while let Some(name) = map.next_key_seed(Key(params))? {
                    let param = match name {
                        Name::Known(param) => param,
                        Name::Other(name) => {
                            if map.next_value::<Inert>()?.asks() {
                                self.walk.note_unread(&name);
                            }
                            continue;
                        }
                    };
                    self.walk.within.push(param.name);
                    let at = At { bound: param.bound, depth: 0, walk: self.walk };
                    let seen = map.next_value_seed(at);
                    self.walk.within.pop();
                    self.walk.on_way(seen, Step::Name(param.name))?;
                }
            }
            Bound::Biases(most) => {
                let mut entries = 0;
                let key = Bound::Text(KEY_BYTES);
                while map.next_key_seed(At { bound: key, depth: 0, walk: self.walk })?.is_some() {
                    entries += 1;
                    if entries > most {
                        return Err(self.walk.fail(format!("more than {most} entries")));
                    }
                    let bias = Bound::Number { least: -100.0, most: 100.0 };
                    map.next_value_seed(At { bound: bias, depth: 0, walk: self.walk })?;
                }
            }
            Bound::Tree if self.depth < DEPTH => {
                while map.next_key::<IgnoredAny>()?.is_some() {
                    let depth = self.depth + 1;
                    map.next_value_seed(At { bound: Bound::Tree, depth, walk: self.walk })?;
                }
            }
            Bound::Tree => return Err(self.too_deep()),
            _ => while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {},
        }
        Ok(Seen::Other)
    }
}

/// The bound of a token id. The model's vocabulary, which is checked later, may be smaller.
const ID: Bound = Bound::Number { least: i32::MIN as f64, most: i32::MAX as f64 };

impl At<'_> {
    fn number<E: Error>(self, value: f64, shown: impl fmt::Display) -> Result<Seen, E> {
        match self.bound {
            Bound::Number { least, most } if !(least..=most).contains(&value) => {
                Err(self.walk.fail(format!("{shown} is not {}", range(least, most))))
            }
            _ => Ok(Seen::Number),
        }
    }

    fn too_deep<E: Error>(self) -> E {
        self.walk.fail(format!("nested deeper than {DEPTH}"))
    }
}

/// A range in words.
fn range(least: f64, most: f64) -> String {
    let above = if least > 0.0 && least < 1e-9 {
        "above 0".to_owned()
    } else {
        format!("at least {least}")
    };
    if most >= f64::from(i32::MAX) { above } else { format!("{above} and at most {most}") }
}

/// Tells which parameter a key names.
struct Key(Params);

/// The meaning of a key.
enum Name {
    Known(&'static Param),
    /// A name that is not read; of a long one the beginning.
    Other(String),
}

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Name;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Key {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a parameter")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        let found = self.0.iter().flat_map(|group| group.iter()).find(|param| param.name == name);
        Ok(found.map_or_else(|| Name::Other(cut(name, SHOWN_BYTES).into_owned()), Name::Known))
    }
}
