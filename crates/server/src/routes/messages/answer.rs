//! A model's answer as Anthropic's content blocks: as a whole, and as the events of a stream.

use forebay_api::{ApiError, Usage};
use forebay_dialect::Part;
use forebay_egress::{Delta, End, EventEncoder, Tally, events};
use serde::Serialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::routes::chat::CallIds;
use crate::shapes;

/// Builds the JSON of a message.
pub(super) struct Writer {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) ids: CallIds,
}

impl Writer {
    /// Returns the whole message.
    pub(super) fn message(&self, delta: &Delta, tally: &Tally) -> Value {
        let mut content: Vec<Value> = Vec::new();
        let mut arguments = String::new();
        for part in delta.parts.iter() {
            match part {
                Part::Content(text) => append(&mut content, "text", "text", text),
                Part::Reasoning(text) => append(&mut content, "thinking", "thinking", text),
                Part::Call { index, name, id } => {
                    close_call(&mut content, &mut arguments);
                    let id = id.map_or_else(|| self.ids.name(0, index), str::to_owned);
                    content.push(json!({"type": "tool_use", "id": id, "name": name, "input": {}}));
                }
                // Arguments belong to the call before them.
                Part::Arguments { text, .. } => arguments.push_str(text),
            }
        }
        close_call(&mut content, &mut arguments);
        for block in &mut content {
            if let Some(thinking) = block["thinking"].as_str() {
                block["signature"] = json!(signature(xxh3_128(thinking.as_bytes())));
            }
        }
        let (stop_reason, stop_sequence) = stop(delta);
        let mut message = self.opening();
        message["content"] = Value::Array(content);
        message["stop_reason"] = json!(stop_reason);
        message["stop_sequence"] = json!(stop_sequence);
        message["usage"] = usage(&tally.usage());
        message
    }

    /// Returns the message before any content.
    fn opening(&self) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
        })
    }
}

/// Appends text to the last block if that block is of this kind, otherwise to a new block.
fn append(content: &mut Vec<Value>, kind: &str, field: &str, text: &str) {
    match content.last_mut() {
        Some(last) if last["type"] == kind => {
            if let Value::String(before) = &mut last[field] {
                before.push_str(text);
            }
        }
        _ => content.push(json!({"type": kind, field: text})),
    }
}

/// Sets the last call's arguments. Arguments that are not valid JSON, because they were truncated,
/// are sent in the form that Anthropic documents.
fn close_call(content: &mut [Value], arguments: &mut String) {
    let arguments = std::mem::take(arguments);
    let call = content.iter_mut().rev().find(|block| block["type"] == "tool_use");
    if let (Some(call), false) = (call, arguments.is_empty()) {
        call["input"] = match serde_json::from_str(&arguments) {
            Ok(input @ Value::Object(_)) => input,
            _ => json!({"INVALID_JSON": arguments}),
        };
    }
}

/// Returns a replacement for the signature that Anthropic adds to thinking. Clients send the
/// signature back, and this server ignores it.
fn signature(hash: u128) -> String {
    format!("{hash:032x}")
}

/// Returns the stop reason of the message, and the stop sequence that matched.
fn stop(delta: &Delta) -> (Option<&'static str>, Option<&str>) {
    let sequence = match &delta.end {
        Some(End::Text(text)) => Some(text.as_str()),
        _ => None,
    };
    let reason = delta.finish_reason().map(|reason| match reason {
        "tool_calls" => "tool_use",
        // The client forced this tool call. OpenAI's finish reason is then not `tool_calls`.
        _ if delta.end == Some(End::Call) => "tool_use",
        "length" => "max_tokens",
        _ if sequence.is_some() => "stop_sequence",
        _ => "end_turn",
    });
    // If a call stopped the answer, no stop sequence is reported.
    (reason, sequence.filter(|_| reason == Some("stop_sequence")))
}

fn usage(usage: &Usage) -> Value {
    let cached = usage.prompt_tokens_details.map_or(0, |details| details.cached_tokens);
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    })
}

/// The kind of the open block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    Call,
}

