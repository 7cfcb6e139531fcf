//! Finds the few fields that matter in an event's JSON without parsing it.
//!
//! In valid JSON, a quote inside a string follows a backslash, so the bytes `"key"` and a colon are
//! always a key. It is not checked which object contains the key: on the measured routes, these
//! keys occur nowhere else. Events of another form are parsed completely.

use std::sync::LazyLock;

use memchr::memchr2;
use memchr::memmem::Finder;

static TEXT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"text\""));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"delta\""));
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));
static PROMPT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"prompt_tokens\""));
static COMPLETION: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new(b"\"completion_tokens\""));

/// The fields of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Fields<'a> {
    /// Raw string contents, with escapes. A chat delta may contain both reasoning and content.
    pub(super) text: [&'a [u8]; 2],
    /// Prompt tokens, if reported.
    pub(super) prompt_tokens: Option<u32>,
    /// Generated tokens so far, if reported.
    pub(super) completion_tokens: Option<u32>,
    /// True if this is the last event of a /generate stream.
    pub(super) finished: bool,
}

/// Fields of an event of the completions route; `None`: it contains no text.
pub(super) fn completions(event: &[u8]) -> Option<Fields<'_>> {
    let (text, rest) = string(after_key(event, &TEXT)?)?;
    Some(with_usage([text, b""], rest))
}

/// Fields of an event of the chat route; `None`: it contains no delta, or a delta with more than
/// text.
pub(super) fn chat(event: &[u8]) -> Option<Fields<'_>> {
    let mut rest = after_key(event, &DELTA)?.strip_prefix(b"{")?.trim_ascii_start();
    let mut text: [&[u8]; 2] = [b"", b""];
    let mut found = 0;
    while !rest.starts_with(b"}") {
        let (key, after) = string(rest)?;
        let value = after.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
        rest = if let Some(after) = value.strip_prefix(b"null") {
            after
        } else {
            let (value, after) = string(value)?;
            if matches!(key, b"content" | b"reasoning_content" | b"reasoning" | b"refusal") {
                *text.get_mut(found)? = value;
                found += 1;
            }
            after
        };
        rest = rest.trim_ascii_start();
        rest = rest.strip_prefix(b",").unwrap_or(rest).trim_ascii_start();
    }
    Some(with_usage(text, rest))
}

/// Fields of an event of /generate; `None`: it contains no text. The text is either only the new
/// part or the whole text so far.
pub(super) fn generate(event: &[u8]) -> Option<Fields<'_>> {
    let (text, rest) = string(after_key(event, &TEXT)?)?;
    let finished = after_key(rest, &FINISH).is_some_and(|reason| !reason.starts_with(b"null"));
    Some(Fields { finished, ..counts([text, b""], rest) })
}

fn with_usage<'a>(text: [&'a [u8]; 2], rest: &'a [u8]) -> Fields<'a> {
    match after_key(rest, &USAGE).and_then(|usage| usage.strip_prefix(b"{")) {
        Some(usage) => counts(text, usage),
        None => Fields { text, ..Fields::default() },
    }
}

fn counts<'a>(text: [&'a [u8]; 2], rest: &[u8]) -> Fields<'a> {
    Fields {
        text,
        prompt_tokens: after_key(rest, &PROMPT).and_then(number),
        completion_tokens: after_key(rest, &COMPLETION).and_then(number),
        finished: false,
    }
}

/// Returns the bytes after the key and its colon.
fn after_key<'a>(bytes: &'a [u8], key: &Finder<'_>) -> Option<&'a [u8]> {
    let mut rest = bytes;
    loop {
        rest = &rest[key.find(rest)? + key.needle().len()..];
        if let Some(value) = rest.trim_ascii_start().strip_prefix(b":") {
            return Some(value.trim_ascii_start());
        }
    }
}

/// Splits bytes that start with a JSON string: returns its raw content and the bytes after it.
fn string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let body = bytes.strip_prefix(b"\"")?;
    let mut at = 0;
    loop {
        at += memchr2(b'"', b'\\', body.get(at..)?)?;
        if body[at] == b'"' {
            return Some((&body[..at], &body[at + 1..]));
        }
        at += 2;
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    let end = bytes.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()
}

