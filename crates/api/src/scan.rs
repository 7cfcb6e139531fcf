//! Finds the top-level members of a JSON object without a parser.
//!
//! The router needs only a few fields of a body. The backend parses and validates the body, so a
//! wrong result for an invalid body is harmless.

use memchr::{memchr, memchr2};

/// Iterates over the top-level members of `json`. Yields name and value as written, the name
/// without its quotes.
#[must_use]
pub fn members(json: &[u8]) -> Members<'_> {
    let mut members = Members { json, at: 0 };
    members.skip_spaces();
    if members.eat(b'{').is_none() {
        members.at = json.len();
    }
    members
}

/// The iterator of [`members`]. It ends at the first malformed member.
#[derive(Debug)]
pub struct Members<'a> {
    json: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Members<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        self.skip_spaces();
        let name = self.at;
        self.skip_string()?;
        let name = &self.json[name + 1..self.at - 1];
        self.skip_spaces();
        self.eat(b':')?;
        self.skip_spaces();
        let value = self.at;
        self.skip_value()?;
        let value = self.json[value..self.at].trim_ascii_end();
        self.skip_spaces();
        // No comma follows the last member; the next call then finds no name.
        let _ = self.eat(b',');
        Some((name, value))
    }
}

impl Members<'_> {
    fn skip_spaces(&mut self) {
        let rest = &self.json[self.at..];
        self.at += rest.len() - rest.trim_ascii_start().len();
    }

    fn eat(&mut self, byte: u8) -> Option<()> {
        (self.json.get(self.at) == Some(&byte)).then(|| self.at += 1)
    }

    fn skip_string(&mut self) -> Option<()> {
        self.eat(b'"')?;
        loop {
            self.at += memchr2(b'"', b'\\', &self.json[self.at..])?;
            if self.eat(b'"').is_some() {
                return Some(());
            }
            self.at += 2;
            if self.at > self.json.len() {
                return None;
            }
        }
    }

    fn skip_value(&mut self) -> Option<()> {
        let mut depth = 0usize;
        loop {
            match self.json.get(self.at)? {
                b'"' => self.skip_string()?,
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' if depth > 0 => {
                    depth -= 1;
                    self.at += 1;
                }
                b',' | b'}' if depth == 0 => return Some(()),
                _ => self.at += 1,
            }
            let ended = matches!(self.json[self.at - 1], b'"' | b'}' | b']');
            if depth == 0 && ended {
                return Some(());
            }
        }
    }
}

/// Returns the text of a JSON string without escapes, as most names and keys are, or `None` for any
/// other value.
#[must_use]
pub fn plain_string(value: &[u8]) -> Option<&[u8]> {
    let text = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    memchr(b'\\', text).is_none().then_some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[\\PC\"\\\\{}\\[\\],: ]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a-z\"{,]{0,3}", inner), 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn members_are_those_that_a_parser_finds(
            pairs in prop::collection::vec(("\\PC{0,5}", value()), 0..6),
            pretty: bool,
        ) {
            let object: Map<String, Value> = pairs.into_iter().collect();
            let json = if pretty { serde_json::to_vec_pretty(&object) } else { serde_json::to_vec(&object) };
            let json = json.unwrap();
            let found: Map<String, Value> = members(&json)
                .map(|(name, value)| {
                    let name = [b"\"", name, b"\""].concat();
                    (serde_json::from_slice(&name).unwrap(), serde_json::from_slice(value).unwrap())
                })
                .collect();
            prop_assert_eq!(found, object);
        }

        #[test]
        fn any_bytes_end(json in prop::collection::vec(prop::sample::select(b"{}[]\",:\\ ax1".to_vec()), 0..40)) {
            prop_assert!(members(&json).count() <= json.len());
            let opened = [b"{", &json[..]].concat();
            prop_assert!(members(&opened).count() <= opened.len());
        }
    }

    #[test]
    fn strings() {
        assert_eq!(plain_string(b"\"key\""), Some(&b"key"[..]));
        assert_eq!(plain_string(b"\"k\\u0065y\""), None);
        assert_eq!(plain_string(b"17"), None);
        assert_eq!(plain_string(b"\""), None);
    }
}