/// Writes the events of a stream.
pub(super) struct Blocks {
    writer: Writer,
    /// True once `message_start` was sent.
    opened: bool,
    open: Option<Kind>,
    /// The number of blocks so far, including the open one.
    count: u32,
    /// The hash of the open thinking block.
    hash: Xxh3,
}

impl Blocks {
    pub(super) fn new(writer: Writer) -> Self {
        Self { writer, opened: false, open: None, count: 0, hash: Xxh3::new() }
    }

    /// Closes the open block, and opens one of this kind. An open block of text or thinking of this
    /// kind stays open instead.
    fn block(
        &mut self,
        kind: Kind,
        begin: impl FnOnce() -> Value,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        if self.open == Some(kind) && kind != Kind::Call {
            return Ok(());
        }
        self.close(out)?;
        self.open = Some(kind);
        self.count += 1;
        let index = self.count - 1;
        event("content_block_start", json!({"index": index, "content_block": begin()}), out)
    }

    /// Appends a delta to the open block.
    fn go_on(&self, delta: Value, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let index = self.count.saturating_sub(1);
        event("content_block_delta", json!({"index": index, "delta": delta}), out)
    }

    fn close(&mut self, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let Some(kind) = self.open.take() else { return Ok(()) };
        if kind == Kind::Thinking {
            let signature = signature(self.hash.digest128());
            self.hash.reset();
            self.go_on(json!({"type": "signature_delta", "signature": signature}), out)?;
        }
        event("content_block_stop", json!({"index": self.count - 1}), out)
    }
}

/// Appends an event; its data contains its name again.
fn event(name: &str, data: Value, out: &mut Vec<u8>) -> serde_json::Result<()> {
    #[derive(Serialize)]
    struct NamedEvent<'a> {
        #[serde(rename = "type")]
        kind: &'a str,
        #[serde(flatten)]
        data: &'a Value,
    }
    events::named(name, &NamedEvent { kind: name, data: &data }, out)
}

impl EventEncoder for Blocks {
    fn delta(
        &mut self,
        _: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        if !self.opened {
            self.opened = true;
            let mut message = self.writer.opening();
            message["usage"] = usage(&tally.usage_before());
            event("message_start", json!({"message": message}), out)?;
            event("ping", json!({}), out)?;
        }
        for part in delta.parts.iter() {
            match part {
                Part::Content(text) => {
                    self.block(Kind::Text, || json!({"type": "text", "text": ""}), out)?;
                    self.go_on(json!({"type": "text_delta", "text": text}), out)?;
                }
                Part::Reasoning(text) => {
                    let begin = || json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.block(Kind::Thinking, begin, out)?;
                    self.hash.update(text.as_bytes());
                    self.go_on(json!({"type": "thinking_delta", "thinking": text}), out)?;
                }
                Part::Call { index, name, id } => {
                    let id = id.map_or_else(|| self.writer.ids.name(0, index), str::to_owned);
                    let begin = || json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.block(Kind::Call, begin, out)?;
                }
                Part::Arguments { text, .. } => {
                    self.go_on(json!({"type": "input_json_delta", "partial_json": text}), out)?;
                }
            }
        }
        if delta.end.is_some() {
            self.close(out)?;
            let (stop_reason, stop_sequence) = stop(delta);
            let ended = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
            let usage = usage(&tally.usage());
            event("message_delta", json!({"delta": ended, "usage": usage}), out)?;
        }
        Ok(())
    }

    fn end(&mut self, _: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        event("message_stop", json!({}), out)
    }

    fn is_said_done(&self) -> bool {
        false
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> serde_json::Result<()> {
        events::named("error", &shapes::anthropic(error), out)
    }

    fn resumable(&self) -> bool {
        true
    }

    fn resume(&mut self, before: &Delta) {
        // To restore the state, encode the part that another brain has sent, and discard the
        // encoded events.
        if before.tokens.is_empty() {
            return;
        }
        let mut before = before.clone();
        let _ = self.delta(0, &mut before, &Tally::default(), &mut Vec::new());
    }
}
