//! The way from bytes to a request type. Errors name the place.

use serde::de::DeserializeOwned;
use serde_json::error::Category;

use crate::error::ApiError;
use crate::limits::{self, Limited, Weight};

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

/// Checks a request body against the limits of its type, and parses it.
///
/// # Errors
/// The errors of [`parse`]; [`ApiError::Invalid`] with the first parameter over its limit; or an
/// error of `fits` about the body's weight.
pub fn parse_request<T: DeserializeOwned + Limited>(
    body: &[u8],
    fits: impl FnOnce(Weight) -> Result<(), ApiError>,
) -> Result<Parsed<T>, ApiError> {
    let text = text(body)?;
    let (weight, unread) = limits::check(text, T::PARAMS)?;
    fits(weight)?;
    Ok(Parsed { request: parse_text(text)?, weight, unread })
}

/// Parses JSON.
///
/// # Errors
/// [`ApiError::InvalidUtf8`], [`ApiError::MalformedJson`] with the position, or
/// [`ApiError::Invalid`] with the path of the parameter whose type is wrong or which is missing.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    parse_text(text(body)?)
}

fn text(body: &[u8]) -> Result<&str, ApiError> {
    std::str::from_utf8(body).map_err(|error| ApiError::InvalidUtf8 { offset: error.valid_up_to() })
}

fn parse_text<T: DeserializeOwned>(text: &str) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, error.inner())
    })?;
    deserializer.end().map_err(|error| explain(".", &error))?;
    Ok(value)
}

fn explain(path: &str, error: &serde_json::Error) -> ApiError {
    let full = error.to_string();
    let reason = full.split(" at line ").next().unwrap_or(&full);
    if error.classify() != Category::Data {
        return ApiError::MalformedJson {
            reason: reason.to_owned(),
            line: error.line(),
            column: error.column(),
        };
    }
    let path = if path == "." { "" } else { path };
    let missing = reason.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`'));
    let param = match missing {
        Some(field) if path.is_empty() => field.to_owned(),
        Some(field) => format!("{path}.{field}"),
        None if path.is_empty() => "body".to_owned(),
        None => path.to_owned(),
    };
    let reason =
        if missing.is_some() { "required and missing".to_owned() } else { reason.to_owned() };
    ApiError::Invalid { reason: format!("`{param}`: {reason}"), param }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Inner {
        x: u32,
    }
    #[derive(Debug, PartialEq, Deserialize)]
    struct Outer {
        list: Vec<Inner>,
    }

    fn fail(body: &[u8]) -> ApiError {
        parse::<Outer>(body).unwrap_err()
    }

    #[test]
    fn positions_and_paths() {
        assert_eq!(fail(b"{\"list\": \xff}"), ApiError::InvalidUtf8 { offset: 9 });
        assert!(matches!(fail(b"{\n  \"list\": nope}"), ApiError::MalformedJson { line: 2, .. }));
        assert!(matches!(fail(b""), ApiError::MalformedJson { line: 1, column: 0, .. }));
        assert!(matches!(fail(b"{\"list\":[]} x"), ApiError::MalformedJson { column: 13, .. }));
        let cases: [(&[u8], &str); 4] = [
            (b"{\"list\":[{\"x\":1},{\"x\":\"a\"}]}", "list[1].x"),
            (b"{\"list\":[{}]}", "list[0].x"),
            (b"{}", "list"),
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
        assert!(matches!(parse::<serde_json::Value>(&body), Err(ApiError::MalformedJson { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_a_400(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Err(error) = parse::<Outer>(&body) {
                prop_assert_eq!(error.status(), 400);
            }
        }
    }
}
