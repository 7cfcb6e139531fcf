//! A model's answer as items of the Responses API: as a whole, and as the events of a stream. The
//! same code builds both.

use std::collections::HashMap;

use forebay_api::{ApiError, ToolKind, Usage, sealed};
use forebay_dialect::Part;
use forebay_egress::{Delta, EventEncoder, Tally, events};
use forebay_http::Charge;
use serde::Serialize;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::input::Input;
use super::keep::Keeper;
use crate::routes::chat::CallIds;

/// The maximum number of events per token. A stream that another brain continues starts its
/// sequence numbers above all numbers that may have been used.
const EVENTS_A_TOKEN: u64 = 16;

/// The fields of a response that are the same in all its states.
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    /// The request's parameters that the response repeats.
    pub(super) echo: Map<String, Value>,
    pub(super) ids: CallIds,
    pub(super) kinds: HashMap<String, ToolKind>,
    /// True if reasoning is also included in sealed form.
    pub(super) sealed: bool,
    /// The charge for the request's data, which is kept until the response is finished.
    pub(super) _held: Charge,
}

/// A response that is being generated.
pub(super) struct Answer {
    head: Head,
    /// Stores the response; `None` if it is not to be stored.
    keeper: Option<Keeper>,
    /// The complete items.
    output: Vec<Value>,
    open: Option<Open>,
    opened: bool,
    sequence: u64,
    /// The finish reason, as [`Delta::finish_reason`] returns it.
    finish: Option<&'static str>,
}

/// The last item, to which the model's output is added.
struct Open {
    id: String,
    kind: Kind,
}

enum Kind {
    Message { text: String },
    Reasoning { text: String },
    Function { call: Value, arguments: String },
    Custom { call: Value, input: Input },
}

/// Writes events; writes nothing for a non-streamed response.
struct Events<'a> {
    out: Option<&'a mut Vec<u8>>,
    sequence: &'a mut u64,
}

/// A delta of a text.
#[derive(Serialize)]
struct Piece<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    delta: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
    sequence_number: u64,
}

impl Events<'_> {
    /// Appends an event with these fields.
    fn send(&mut self, name: &str, fields: impl FnOnce() -> Value) -> serde_json::Result<()> {
        let Some(out) = &mut self.out else { return Ok(()) };
        let mut event = fields();
        event["type"] = json!(name);
        event["sequence_number"] = json!(*self.sequence);
        *self.sequence += 1;
        events::named(name, &event, out)
    }

    /// Appends an event about an item's content part, if the item has one.
    fn part(&mut self, name: &str, open: &Open, index: usize) -> serde_json::Result<()> {
        if !matches!(open.kind, Kind::Message { .. } | Kind::Reasoning { .. }) {
            return Ok(());
        }
        self.send(name, || {
            json!({
                "item_id": open.id,
                "output_index": index,
                "content_index": 0,
                "part": open.part(),
            })
        })
    }

    /// Appends a delta of a text.
    fn piece(&mut self, kind: &str, place: (&str, usize), delta: &str) -> serde_json::Result<()> {
        let Some(out) = self.out.as_deref_mut().filter(|_| !delta.is_empty()) else {
            return Ok(());
        };
        let of_call = kind.ends_with("arguments.delta") || kind.ends_with("input.delta");
        let piece = Piece {
            kind,
            item_id: place.0,
            output_index: place.1,
            content_index: (!of_call).then_some(0),
            delta,
            logprobs: (kind == "response.output_text.delta").then_some([]),
            sequence_number: *self.sequence,
        };
        *self.sequence += 1;
        events::named(kind, &piece, out)
    }
}

impl Open {
    /// Returns the item without output, for the event that announces the item.
    fn announced(&self) -> Value {
        let mut item = self.item("in_progress", "");
        match &self.kind {
            Kind::Message { .. } | Kind::Reasoning { .. } => item["content"] = json!([]),
            Kind::Function { .. } | Kind::Custom { .. } => {}
        }
        item
    }

    /// Returns the item; `text` is the arguments or input of a call.
    fn item(&self, status: &str, text: &str) -> Value {
        let mut item = match &self.kind {
            Kind::Message { .. } => {
                json!({"type": "message", "role": "assistant", "content": [self.part()]})
            }
            Kind::Reasoning { .. } => {
                json!({"type": "reasoning", "summary": [], "content": [self.part()]})
            }
            Kind::Function { call, .. } | Kind::Custom { call, .. } => call.clone(),
        };
        match &self.kind {
            Kind::Function { .. } => item["arguments"] = json!(text),
            Kind::Custom { .. } => item["input"] = json!(text),
            Kind::Message { .. } | Kind::Reasoning { .. } => {}
        }
        item["id"] = json!(self.id);
        item["status"] = json!(status);
        item
    }

