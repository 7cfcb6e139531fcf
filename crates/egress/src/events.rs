//! Encodes server-sent events: single events, and the chunks of OpenAI's APIs.
//!
//! A stream ends with `data: [DONE]`, also after an error. The error is sent before that, as a
//! separate event `data: {"error": ...}`.

use std::io::{self, Write};

use forebay_api::peer::StreamName;
use forebay_api::{Streaming, Usage};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

use crate::mode::EgressMode;

/// The last event of a stream of OpenAI's APIs.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// A JSON formatter that escapes the characters that end a line in Unicode but not in server-sent
/// events. Some clients, such as httpx, split streams with Python's `splitlines`, which would break
/// an event at such a character.
struct OneLine;

impl Formatter for OneLine {
    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if fragment.is_ascii() {
            return writer.write_all(fragment.as_bytes());
        }
        let mut written = 0;
        for (at, found) in fragment.match_indices(['\u{85}', '\u{2028}', '\u{2029}']) {
            writer.write_all(&fragment.as_bytes()[written..at])?;
            let code = found.chars().next().map_or(0, u32::from);
            write!(writer, "\\u{code:04x}")?;
            written = at + found.len();
        }
        writer.write_all(&fragment.as_bytes()[written..])
    }
}

fn write_json<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    value.serialize(&mut Serializer::with_formatter(out, OneLine))
}

/// Appends a line of JSON, for streams of JSON lines.
pub fn line<T: Serialize>(value: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    write_json(value, out)?;
    out.push(b'\n');
    Ok(())
}

/// Appends a named event.
pub fn named<T: Serialize>(name: &str, value: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    event(value, out)
}

/// Appends an event without a name.
pub fn event<T: Serialize>(value: &T, out: &mut Vec<u8>) -> serde_json::Result<()> {
    out.extend_from_slice(b"data: ");
    write_json(value, out)?;
    out.extend_from_slice(b"\n\n");
    Ok(())
}

/// The fields that all chunks of a response share.
#[derive(Debug, Serialize)]
struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

/// Encodes the events of OpenAI's APIs.
pub struct Chunks {
    head: Head,
    streaming: Streaming,
    /// The encoded event up to its choices. `None` if every chunk is encoded as a whole.
    prepared: Option<Vec<u8>>,
    /// The prompt's token ids, for the first chunk.
    prompt_token_ids: Option<Vec<i32>>,
}

/// An encoded event, split where the value of its only text field belongs.
pub struct Cut {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl Cut {
    /// Appends the event with `text` as the field's value.
    pub fn write(&self, text: &str, out: &mut Vec<u8>) -> serde_json::Result<()> {
        out.extend_from_slice(&self.before);
        write_json(text, out)?;
        out.extend_from_slice(&self.after);
        Ok(())
    }
}

impl Chunks {
    /// Creates the encoder for the response `name`. The fields that all chunks share are encoded
    /// once, unless `egress` is `Naive`.
    pub fn new(
        name: &StreamName,
        object: &'static str,
        model: &str,
        streaming: Streaming,
        egress: EgressMode,
    ) -> serde_json::Result<Self> {
        let StreamName { id, created } = name.clone();
        let head = Head { id, object, created, model: model.to_owned() };
        let prepared = if egress == EgressMode::Naive {
            None
        } else {
            let mut event = b"data: ".to_vec();
            serde_json::to_writer(&mut event, &head)?;
            event.truncate(event.len() - b"}".len());
            event.extend_from_slice(b",\"choices\":[");
            Some(event)
        };
        Ok(Self { head, streaming, prepared, prompt_token_ids: None })
    }

    /// Adds the prompt's token ids to the first chunk.
    pub fn with_prompt(self, prompt_token_ids: Option<Vec<i32>>) -> Self {
        Self { prompt_token_ids, ..self }
    }

    /// Appends the first chunk.
    pub fn first<T: Serialize>(
        &mut self,
        choice: &T,
        usage: impl FnOnce() -> Usage,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let from = out.len();
        self.choice(choice, usage, out)?;
        if let Some(ids) = self.prompt_token_ids.take() {
            // The position of the brace that closes the event's object.
            let brace = out.len() - b"}\n\n".len();
            debug_assert!(brace > from);
            let mut field = b",\"prompt_token_ids\":".to_vec();
            serde_json::to_writer(&mut field, &ids)?;
            out.splice(brace..brace, field);
        }
        Ok(())
    }

    /// Appends a chunk with one choice.
    pub fn choice<T: Serialize>(
        &self,
        choice: &T,
        usage: impl FnOnce() -> Usage,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        let usage = self.streaming.continuous_usage.then(usage);
        self.chunk(Some(choice), usage, out)
    }

