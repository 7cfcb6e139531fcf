//! The way from bytes to a request type. Errors name the place.

use crate::error::ApiError;
use crate::limits::{Limited, Walk, Weight};

/// A parsed request, and the weight of its body.
#[derive(Debug)]
pub struct Parsed<T> {
    /// The request.
    pub request: T,
    /// The weight of the parsed value.
    pub weight: Weight,
    /// Names of parameters of the request that no type reads.
    pub unread: Vec<String>,
}

/// Reads a request from a body, within the limits of its type.
///
/// # Errors
/// [`ApiError::InvalidUtf8`], [`ApiError::MalformedJson`] with the position, or
/// [`ApiError::Invalid`] with the path of the first parameter that is missing, of a wrong type or
/// over its limit. [`ApiError::Unsupported`] for a parameter that is not served. An error of `fits`
/// about the body's weight.
pub fn parse_request<T: Limited>(
    body: &[u8],
    fits: impl FnOnce(Weight) -> Result<(), ApiError>,
) -> Result<Parsed<T>, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::InvalidUtf8 { offset: error.valid_up_to() })?;
    let mut walk = Walk::new(text);
    let request = T::read(&mut walk)?;
    let (weight, unread) = walk.finish();
    fits(weight)?;
    Ok(Parsed { request, weight, unread })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ChatRequest;

    fn fail(body: &[u8]) -> ApiError {
        parse_request::<ChatRequest>(body, |_| Ok(())).unwrap_err()
    }

    #[test]
    fn positions_and_paths() {
        assert_eq!(fail(b"{\"list\": \xff}"), ApiError::InvalidUtf8 { offset: 9 });
        assert!(matches!(fail(b"{\n  \"n\": nope}"), ApiError::MalformedJson { line: 2, .. }));
        assert!(matches!(fail(b""), ApiError::MalformedJson { line: 1, column: 0, .. }));
        let trailing = fail(b"{\"messages\":[]} x");
        assert!(matches!(trailing, ApiError::MalformedJson { column: 17, .. }), "{trailing:?}");
        // A value is read apart from the body, and its errors are of the body.
        let inside = fail(b"{\"messages\": [],\n \"n\": 1e999}");
        assert!(
            matches!(inside, ApiError::MalformedJson { line: 2, column: 11, .. }),
            "{inside:?}"
        );
        let cases: [(&[u8], &str); 4] = [
            (b"{\"messages\":[{\"role\":\"a\"},{\"role\":1}]}", "messages[1].role"),
            (b"{\"messages\":[{}]}", "messages[0].role"),
            (b"{}", "messages"),
            (b"3", "body"),
        ];
        for (body, expected) in cases {
            let ApiError::Invalid { param, reason } = fail(body) else { panic!("{body:?}") };
            assert_eq!(param, expected);
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn deep_nesting_is_an_error_not_a_crash() {
        let body = [b'['; 100_000];
        assert!(matches!(fail(&body), ApiError::MalformedJson { .. }));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_a_400(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Err(error) = parse_request::<ChatRequest>(&body, |_| Ok(())) {
                prop_assert_eq!(error.status(), 400);
            }
        }
    }
}