    /// Returns the only part of the item's content.
    fn part(&self) -> Value {
        match &self.kind {
            Kind::Message { text } => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
            Kind::Reasoning { text } => json!({"type": "reasoning_text", "text": text}),
            Kind::Function { .. } | Kind::Custom { .. } => Value::Null,
        }
    }
}

impl Answer {
    pub(super) fn new(head: Head, keeper: Option<Keeper>) -> Self {
        Self {
            head,
            keeper,
            output: Vec::new(),
            open: None,
            opened: false,
            sequence: 0,
            finish: None,
        }
    }

    /// Returns the complete response, and stores it if the request requires that.
    pub(super) fn whole(mut self, delta: &Delta, tally: &Tally) -> serde_json::Result<Value> {
        self.add(delta, None)?;
        Ok(self.complete(&tally.usage()))
    }

    /// Returns the response with this status and without output.
    pub(super) fn state(&self, status: &str) -> Value {
        let mut response = Value::Object(self.head.echo.clone());
        response["id"] = json!(self.head.id);
        response["object"] = json!("response");
        response["created_at"] = json!(self.head.created);
        response["status"] = json!(status);
        response["model"] = json!(self.head.model);
        response["output"] = json!([]);
        response["error"] = Value::Null;
        response["incomplete_details"] = Value::Null;
        response["usage"] = Value::Null;
        response["user"] = Value::Null;
        response
    }

    /// Returns the response with the status `failed` and this error.
    pub(super) fn failed(&self, error: &ApiError) -> Value {
        let mut response = self.state("failed");
        let told = error.body().error;
        response["output"] = json!(self.output);
        response["error"] = json!({
            "code": told.code.unwrap_or(told.kind),
            "message": told.message,
        });
        response
    }

    /// Returns the finished response, and stores it.
    fn complete(&mut self, usage: &Usage) -> Value {
        let cut = self.finish == Some("length");
        let mut response = self.state(if cut { "incomplete" } else { "completed" });
        if cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["output"] = Value::Array(std::mem::take(&mut self.output));
        response["usage"] = told(usage);
        if let Some(keeper) = self.keeper.take() {
            keeper.keep(&self.head.id, &response);
        }
        response
    }

    /// Adds a delta of the model's output.
    fn add(&mut self, delta: &Delta, mut out: Option<&mut Vec<u8>>) -> serde_json::Result<()> {
        for part in delta.parts.iter() {
            self.part(part, out.as_deref_mut())?;
        }
        if delta.end.is_some() {
            self.finish = delta.finish_reason();
            let status = if self.finish == Some("length") { "incomplete" } else { "completed" };
            self.close(status, out)?;
        }
        Ok(())
    }

    fn part(&mut self, part: Part<'_>, mut out: Option<&mut Vec<u8>>) -> serde_json::Result<()> {
        let fits = matches!(
            (&part, self.open.as_ref().map(|open| &open.kind)),
            (Part::Content(_), Some(Kind::Message { .. }))
                | (Part::Reasoning(_), Some(Kind::Reasoning { .. }))
                | (Part::Arguments { .. }, Some(Kind::Function { .. } | Kind::Custom { .. }))
        );
        if !fits {
            self.close("completed", out.as_deref_mut())?;
            self.begin(&part, out.as_deref_mut())?;
        }
        let index = self.output.len();
        let Some(open) = &mut self.open else { return Ok(()) };
        let mut events = Events { out, sequence: &mut self.sequence };
        let place = (&*open.id, index);
        match (part, &mut open.kind) {
            (Part::Content(new), Kind::Message { text }) => {
                text.push_str(new);
                events.piece("response.output_text.delta", place, new)
            }
            (Part::Reasoning(new), Kind::Reasoning { text }) => {
                text.push_str(new);
                events.piece("response.reasoning_text.delta", place, new)
            }
            (Part::Arguments { text, .. }, Kind::Function { arguments, .. }) => {
                arguments.push_str(text);
                events.piece("response.function_call_arguments.delta", place, text)
            }
            (Part::Arguments { text, .. }, Kind::Custom { input, .. }) => {
                events.piece("response.custom_tool_call_input.delta", place, input.push(text))
            }
            _ => Ok(()),
        }
    }

