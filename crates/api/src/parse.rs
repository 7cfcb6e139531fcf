//! Parses a body into a request type. Errors name the position or the parameter.

use crate::error::ApiError;
use crate::limits::{Limited, Walk, Weight};

/// A parsed request, and the weight of its body.
#[derive(Debug)]
pub struct ParsedRequest<T> {
    /// The request.
    pub request: T,
    /// The weight of the parsed value.
    pub weight: Weight,
    /// Names of parameters of the body that the request type does not read.
    pub unread: Vec<String>,
}

/// Parses a body into a request, within the limits of its type.
///
/// # Errors
/// [`ApiError::InvalidUtf8`], [`ApiError::MalformedJson`] with the position, or
/// [`ApiError::Invalid`] with the path of the first parameter that is missing, over its limit or
/// of a wrong type. [`ApiError::Unsupported`] for a parameter that is not supported. Also returns
/// the error of `fits`, which checks the body's weight.
pub fn parse_request<T: Limited>(
    body: &[u8],
    fits: impl FnOnce(Weight) -> Result<(), ApiError>,
) -> Result<ParsedRequest<T>, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::InvalidUtf8 { offset: error.valid_up_to() })?;
    // Some platforms begin text with a byte order mark.
    let mut walk = Walk::new(text.strip_prefix('\u{feff}').unwrap_or(text));
    let request = T::read(&mut walk)?;
    let (weight, unread) = walk.finish();
    fits(weight)?;
    Ok(ParsedRequest { request, weight, unread })
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
        // A nested value is parsed separately, but positions in its errors refer to the whole body.
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

    fn generation<T: Limited>(
        body: &str,
        validate: impl FnOnce(T) -> Result<crate::Generation, ApiError>,
    ) -> crate::Generation {
        let parsed = parse_request::<T>(body.as_bytes(), |_| Ok(())).expect(body);
        validate(parsed.request).expect(body)
    }

    /// Clients in different languages write numbers and absent values differently.
    #[test]
    fn numbers_and_nulls_are_read_as_they_are_meant() {
        let (defaults, limits) = (crate::GenerationDefaults::default(), crate::trial::LIMITS);
        let chat = |more: &str| {
            let body =
                format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}], {more}}}");
            generation::<ChatRequest>(&body, |r| Ok(r.validate(&defaults, limits)?.generation))
        };
        let responses = |more: &str| {
            let body = format!("{{\"input\": \"a\", {more}}}");
            generation::<crate::ResponsesRequest>(&body, |r| {
                Ok(r.validate(&[], &defaults, limits, &mut Vec::new())?.chat.generation)
            })
        };
        let ollama = |more: &str| {
            let body = format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\", \"images\": null, \"tool_calls\": null}}], {more}}}"
            );
            generation::<crate::OllamaChatRequest>(&body, |r| {
                match r.validate(&defaults, limits)? {
                    crate::OllamaAsk::Chat(chat) => Ok(chat.generation),
                    other => panic!("{other:?}"),
                }
            })
        };
        use crate::sampling::MaxTokens::{Exactly, Rest};
        for (given, expected) in [
            ("4", Exactly(4)),
            ("4.0", Exactly(4)),
            ("4e0", Exactly(4)),
            ("null", Rest),
            ("4294967296", Exactly(u32::MAX)),
            ("1e30", Exactly(u32::MAX)),
            ("9223372036854775807", Exactly(u32::MAX)),
        ] {
            assert_eq!(chat(&format!("\"max_tokens\": {given}")).max_tokens, expected, "{given}");
            let told = responses(&format!("\"max_output_tokens\": {given}")).max_tokens;
            assert_eq!(told, expected, "{given}");
            let told = ollama(&format!("\"options\": {{\"num_predict\": {given}}}")).max_tokens;
            assert_eq!(told, expected, "{given}");
        }
        assert_eq!(ollama("\"options\": null, \"tools\": null, \"format\": null").max_tokens, Rest);
        assert_eq!(
            responses("\"tools\": null, \"text\": null, \"metadata\": null").max_tokens,
            Rest
        );
        for (given, expected) in [
            ("7", 7),
            ("7.0", 7),
            ("-1", u64::MAX),
            ("18446744073709551615", u64::MAX),
            ("9223372036854775808", 1 << 63),
        ] {
            assert_eq!(chat(&format!("\"seed\": {given}")).seed, Some(expected), "{given}");
        }
        assert_eq!(chat("\"top_k\": 4294967296").sampling.top_k, i32::MAX);
        assert_eq!(chat("\"temperature\": 1").sampling.temperature, 1.0);
        assert_eq!(chat("\"stop_token_ids\": [5.0, 3]").stop_token_ids, [3, 5]);
        for wrong in ["4.5", "-1", "\"4\"", "[4]", "true"] {
            let body = format!("{{\"messages\": [], \"n\": {wrong}}}");
            let ApiError::Invalid { param, reason } = fail(body.as_bytes()) else {
                panic!("{body}")
            };
            assert_eq!(param, "n", "{reason}");
        }
    }

    #[test]
    fn a_share_of_nothing_is_greedy() {
        let (defaults, limits) = (crate::GenerationDefaults::default(), crate::trial::LIMITS);
        for zero in ["0", "0.0", "-0.0"] {
            let body = format!("{{\"prompt\": \"a\", \"top_p\": {zero}, \"temperature\": 1.5}}");
            let sampling = generation::<crate::CompletionRequest>(&body, |r| {
                Ok(r.validate(&defaults, limits)?.generation)
            })
            .sampling;
            assert_eq!((sampling.temperature, sampling.top_p), (0.0, 1.0), "{zero}");
        }
    }

    #[test]
    fn types_are_told_in_plain_words() {
        for (field, value, reason) in [
            ("n", "\"4\"", "expected a whole number, and not string \"4\""),
            ("n", "1.5", "expected a whole number, and not number `1.5`"),
            ("messages", "{}", "expected a list, and not an object"),
            ("messages", "[5]", "expected an object, and not number `5`"),
            ("stream", "1", "expected true or false, and not number `1`"),
            ("reasoning", "1", "expected an object, and not number `1`"),
            ("temperature", "[]", "expected a number, and not a list"),
        ] {
            let body = format!("{{\"{field}\": {value}}}");
            let told = fail(body.as_bytes()).to_string();
            assert!(told.ends_with(reason), "{body}: {told}");
        }
    }

    #[test]
    fn false_of_what_is_true_by_default_asks_for_something() {
        let unread = |body: &str| {
            parse_request::<ChatRequest>(body.as_bytes(), |_| Ok(())).expect(body).unread
        };
        let body = r#"{"messages": [], "detokenize": false, "stream_reasoning": false, "echo": false, "new": false}"#;
        assert_eq!(unread(body), ["detokenize", "stream_reasoning"]);
        assert_eq!(unread(r#"{"messages": [], "detokenize": true}"#), ["detokenize"]);
        assert_eq!(unread(r#"{"messages": [], "detokenize": null}"#), [""; 0]);
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