    /// Returns the event with this choice, split at the value of `field`, which is an empty string.
    /// `None` if chunks differ in more than the text.
    pub fn cut<T: Serialize>(&self, choice: &T, field: &str) -> serde_json::Result<Option<Cut>> {
        if self.streaming.continuous_usage || self.prepared.is_none() {
            return Ok(None);
        }
        let mut event = Vec::new();
        self.chunk(Some(choice), None, &mut event)?;
        let empty = format!("\"{field}\":\"\"");
        let found = event.windows(empty.len()).rposition(|window| window == empty.as_bytes());
        Ok(found.map(|at| {
            let value = at + empty.len() - b"\"\"".len();
            Cut { before: event[..value].to_vec(), after: event[at + empty.len()..].to_vec() }
        }))
    }

    /// Appends the chunk that contains only the usage, if requested.
    pub fn usage(&self, usage: Usage, out: &mut Vec<u8>) -> serde_json::Result<()> {
        if !self.streaming.include_usage {
            return Ok(());
        }
        self.chunk(None::<&()>, Some(usage), out)
    }

    fn chunk<T: Serialize>(
        &self,
        choice: Option<&T>,
        usage: Option<Usage>,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        // With `include_usage`, chunks without usage contain null.
        let usage = self.streaming.include_usage.then_some(usage);
        let Some(prepared) = &self.prepared else {
            return event(&WholeChunk { head: &self.head, choices: choice.as_slice(), usage }, out);
        };
        out.extend_from_slice(prepared);
        if let Some(choice) = choice {
            write_json(choice, out)?;
        }
        out.push(b']');
        if let Some(usage) = usage {
            out.extend_from_slice(b",\"usage\":");
            serde_json::to_writer(&mut *out, &usage)?;
        }
        out.extend_from_slice(b"}\n\n");
        Ok(())
    }
}

/// A chunk that is encoded as a whole.
#[derive(Serialize)]
struct WholeChunk<'a, T> {
    #[serde(flatten)]
    head: &'a Head,
    choices: &'a [&'a T],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(id: &str, created: u64) -> StreamName {
        StreamName { id: id.into(), created }
    }

    fn write(streaming: Streaming, egress: EgressMode) -> String {
        let chunks = Chunks::new(&name("i\"d", 7), "chunk", "m", streaming, egress).unwrap();
        let mut out = Vec::new();
        chunks.choice(&1, || Usage::new(1, 2, Some(0)), &mut out).unwrap();
        chunks.usage(Usage::new(1, 3, Some(0)), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn an_event_is_one_line_by_any_definition() {
        let text = "a\u{85}b\u{2028}\u{2029}c\n\u{1c}\u{b}é\u{1f600}";
        let mut out = Vec::new();
        event(&text, &mut out).unwrap();
        let line = String::from_utf8(out).unwrap();
        let body = line.strip_prefix("data: ").and_then(|l| l.strip_suffix("\n\n")).unwrap();
        assert!(
            !body.contains(['\u{85}', '\u{2028}', '\u{2029}']) && !body.contains(char::is_control)
        );
        assert_eq!(serde_json::from_str::<String>(body).unwrap(), text);
    }

    #[test]
    fn chunks_are_json_in_events() {
        let head = r#"data: {"id":"i\"d","object":"chunk","created":7,"model":"m","choices":["#;
        let usage = |total: u32, new: u32| {
            format!(
                r#""usage":{{"prompt_tokens":1,"total_tokens":{total},"completion_tokens":{new},"prompt_tokens_details":{{"cached_tokens":0}}}}"#
            )
        };
        let last = format!("{head}],{}}}\n\n", usage(4, 3));
        for egress in [EgressMode::Direct, EgressMode::Naive] {
            let chunks = |include_usage, continuous_usage| {
                write(Streaming { include_usage, continuous_usage }, egress)
            };
            assert_eq!(chunks(false, false), format!("{head}1]}}\n\n"));
            assert_eq!(chunks(true, false), format!("{head}1],\"usage\":null}}\n\n{last}"));
            assert_eq!(chunks(true, true), format!("{head}1],{}}}\n\n{last}", usage(3, 2)));
        }
    }

    #[test]
    fn a_cut_event_is_the_event() {
        #[derive(Serialize)]
        struct Choice<'a> {
            text: &'a str,
            finish: Option<()>,
        }
        for include_usage in [false, true] {
            let streaming = Streaming { include_usage, continuous_usage: false };
            // The model's name may look like the text that `cut` searches for.
            let model = r#"text":"","text":""#;
            let chunks =
                |egress| Chunks::new(&name("id", 1), "o", model, streaming, egress).unwrap();
            let prepared = chunks(EgressMode::Direct);
            let cut = prepared.cut(&Choice { text: "", finish: None }, "text").unwrap().unwrap();
            for text in ["", "x", "a \"quoted\"\n\u{2028} é"] {
                let (mut whole, mut parts) = (Vec::new(), Vec::new());
                let choice = Choice { text, finish: None };
                prepared.choice(&choice, || Usage::new(0, 0, Some(0)), &mut whole).unwrap();
                cut.write(text, &mut parts).unwrap();
                assert_eq!(String::from_utf8(parts), String::from_utf8(whole));
            }
            let naive = chunks(EgressMode::Naive);
            assert!(naive.cut(&Choice { text: "", finish: None }, "text").unwrap().is_none());
        }
    }
}