    /// Opens the item to which a part belongs.
    fn begin(&mut self, part: &Part<'_>, out: Option<&mut Vec<u8>>) -> serde_json::Result<()> {
        let (prefix, kind) = match *part {
            Part::Content(_) => ("msg", Kind::Message { text: String::new() }),
            Part::Reasoning(_) => ("rs", Kind::Reasoning { text: String::new() }),
            Part::Call { index, name, id } => {
                let id = id.map_or_else(|| self.head.ids.name(0, index), str::to_owned);
                match self.head.kinds.get(name) {
                    Some(ToolKind::Custom) => {
                        let call = json!({"type": "custom_tool_call", "call_id": id, "name": name});
                        ("ctc", Kind::Custom { call, input: Input::default() })
                    }
                    known => {
                        let mut call =
                            json!({"type": "function_call", "call_id": id, "name": name});
                        if let Some(ToolKind::Of { namespace, name }) = known {
                            call["name"] = json!(name);
                            call["namespace"] = json!(namespace);
                        }
                        ("fc", Kind::Function { call, arguments: String::new() })
                    }
                }
            }
            // Arguments belong to the call before them.
            Part::Arguments { .. } => return Ok(()),
        };
        let index = self.output.len();
        let number = xxh3_64(format!("{}/{index}", self.head.id).as_bytes());
        let open = Open { id: format!("{prefix}_{number:016x}{index:04x}"), kind };
        let mut events = Events { out, sequence: &mut self.sequence };
        let item = || json!({"output_index": index, "item": open.announced()});
        events.send("response.output_item.added", item)?;
        events.part("response.content_part.added", &open, index)?;
        self.open = Some(open);
        Ok(())
    }

    /// Completes the open item.
    fn close(&mut self, status: &str, out: Option<&mut Vec<u8>>) -> serde_json::Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let index = self.output.len();
        let mut events = Events { out, sequence: &mut self.sequence };
        let at = |field: &str, text: &str| json!({"item_id": open.id, "output_index": index, field: text});
        let mut text_of_call = String::new();
        match &mut open.kind {
            Kind::Message { text } => {
                events.send("response.output_text.done", || {
                    let mut event = at("text", text);
                    event["content_index"] = json!(0);
                    event["logprobs"] = json!([]);
                    event
                })?;
            }
            Kind::Reasoning { text } => {
                events.send("response.reasoning_text.done", || {
                    let mut event = at("text", text);
                    event["content_index"] = json!(0);
                    event
                })?;
            }
            Kind::Function { call, arguments } => {
                text_of_call = std::mem::take(arguments);
                events.send("response.function_call_arguments.done", || {
                    let mut event = at("arguments", &text_of_call);
                    event["name"] = call["name"].clone();
                    event
                })?;
            }
            Kind::Custom { input, .. } => {
                let rest;
                (text_of_call, rest) = std::mem::take(input).finish();
                let kind = "response.custom_tool_call_input.delta";
                events.piece(kind, (&open.id, index), &rest)?;
                let done = || at("input", &text_of_call);
                events.send("response.custom_tool_call_input.done", done)?;
            }
        }
        events.part("response.content_part.done", &open, index)?;
        let mut item = open.item(status, &text_of_call);
        if let (Kind::Reasoning { text }, true) = (&open.kind, self.head.sealed) {
            item["encrypted_content"] = json!(sealed(text));
        }
        let done = || json!({"output_index": index, "item": item});
        events.send("response.output_item.done", done)?;
        self.output.push(item);
        Ok(())
    }

    /// Appends an event that contains the response.
    fn tell(&mut self, name: &str, response: &Value, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let mut events = Events { out: Some(out), sequence: &mut self.sequence };
        events.send(name, || json!({"response": response}))
    }
}

fn told(usage: &Usage) -> Value {
    let cached = usage.prompt_tokens_details.map_or(0, |details| details.cached_tokens);
    let reasoning = usage.completion_tokens_details.map_or(0, |details| details.reasoning_tokens);
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

impl EventEncoder for Answer {
    fn delta(
        &mut self,
        _: u32,
        delta: &mut Delta,
        _: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        if !self.opened {
            self.opened = true;
            let response = self.state("in_progress");
            self.tell("response.created", &response, out)?;
            self.tell("response.in_progress", &response, out)?;
        }
        self.add(delta, Some(out))
    }

    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let response = self.complete(&tally.usage());
        let name = match self.finish {
            Some("length") => "response.incomplete",
            _ => "response.completed",
        };
        self.tell(name, &response, out)
    }

    fn is_said_done(&self) -> bool {
        false
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let response = self.failed(error);
        self.tell("response.failed", &response, out)
    }

    fn resumable(&self) -> bool {
        true
    }

    fn resume(&mut self, before: &Delta) {
        if before.tokens.is_empty() {
            return;
        }
        // Encodes the output that another brain has already sent, only to restore the state: its
        // events are not sent again.
        self.opened = true;
        let _ = self.add(before, None);
        self.sequence = EVENTS_A_TOKEN * (1 + before.tokens.len() as u64);
    }
}
