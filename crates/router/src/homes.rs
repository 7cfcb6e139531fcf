//! Records which backend keeps each response, because a request that continues a response has to go
//! to that backend.

use std::num::NonZeroUsize;

use forebay_api::{members, plain_string};
use lru::LruCache;
use parking_lot::Mutex;

/// The largest number of responses whose backends are remembered. For other responses, all backends
/// are tried.
const MOST: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");
/// The longest id of a response, in bytes.
const LONGEST: usize = 128;
/// The prefix of the paths of single responses.
const PATH: &str = "/v1/responses/";

/// The path that begins with [`PATH`] but names no response.
const COUNT: &str = "/v1/responses/input_tokens";

/// The backends that keep responses, by response id.
#[derive(Debug)]
pub(crate) struct Homes(Mutex<LruCache<Box<str>, u32>>);

impl Default for Homes {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MOST)))
    }
}

impl Homes {
    /// Records that a backend keeps a response.
    pub(crate) fn keeps(&self, backend: u32, response: &str) {
        if response.len() <= LONGEST {
            self.0.lock().put(response.into(), backend);
        }
    }

    /// Returns the backend that keeps a response, if it is known.
    pub(crate) fn of(&self, response: &str) -> Option<u32> {
        self.0.lock().get(response).copied()
    }

    /// Records that a backend has reported that it does not keep the response.
    pub(crate) fn lacks(&self, backend: u32, response: &str) {
        let mut homes = self.0.lock();
        if homes.peek(response) == Some(&backend) {
            homes.pop(response);
        }
    }
}

/// True if a path names a single response, or a resource below it.
pub(crate) fn is_of_response(path: &str) -> bool {
    path.starts_with(PATH)
}

/// Returns the id of the response that a request names or continues.
pub(crate) fn wanted(path: &str, body: &[u8]) -> Option<Box<str>> {
    if path != "/v1/responses" && path != COUNT {
        let rest = path.strip_prefix(PATH)?;
        return rest.split('/').next().map(Into::into);
    }
    let mut fields = members(body);
    let (_, value) = fields.find(|(name, _)| *name == b"previous_response_id")?;
    std::str::from_utf8(plain_string(value)?).ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_named_in_the_path_or_in_the_body() {
        let body = br#"{"input": "a", "previous_response_id": "resp_1", "stream": true}"#;
        assert_eq!(wanted("/v1/responses", body).as_deref(), Some("resp_1"));
        assert_eq!(wanted(COUNT, body).as_deref(), Some("resp_1"));
        assert_eq!(wanted(COUNT, b"{}"), None);
        assert_eq!(wanted("/v1/responses", br#"{"previous_response_id": null}"#), None);
        assert_eq!(wanted("/v1/chat/completions", body), None);
        assert_eq!(wanted("/v1/responses/resp_2", b"").as_deref(), Some("resp_2"));
        assert_eq!(wanted("/v1/responses/resp_2/cancel", b"").as_deref(), Some("resp_2"));
    }

    #[test]
    fn only_its_own_backend_can_say_that_it_is_gone() {
        let homes = Homes::default();
        homes.keeps(1, "a");
        homes.lacks(2, "a");
        assert_eq!(homes.of("a"), Some(1));
        homes.lacks(1, "a");
        assert_eq!(homes.of("a"), None);
        homes.keeps(1, &"x".repeat(1000));
        assert_eq!(homes.of(&"x".repeat(1000)), None);
    }
}
