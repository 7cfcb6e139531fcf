//! A model's answer as Ollama's objects: as a whole, and as the lines of a stream.

use std::time::Instant;

use forebay_api::ApiError;
use forebay_dialect::Part;
use forebay_egress::{Delta, EventEncoder, Tally, events};
use serde_json::{Value, json};

use crate::routes::chat::CallIds;
use crate::shapes;

/// The route that determines the format of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Generate,
}

/// Builds the JSON objects of an answer.
pub(super) struct Writer {
    pub(super) kind: Kind,
    pub(super) model: String,
    pub(super) ids: CallIds,
    pub(super) arrived: Instant,
    /// The time of the first token.
    first: Option<Instant>,
    /// A call whose arguments are not complete: its id, index, name and arguments so far.
    call: Option<(String, u32, String, String)>,
}

impl Writer {
    pub(super) fn new(kind: Kind, model: String, ids: CallIds, arrived: Instant) -> Self {
        Self { kind, model, ids, arrived, first: None, call: None }
    }

    /// Returns the whole answer.
    pub(super) fn whole(mut self, delta: &Delta, tally: &Tally) -> Value {
        let mut said = Said::default();
        self.add(delta, &mut said);
        let mut answer = self.object(said);
        self.finish(&mut answer, delta.finish_reason(), tally);
        answer
    }

    /// Returns an answer without content: the model has been loaded or unloaded.
    pub(super) fn loaded(&self, unload: bool) -> Value {
        let mut answer = self.object(Said::default());
        answer["done"] = json!(true);
        answer["done_reason"] = json!(if unload { "unload" } else { "load" });
        answer
    }

    /// Adds the parts of a delta to `said`. A call is added once its arguments are complete.
    fn add(&mut self, delta: &Delta, said: &mut Said) {
        for part in delta.parts.iter() {
            if !matches!(part, Part::Arguments { .. }) {
                self.close(said);
            }
            match part {
                Part::Content(text) => said.content.push_str(text),
                Part::Reasoning(text) => said.thinking.push_str(text),
                Part::Call { index, name, id } => {
                    let id = id.map_or_else(|| self.ids.name(0, index), str::to_owned);
                    self.call = Some((id, index, name.to_owned(), String::new()));
                }
                Part::Arguments { text, .. } => {
                    if let Some((.., arguments)) = &mut self.call {
                        arguments.push_str(text);
                    }
                }
            }
        }
        if delta.end.is_some() {
            self.close(said);
        }
    }

    fn close(&mut self, said: &mut Said) {
        let Some((id, index, name, arguments)) = self.call.take() else { return };
        let read = serde_json::from_str(&arguments).ok().filter(Value::is_object);
        // Truncated arguments are not valid JSON.
        let read = read.unwrap_or_else(|| json!({"INVALID_JSON": arguments}));
        let function = json!({"index": index, "name": name, "arguments": read});
        said.calls.push(json!({"id": id, "function": function}));
    }

    fn object(&self, said: Said) -> Value {
        let mut object = json!({
            "model": self.model,
            "created_at": jiff::Timestamp::now().to_string(),
            "done": false,
        });
        match self.kind {
            Kind::Chat => {
                let mut message = json!({"role": "assistant", "content": said.content});
                if !said.thinking.is_empty() {
                    message["thinking"] = json!(said.thinking);
                }
                if !said.calls.is_empty() {
                    message["tool_calls"] = json!(said.calls);
                }
                object["message"] = message;
            }
            Kind::Generate => {
                object["response"] = json!(said.content);
                if !said.thinking.is_empty() {
                    object["thinking"] = json!(said.thinking);
                }
            }
        }
        object
    }

    /// Adds the fields of the last object. Durations are in nanoseconds.
    fn finish(&self, object: &mut Value, reason: Option<&str>, tally: &Tally) {
        let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(0);
        let (usage, total) = (tally.usage(), self.arrived.elapsed());
        let prompt = self.first.map_or(total, |first| first - self.arrived);
        object["done"] = json!(true);
        object["done_reason"] = json!(if reason == Some("length") { "length" } else { "stop" });
        object["total_duration"] = json!(nanoseconds(total));
        object["load_duration"] = json!(0);
        object["prompt_eval_count"] = json!(usage.prompt_tokens);
        object["eval_count"] = json!(usage.completion_tokens);
        // If the answer is not streamed, the time of its first token is not known, so the whole
        // time counts as generation.
        let (prompt, tokens) = match self.first {
            Some(_) => (prompt, total - prompt),
            None => (std::time::Duration::ZERO, total),
        };
        object["prompt_eval_duration"] = json!(nanoseconds(prompt));
        object["eval_duration"] = json!(nanoseconds(tokens));
    }
}

/// The content of one object.
#[derive(Default)]
struct Said {
    content: String,
    thinking: String,
    calls: Vec<Value>,
}

impl Said {
    fn is_empty(&self) -> bool {
        self.content.is_empty() && self.thinking.is_empty() && self.calls.is_empty()
    }
}

/// Writes the lines of a stream.
pub(super) struct Lines {
    writer: Writer,
    reason: Option<&'static str>,
}

impl Lines {
    pub(super) fn new(writer: Writer) -> Self {
        Self { writer, reason: None }
    }
}

impl EventEncoder for Lines {
    fn delta(
        &mut self,
        _: u32,
        delta: &mut Delta,
        _: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        if !delta.tokens.is_empty() {
            self.writer.first.get_or_insert_with(Instant::now);
        }
        let mut said = Said::default();
        self.writer.add(delta, &mut said);
        self.reason = delta.finish_reason();
        if said.is_empty() {
            return Ok(());
        }
        events::line(&self.writer.object(said), out)
    }

    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        let mut last = self.writer.object(Said::default());
        self.writer.finish(&mut last, self.reason, tally);
        events::line(&last, out)
    }

    fn is_said_done(&self) -> bool {
        false
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> serde_json::Result<()> {
        events::line(&shapes::ollama(error), out)
    }

    fn media_type(&self) -> &'static str {
        "application/x-ndjson"
    }

    fn resumable(&self) -> bool {
        // The format has no comments, in which a router could receive the data to resume.
        false
    }

    fn resume(&mut self, _: &Delta) {}
}
