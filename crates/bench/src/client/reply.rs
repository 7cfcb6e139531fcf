//! The response to a request. It is stored cheaply during the run, and converted to a [`Record`]
//! afterwards.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::record::{Chunk, Outcome, Record};

use super::backend::Dialect;
use super::scan::{self, Fields};

/// The planned properties of a request, from the schedule and the dataset.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PlannedRequest {
    /// Text tokens of the prompt, counted by the client's tokenizer.
    pub(crate) text_tokens: u32,
    /// The number of tokens to generate.
    pub(crate) output_tokens: u32,
    /// True if the prompt contains images.
    pub(crate) images: bool,
}

/// The part of a response that was received so far.
#[derive(Debug)]
pub(crate) struct Reply {
    /// When sending began; this includes the set-up of a new connection if one was needed. All
    /// times here are microseconds from the start of the run.
    pub(crate) sent_us: u64,
    /// When the last byte was read, or the request failed.
    pub(crate) end_us: u64,
    dialect: Dialect,
    /// The raw JSON string content, with escapes. `Chunk::text_bytes` counts these bytes until
    /// [`Reply::into_record`] decodes them.
    text: Vec<u8>,
    chunks: Vec<Chunk>,
    /// True if each event repeats the whole text so far, as /generate does by default.
    whole_text: bool,
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    /// True if every chunk so far reported the token count.
    counted: bool,
    done: bool,
    error: Option<String>,
}

impl Reply {
    /// Creates an empty reply. `expected_chunks`: the number of chunks for which memory is
    /// allocated.
    pub(super) fn new(dialect: Dialect, sent_us: u64, expected_chunks: usize) -> Self {
        Self {
            sent_us,
            end_us: sent_us,
            dialect,
            text: Vec::new(),
            chunks: Vec::with_capacity(expected_chunks),
            whole_text: dialect == Dialect::Generate,
            prompt_tokens: None,
            completion_tokens: None,
            counted: true,
            done: false,
            error: None,
        }
    }

    /// True if the request finished without an error.
    pub(crate) fn succeeded(&self) -> bool {
        self.error.is_none()
    }

    /// The number of chunks that were received so far.
    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Handles the payload of an event of a stream.
    pub(super) fn event(&mut self, payload: &[u8], at_us: u64) {
        if payload == b"[DONE]" {
            self.done = true;
            return;
        }
        let fields = match self.dialect {
            Dialect::Completions => scan::completions(payload),
            Dialect::Chat => scan::chat(payload),
            Dialect::Generate => scan::generate(payload),
            Dialect::Embeddings => None,
        };
        match fields {
            Some(fields) => self.fields(fields, at_us),
            None => self.document(payload, at_us),
        }
    }

    fn fields(&mut self, fields: Fields<'_>, at_us: u64) {
        let new = if self.whole_text {
            self.grow(fields.text[0], fields.finished)
        } else {
            fields.text.iter().for_each(|text| self.text.extend_from_slice(text));
            fields.text[0].len() + fields.text[1].len()
        };
        self.prompt_tokens = fields.prompt_tokens.or(self.prompt_tokens);
        let tokens = match fields.completion_tokens {
            Some(count) => count.saturating_sub(self.completion_tokens.replace(count).unwrap_or(0)),
            None => 0,
        };
        let text_bytes = u32::try_from(new).unwrap_or(u32::MAX);
        // A server that reports the token count in every event may report a token without text,
        // such as end-of-sequence.
        if text_bytes > 0 || (tokens > 0 && self.counted && !self.chunks.is_empty()) {
            self.counted &= fields.completion_tokens.is_some();
            self.chunks.push(Chunk { at_us, text_bytes, tokens });
        }
    }

    /// Adds the text of an event, which may repeat the whole text so far. Returns the number of new
    /// bytes.
    fn grow(&mut self, text: &[u8], finished: bool) -> usize {
        if let Some(new) = text.strip_prefix(&self.text[..]) {
            self.text.extend_from_slice(new);
            return new.len();
        }
        if text.is_empty() {
            return 0;
        }
        if finished && self.text.starts_with(text) {
            self.cut(text.len());
            return 0;
        }
        self.restart_as_new();
        self.text.extend_from_slice(text);
        text.len()
    }

