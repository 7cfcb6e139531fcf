//! API keys: the accepted keys, and the key that a request sends.

use std::fmt;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use subtle::ConstantTimeEq;

/// The headers in which some clients send their key in place of `Authorization`: Anthropic's and
/// Azure's.
const KEY_HEADERS: [&str; 2] = ["x-api-key", "api-key"];

/// The accepted keys, each with an index. They are never printed: the debug output has only their
/// number.
#[derive(Clone, Default)]
pub struct Keys(Vec<Box<str>>);

impl Keys {
    /// Creates the list of accepted keys. Empty keys are left out, since they would admit every
    /// client.
    pub fn new<K: Into<String>>(keys: impl IntoIterator<Item = K>) -> Self {
        let keys = keys.into_iter().map(|key| key.into().into_boxed_str());
        Self(keys.filter(|key| !key.is_empty()).collect())
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the key with the index `at`.
    #[must_use]
    pub fn text(&self, at: usize) -> Option<&str> {
        self.0.get(at).map(|key| &**key)
    }

    /// True if clients need no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the index of the accepted key in these headers. The comparison takes constant time:
    /// it does not depend on where a wrong key differs, or which key matches.
    #[must_use]
    pub fn shown(&self, headers: &HeaderMap) -> Option<usize> {
        let given = given(headers)?;
        let mut found = None;
        for (at, key) in self.0.iter().enumerate() {
            if given.as_bytes().ct_eq(key.as_bytes()).into() {
                found = Some(at);
            }
        }
        found
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Returns the key in a request's head, accepted or not.
fn given(headers: &HeaderMap) -> Option<&str> {
    let bearer = || {
        let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    };
    let named = |name: &&str| Some(headers.get(*name)?.to_str().ok()?.trim());
    bearer().or_else(|| KEY_HEADERS.iter().find_map(named))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn shown(keys: &Keys, name: HeaderName, value: &'static str) -> Option<usize> {
        let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
        keys.shown(&headers)
    }

    #[test]
    fn keys_are_known_by_their_place() {
        let keys = Keys::new(["secret", "", "other"]);
        let bearer = |value| shown(&keys, AUTHORIZATION, value);
        assert_eq!((bearer("Bearer secret"), bearer("bearer  other")), (Some(0), Some(1)));
        for wrong in ["Bearer secre", "Bearer secret2", "Basic secret", "secret", "Bearer "] {
            assert_eq!(bearer(wrong), None, "{wrong}");
        }
        assert_eq!(keys.shown(&HeaderMap::new()), None);
        for name in KEY_HEADERS {
            let header = HeaderName::from_static(name);
            assert_eq!(shown(&keys, header.clone(), "other"), Some(1));
            assert_eq!(shown(&keys, header, "Bearer other"), None);
        }
    }

    #[test]
    fn a_key_is_in_one_of_three_headers() {
        let head = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            let pair = |&(name, value): &(&'static str, &'static str)| {
                (HeaderName::from_static(name), HeaderValue::from_static(value))
            };
            pairs.iter().map(pair).collect()
        };
        let bearer = ("authorization", "bearer  a");
        for (pairs, key) in [
            (&[bearer][..], Some("a")),
            (&[("x-api-key", " b")], Some("b")),
            (&[("api-key", "c")], Some("c")),
            (&[("api-key", "c"), bearer], Some("a")),
            (&[("authorization", "Basic x"), ("x-api-key", "b")], Some("b")),
            (&[("authorization", "a")], None),
            (&[], None),
        ] {
            assert_eq!(given(&head(pairs)), key, "{pairs:?}");
        }
    }

    #[test]
    fn nobody_reads_a_key_in_a_log() {
        assert_eq!(format!("{:?}", Keys::new(["secret", "other"])), "2 keys");
    }
}