/// Decodes a JSON string and appends it to `text`. `raw`: its content without the quotes.
///
/// Invalid JSON strings are appended unchanged: the text is only used for counting tokens and for
/// display.
pub(super) fn unescape(raw: &[u8], text: &mut String) {
    if memchr::memchr(b'\\', raw).is_none() {
        text.push_str(&String::from_utf8_lossy(raw));
        return;
    }
    let quoted = [b"\"", raw, b"\""].concat();
    match serde_json::from_slice::<String>(&quoted) {
        Ok(plain) => text.push_str(&plain),
        Err(_) => text.push_str(&String::from_utf8_lossy(raw)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn plain(fields: Fields<'_>) -> [String; 2] {
        fields.text.map(|raw| {
            let mut text = String::new();
            unescape(raw, &mut text);
            text
        })
    }

    #[test]
    fn usage_is_found_beside_text_and_not_when_null() {
        let event = br#"{"choices":[{"index":0,"text":"a","logprobs":null}],"usage":null}"#;
        assert_eq!(completions(event).unwrap(), Fields { text: [b"a", b""], ..Fields::default() });
        let event = br#"{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}}"#;
        let fields = completions(event).unwrap();
        assert_eq!((fields.prompt_tokens, fields.completion_tokens), (Some(5), Some(2)));
    }

    #[test]
    fn a_delta_gives_reasoning_and_content_and_nothing_else() {
        let event = br#"{"choices":[{"delta":{"role":"assistant","reasoning_content":"r", "content" : "c","refusal":null}}]}"#;
        assert_eq!(chat(event).unwrap().text, [&b"r"[..], b"c"]);
        assert_eq!(chat(br#"{"choices":[{"delta":{}}]}"#).unwrap().text, [b"", b""]);
        assert_eq!(chat(br#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#), None);
        assert_eq!(chat(br#"{"choices":[],"usage":{"completion_tokens":2}}"#), None);
        assert_eq!(chat(br#"{"choices":[{"delta":{"content":"cut"#), None);
    }

    #[test]
    fn a_key_within_a_string_is_no_key() {
        let event = json!({"choices": [{"delta": {"content": "\"text\": \"usage\":{"}}]});
        let fields = event.to_string();
        assert_eq!(plain(chat(fields.as_bytes()).unwrap())[0], "\"text\": \"usage\":{");
        assert_eq!(completions(br#"{"object":"text","text":"x"}"#).unwrap().text[0], b"x");
    }

    proptest! {
        #[test]
        fn any_text_is_found_as_it_was_sent(content in any::<String>(), reasoning in any::<String>(), tokens in any::<u32>()) {
            let event = json!({"id": "\"delta\"", "choices": [{"delta": {"reasoning": reasoning, "content": content}}],
                               "usage": {"completion_tokens": tokens}}).to_string();
            let fields = chat(event.as_bytes()).unwrap();
            prop_assert_eq!(fields.completion_tokens, Some(tokens));
            prop_assert_eq!(plain(fields), [reasoning, content.clone()]);
            let event = json!({"choices": [{"text": content, "finish_reason": "stop"}]}).to_string();
            prop_assert_eq!(&plain(completions(event.as_bytes()).unwrap())[0], &content);
            let event = json!({"text": content, "meta_info": {"prompt_tokens": 3, "completion_tokens": tokens}}).to_string();
            let fields = generate(event.as_bytes()).unwrap();
            prop_assert_eq!((fields.prompt_tokens, fields.completion_tokens), (Some(3), Some(tokens)));
            prop_assert_eq!(&plain(fields)[0], &content);
        }

        #[test]
        fn no_bytes_make_the_scan_fail(event in proptest::collection::vec(any::<u8>(), 0..60)) {
            let event = [&b"{\"delta\":{\"text\":\""[..], &event].concat();
            for fields in [completions(&event), chat(&event), generate(&event)].into_iter().flatten() {
                plain(fields);
            }
        }
    }
}