    /// Handles a last event with less text than before. The missing text is part of a stop string
    /// that had been streamed already.
    fn cut(&mut self, length: usize) {
        self.text.truncate(length);
        let mut left = length;
        for chunk in &mut self.chunks {
            let kept = left.min(chunk.text_bytes as usize);
            chunk.text_bytes = u32::try_from(kept).unwrap_or(u32::MAX);
            left -= kept;
        }
    }

    /// Handles an event whose text does not begin with the text so far: the server sends only new
    /// text in each event, not the whole text.
    fn restart_as_new(&mut self) {
        let (mut end, mut joined) = (0, Vec::new());
        for chunk in &mut self.chunks {
            end += chunk.text_bytes as usize;
            joined.extend_from_slice(&self.text[..end]);
            chunk.text_bytes = u32::try_from(end).unwrap_or(u32::MAX);
        }
        self.whole_text = false;
        self.text = joined;
    }

    /// Handles an event of an unusual format, or a response that is not a stream.
    fn document(&mut self, json: &[u8], at_us: u64) {
        let Ok(document) = serde_json::from_slice::<Value>(json) else {
            self.fail(format!("not JSON: {}", excerpt(json)));
            return;
        };
        if let Some(message) = error_message(&document) {
            self.fail(message);
            return;
        }
        // /generate responds to a list of prompts with a list, even if it has one element.
        let document = document.get(0).unwrap_or(&document);
        let choice = &document["choices"][0];
        let message =
            if choice["delta"].is_object() { &choice["delta"] } else { &choice["message"] };
        let reasoning =
            ["reasoning_content", "reasoning"].iter().find_map(|key| message[*key].as_str());
        let content = [&document["text"], &choice["text"], &message["content"]]
            .into_iter()
            .find_map(Value::as_str)
            .map_or_else(
                || calls_and_refusal(message),
                |text| text.to_owned() + &calls_and_refusal(message),
            );
        let usage = if self.dialect == Dialect::Generate { "meta_info" } else { "usage" };
        let count = |name: &str| u32::try_from(document[usage][name].as_u64()?).ok();
        let (reasoning, content) = (escaped(reasoning.unwrap_or("")), escaped(&content));
        let text = match self.dialect {
            Dialect::Generate => [&content[..], b""],
            _ => [&reasoning[..], &content[..]],
        };
        self.fields(
            Fields {
                text,
                prompt_tokens: count("prompt_tokens"),
                completion_tokens: count("completion_tokens"),
                finished: true,
            },
            at_us,
        );
    }

    /// Handles the end of a stream.
    pub(super) fn end_of_stream(&mut self) {
        if !self.done {
            self.fail("the stream ended without [DONE]".into());
        }
    }

    /// Handles a response that is not a stream.
    pub(super) fn whole(&mut self, body: &[u8], at_us: u64) {
        if self.dialect != Dialect::Embeddings {
            return self.document(body, at_us);
        }
        match serde_json::from_slice::<Embeddings>(body) {
            Ok(Embeddings { usage, .. }) => {
                self.prompt_tokens = usage.map(|usage| usage.prompt_tokens);
                self.completion_tokens = Some(0);
            }
            Err(_) => self.document(body, at_us),
        }
    }

    /// Handles a response with another status than 200.
    pub(super) fn refused(&mut self, status: u16, body: &[u8]) {
        let message = serde_json::from_slice(body).ok().as_ref().and_then(error_message);
        let message = message.unwrap_or_else(|| excerpt(body));
        self.fail(format!("HTTP {status}: {message}").trim_end_matches([' ', ':']).to_owned());
    }

    /// Records a failure; only the first one counts.
    pub(super) fn fail(&mut self, message: String) {
        self.error.get_or_insert(message);
    }

    /// Returns the record. Also returns true if its chunks have exact token counts; otherwise their
    /// counts are 0 and have to be estimated. A response without content is a failure, because it
    /// has no first token to time.
    pub(crate) fn into_record(
        mut self,
        intended_us: u64,
        asked: &PlannedRequest,
    ) -> (Record, bool) {
        if self.dialect != Dialect::Embeddings && self.chunks.is_empty() && asked.output_tokens > 0
        {
            self.fail("the answer has no text, reasoning or call".into());
        }
        let mut chunks = self.chunks;
        let output_tokens = self.completion_tokens.unwrap_or(match &self.error {
            None => asked.output_tokens,
            Some(_) => 0,
        });
        let mut text = String::with_capacity(self.text.len());
        let mut raw = &self.text[..];
        for chunk in &mut chunks {
            let (piece, rest) = raw.split_at((chunk.text_bytes as usize).min(raw.len()));
            let before = text.len();
            scan::unescape(piece, &mut text);
            chunk.text_bytes = u32::try_from(text.len() - before).unwrap_or(u32::MAX);
            raw = rest;
        }
        let exact = share_counts(&mut chunks, output_tokens, self.counted);
        let input_tokens = self.prompt_tokens.unwrap_or(asked.text_tokens);
        let record = Record {
            intended_us,
            sent_us: self.sent_us,
            end_us: self.end_us,
            chunks,
            input_tokens,
            vision_tokens: if asked.images {
                input_tokens.saturating_sub(asked.text_tokens)
            } else {
                0
            },
            output_tokens,
            text,
            outcome: match self.error {
                None => Outcome::Success,
                Some(message) => Outcome::Failed(message),
            },
        };
        (record, exact)
    }
}

/// Assigns tokens to the chunks if no estimate is necessary. Returns true if they were assigned.
fn share_counts(chunks: &mut [Chunk], output_tokens: u32, counted: bool) -> bool {
    if counted {
        let told: u32 = chunks.iter().map(|chunk| chunk.tokens).sum();
        if let Some(last) = chunks.last_mut() {
            last.tokens += output_tokens.saturating_sub(told);
        }
        return true;
    }
    let each = u32::from(chunks.len() == output_tokens as usize);
    chunks.iter_mut().for_each(|chunk| chunk.tokens = each);
    each == 1
}

#[derive(Deserialize)]
struct Embeddings {
    #[serde(rename = "data")]
    _data: Vec<IgnoredAny>,
    usage: Option<EmbeddingUsage>,
}

#[derive(Deserialize)]
struct EmbeddingUsage {
    prompt_tokens: u32,
}

/// The text of a message outside its content: names and arguments of tool calls, and a refusal.
fn calls_and_refusal(message: &Value) -> String {
    let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
    let functions = calls.iter().flat_map(|call| [&call["function"], &call["custom"]]);
    let called = functions.chain([&message["function_call"]]);
    let texts = called.flat_map(|called| ["name", "arguments", "input"].map(|key| &called[key]));
    texts.chain([&message["refusal"]]).filter_map(Value::as_str).collect()
}

fn escaped(text: &str) -> Vec<u8> {
    let quoted = Value::from(text).to_string().into_bytes();
    quoted[1..quoted.len() - 1].to_vec()
}

/// The message of an error, in the formats of OpenAI, vLLM, SGLang and llama.cpp.
fn error_message(document: &Value) -> Option<String> {
    let error = match document.get("error") {
        Some(error) if !error.is_null() => error,
        _ if document["object"] == "error" => document,
        _ if document.get("detail").is_some() => &document["detail"],
        _ => return None,
    };
    let message = error.get("message").unwrap_or(error);
    Some(message.as_str().map_or_else(|| message.to_string(), str::to_owned))
}

/// The beginning of a body, for error messages.
fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.trim().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: PlannedRequest =
        PlannedRequest { text_tokens: 9, output_tokens: 5, images: false };

    fn read(dialect: Dialect, events: &[&str]) -> (Record, bool) {
        let mut reply = Reply::new(dialect, 0, 0);
        for (at, event) in events.iter().enumerate() {
            reply.event(event.as_bytes(), at as u64);
        }
        reply.end_of_stream();
        reply.into_record(0, &ASKED)
    }

    fn shape(record: &Record) -> Vec<(u64, u32, u32)> {
        record.chunks.iter().map(|chunk| (chunk.at_us, chunk.text_bytes, chunk.tokens)).collect()
    }

    #[test]
    fn one_chunk_a_token_needs_no_guess() {
        let events = [
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"\u00e9\n"}}],"usage":null}"#,
            r#"{"choices":[{"delta":{"content":"xyz"}}],"usage":null}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"length"}],"usage":null}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":2}}"#,
            "[DONE]",
        ];
        let (record, exact) = read(Dialect::Chat, &events);
        assert!(exact);
        assert_eq!(record.outcome, Outcome::Success);
        assert_eq!(record.text, "é\nxyz");
        assert_eq!((record.input_tokens, record.output_tokens), (12, 2));
        assert_eq!(shape(&record), [(1, 3, 1), (2, 3, 1)]);
    }

    #[test]
    fn merged_tokens_without_counts_are_left_to_guess() {
        let events = [
            r#"{"choices":[{"text":"ab"}]}"#,
            r#"{"choices":[{"text":"c"}],"usage":{"prompt_tokens":12,"completion_tokens":3}}"#,
            "[DONE]",
        ];
        let (record, exact) = read(Dialect::Completions, &events);
        assert!(!exact);
        assert_eq!(record.output_tokens, 3);
        assert_eq!(shape(&record), [(0, 2, 0), (1, 1, 0)]);
        let (record, _) = read(Dialect::Completions, &[r#"{"choices":[{"text":"ab"}]}"#, "[DONE]"]);
        assert_eq!((record.input_tokens, record.output_tokens), (9, 5), "the requested number");
    }

    #[test]
    fn continuous_usage_gives_exact_tokens() {
        let event = |text: &str, count: u32| {
            format!(
                r#"{{"choices":[{{"text":"{text}"}}],"usage":{{"prompt_tokens":4,"completion_tokens":{count}}}}}"#
            )
        };
        let events = [event("ab", 2), event("c", 3), event("", 4)];
        let events = [&events[0], &events[1], &events[2], "[DONE]"];
        let (record, exact) = read(Dialect::Completions, &events);
        assert!(exact);
        assert_eq!(shape(&record), [(0, 2, 2), (1, 1, 1), (2, 0, 1)]);
    }

    fn generated(text: &str, count: u32) -> String {
        format!(
            r#"{{"text": "{text}", "meta_info": {{"prompt_tokens": 6, "completion_tokens": {count}, "x": 1}}}}"#
        )
    }

    #[test]
    fn generate_may_send_all_text_or_only_the_new() {
        let whole = [generated("ab", 1), generated("abc\\n", 3), generated("abc\\n", 4)];
        let new = [generated("ab", 1), generated("c\\n", 3), generated("", 4)];
        for events in [whole, new] {
            let (record, exact) =
                read(Dialect::Generate, &[&events[0], &events[1], &events[2], "[DONE]"]);
            assert!(exact);
            assert_eq!(record.text, "abc\n");
            assert_eq!((record.input_tokens, record.output_tokens), (6, 4));
            assert_eq!(shape(&record), [(0, 2, 1), (1, 2, 2), (2, 0, 1)]);
        }
    }

    #[test]
    fn new_pieces_that_begin_alike_are_not_lost() {
        let events =
            [generated("a", 1), generated("ab", 2), generated("abc", 3), generated("x", 4)];
        let events: Vec<&str> = events.iter().map(String::as_str).chain(["[DONE]"]).collect();
        let (record, _) = read(Dialect::Generate, &events);
        assert_eq!(record.text, "aababcx");
        assert_eq!(shape(&record), [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 1, 1)]);
    }

    #[test]
    fn the_last_text_may_be_cut_before_a_stop_string() {
        let finished = r#"{"text": "abc", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 3}}"#;
        let events = [&generated("ab", 1), &generated("abcStop", 2), finished, "[DONE]"];
        let (record, _) = read(Dialect::Generate, &events);
        assert_eq!(record.text, "abc");
        assert_eq!(shape(&record), [(0, 2, 1), (1, 1, 1), (2, 0, 1)]);
    }

    #[test]
    fn a_stream_of_calls_alone_has_a_first_token() {
        let events = [
            r#"{"choices":[{"delta":{"role":"assistant","content":null}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"x\": 1}"}}]}}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":7}}"#,
            "[DONE]",
        ];
        let (record, _) = read(Dialect::Chat, &events);
        assert_eq!(record.outcome, Outcome::Success);
        assert_eq!(record.text, "f{\"x\": 1}");
        assert_eq!(shape(&record), [(1, 1, 0), (2, 8, 0)]);
        let refusal = r#"{"choices":[{"delta":{"refusal":"no"}}]}"#;
        let (record, _) = read(Dialect::Chat, &[refusal, "[DONE]"]);
        assert_eq!((record.text.as_str(), shape(&record)[0].0), ("no", 0));
    }

    #[test]
    fn an_answer_without_content_is_a_failure() {
        let failed = Outcome::Failed("the answer has no text, reasoning or call".into());
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":7}}"#;
        for (dialect, events) in [
            (Dialect::Chat, vec![r#"{"choices":[{"delta":{"content":""}}]}"#, usage, "[DONE]"]),
            (Dialect::Completions, vec![usage, "[DONE]"]),
            (
                Dialect::Generate,
                vec![r#"{"text":"","meta_info":{"completion_tokens":7}}"#, "[DONE]"],
            ),
        ] {
            assert_eq!(read(dialect, &events).0.outcome, failed, "{dialect:?}");
        }
        let mut reply = Reply::new(Dialect::Completions, 0, 0);
        reply.event(usage.as_bytes(), 1);
        reply.event(b"[DONE]", 2);
        let nothing_asked = PlannedRequest { output_tokens: 0, ..ASKED };
        assert_eq!(reply.into_record(0, &nothing_asked).0.outcome, Outcome::Success);
    }

    #[test]
    fn failures_in_a_stream_are_failures() {
        let failed = |events: &[&str]| match read(Dialect::Completions, events).0.outcome {
            Outcome::Failed(message) => message,
            Outcome::Success => panic!("{events:?} did not fail"),
        };
        let text = r#"{"choices":[{"text":"ab"}]}"#;
        assert_eq!(failed(&[text, r#"{"error":{"message":"boom","code":500}}"#, "[DONE]"]), "boom");
        assert_eq!(failed(&[r#"{"object":"error","message":"old"}"#, "[DONE]"]), "old");
        assert_eq!(failed(&[text]), "the stream ended without [DONE]");
        assert_eq!(failed(&["nonsense", "[DONE]"]), "not JSON: nonsense");
    }

    #[test]
    fn answers_that_are_no_streams() {
        let whole = |dialect, body: &str| {
            let mut reply = Reply::new(dialect, 0, 0);
            reply.whole(body.as_bytes(), 8);
            reply.into_record(0, &PlannedRequest { images: dialect == Dialect::Chat, ..ASKED }).0
        };
        let chat = r#"{"choices":[{"message":{"reasoning":"r","content":"c"}}],"usage":{"prompt_tokens":30,"completion_tokens":2}}"#;
        let record = whole(Dialect::Chat, chat);
        assert_eq!((record.text.as_str(), shape(&record)), ("rc", vec![(8, 2, 2)]));
        assert_eq!((record.input_tokens, record.vision_tokens), (30, 21));
        let record = whole(Dialect::Generate, &format!("[{}]", generated("ab", 3)));
        assert_eq!((record.text.as_str(), shape(&record)), ("ab", vec![(8, 2, 3)]));
        let record = whole(
            Dialect::Embeddings,
            r#"{"data":[{"embedding":[1]}],"usage":{"prompt_tokens":3}}"#,
        );
        assert_eq!(
            (record.input_tokens, record.output_tokens, record.outcome),
            (3, 0, Outcome::Success)
        );
        let record = whole(Dialect::Embeddings, r#"{"error":"no"}"#);
        assert_eq!(record.outcome, Outcome::Failed("no".into()));
    }

    #[test]
    fn a_refusal_says_why() {
        let refused = |body: &str| {
            let mut reply = Reply::new(Dialect::Chat, 0, 0);
            reply.refused(429, body.as_bytes());
            reply.into_record(0, &ASKED).0.outcome
        };
        let failed = |message: &str| Outcome::Failed(message.into());
        assert_eq!(refused(r#"{"error":{"message":"full"}}"#), failed("HTTP 429: full"));
        assert_eq!(refused("busy\n"), failed("HTTP 429: busy"));
        assert_eq!(refused(""), failed("HTTP 429"));
    }
}
